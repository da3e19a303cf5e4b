"""Count of records whose prompts are too long for the model, for ``trinity-mq validate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_mq.config import Config, TasksetConfig
from trinity_mq.config.buffer.taskset import system_prompt_of
from trinity_mq.config.switches import SwitchError
from trinity_mq.data.records import Record, read_records
from trinity_mq.engines.generation.text import TextCodec, TextError
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import local_model_folder
from trinity_mq.operations.validate import is_plain

MOST_COUNTED = 5_000
"""Maximum number of prompts per taskset that are tokenized."""


def count_long_prompts(config: Config, tasksets: Sequence[TasksetConfig]) -> list[str]:
    """Return a line for each taskset with records whose prompts are too long for the model.

    The counted prompt is the system prompt of the record, else of the taskset, else of the workflow, plus the record's
    prompt and the reply prefix of the taskset. Each token has at least one byte, so prompts are tokenized only if these
    texts have more bytes than half the limit in tokens. Without such prompts the tokenizer is not loaded. The system
    prompts of plain workflows are short and are left out of this size, because reading them imports torch.
    """
    described = [taskset for taskset in tasksets if taskset.storage.holds_records]
    return [
        line for taskset in described for line in _counted(config, taskset, read_records(taskset, seed=config.seed)[0])
    ]


def _counted(config: Config, taskset: TasksetConfig, records: Sequence[Record]) -> list[str]:
    limit, truncates = config.model.max_model_len - 1, config.model.enable_prompt_truncation
    if truncates is not False:
        limit = min(config.model.max_prompt_tokens, limit)
    prefix = taskset.format.reply_prefix or ""
    texts = [
        (system_prompt_of(record, taskset.format.system_prompt_key), text + prefix)
        for record in records
        if isinstance(text := record.get(taskset.format.prompt_key), str)
    ]
    default = taskset.format.system_prompt or ("" if is_plain(taskset) else _system_prompt(taskset))
    candidates = [
        (system, text)
        for system, text in texts
        if len(((system or default) + text).encode("utf-8", "replace")) > limit // 2
    ]
    length = _length(config, taskset) if candidates else None
    if length is None:
        return []
    count = sum(length(system, text) > limit for system, text in candidates[:MOST_COUNTED])
    total = f"of the first {MOST_COUNTED} of {len(candidates)} long ones" if len(candidates) > MOST_COUNTED else ""
    total = total or f"of {len(records)}"
    return [_line(taskset.name, count, total, limit, truncates=bool(truncates))] if count else []


def _system_prompt(taskset: TasksetConfig) -> str:
    from trinity_mq.workflows import load_workflow  # imports torch

    return (
        taskset.format.system_prompt or getattr(load_workflow(taskset.workflow), "_default_system_prompt", None) or ""
    )


def _line(name: str, count: int, total: str, limit: int, *, truncates: bool) -> str:
    outcome = "will not be trained on (model.enable_prompt_truncation)" if truncates else "will fail"
    return (
        f"taskset {name!r}: the prompts of {count} {total} records have more than {limit} tokens, and these tasks "
        f"{outcome}: leave them out, or raise model.max_prompt_tokens and model.max_model_len"
    )


def _length(config: Config, taskset: TasksetConfig) -> Callable[[str | None, str], int] | None:
    """Return a function that counts the tokens of (system prompt or None, prompt). None: the tokenizer is not on this
    machine, or the model or its settings are not valid.
    """
    default = _system_prompt(taskset)
    if config.model.tiny is not None:  # each character is one token
        return lambda system, text: len(system or default) + len(text)
    try:
        folder = local_model_folder(str(config.model.model_path))
        if folder is None:
            return None
        codec = TextCodec.of_model(folder, config.model)
        switches = codec.switches(taskset.task_rollout_args) if codec.has_template else {}
    except (ModelError, SwitchError):  # check_models and check_switches report these errors
        return None
    return lambda system, text: _tokens(codec, system or default, text, switches)


def _tokens(codec: TextCodec, system: str, text: str, switches: Mapping[str, Any]) -> int:
    roles = [("system", system), ("user", text)] if system else [("user", text)]
    try:
        if codec.has_template:
            messages = [{"role": role, "content": content} for role, content in roles]
            return len(codec.encode(codec.render(messages, switches=switches)))
        return len(codec.encode(system + text, special=True))
    except TextError:  # the engine refuses this prompt for another reason
        return 0

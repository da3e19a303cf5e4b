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
UNREAD_BYTES = 512
"""Maximum bytes of the system prompt of a plain workflow. It is read only if a prompt may be too long with so many
bytes, because reading it imports torch.
"""
PROMPTLESS = frozenset({"simple_workflow", "async_simple_workflow"})
"""Plain workflows without a system prompt."""


def count_long_prompts(config: Config, tasksets: Sequence[TasksetConfig]) -> list[str]:
    """Return a line for each taskset with records whose prompts are too long for the model.

    The counted prompt is the system prompt of the record, else of the taskset, else of the workflow, plus the record's
    prompt and the reply prefix of the taskset. Each token has at least one byte, so prompts are tokenized only if these
    texts have more bytes than half the limit in tokens, or may exceed the limit with the system prompt of a plain
    workflow. Without such prompts the tokenizer is not loaded.
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
    default = taskset.format.system_prompt or ""
    is_unread = is_plain(taskset) and not default and taskset.workflow not in PROMPTLESS
    if not is_plain(taskset):
        default = _system_prompt(taskset)
    least = min(limit // 2, limit - UNREAD_BYTES) if is_unread else limit // 2
    candidates = [
        (system, text) for system, text in texts if len(((system or default) + text).encode("utf-8", "replace")) > least
    ]
    length = _length(config, taskset) if candidates else None
    if length is None:
        return []
    count = sum(length(system, text) > limit for system, text in candidates[:MOST_COUNTED])
    total = f"of the first {MOST_COUNTED} of {len(candidates)} long ones" if len(candidates) > MOST_COUNTED else ""
    total = total or f"of {len(records)}"
    return [_line(taskset.name, count, total, limit, truncates=bool(truncates))] if count else []


def _system_prompt(taskset: TasksetConfig) -> str:
    """Return the system prompt that the workflow gives to records without their own."""
    from trinity_mq.workflows import Task, load_workflow  # imports torch
    from trinity_mq.workflows.attributes import format_args_of
    from trinity_mq.workflows.builtin.simple import SimpleWorkflow

    kind, stated = load_workflow(taskset.workflow), taskset.format.system_prompt or ""
    if not issubclass(kind, SimpleWorkflow):
        return stated
    shape, reward_fn = format_args_of(taskset.format), taskset.reward_fn or None
    task = Task(kind, format_args=shape, workflow_args=taskset.workflow_args, reward_fn=reward_fn)
    try:
        workflow = object.__new__(kind)  # its constructor needs a model and a record
        workflow.task = task
        prompt = workflow.system_prompt
    except Exception:  # the class of a user may compute it from its record
        return stated
    return prompt if isinstance(prompt, str) else ""


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

"""Counts the records whose prompt is too long for the model, for ``trinity-mq validate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trinity_mq.config import Config, TasksetConfig
from trinity_mq.data.records import Record
from trinity_mq.models.engines.generation.text import TextCodec, TextError
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import known_folder

MOST_COUNTED = 20_000
"""Prompts of a taskset that are cut into tokens."""


def count_long_prompts(config: Config, taskset: TasksetConfig, records: Sequence[Record]) -> list[str]:
    """Return a line on the records whose prompts leave no room in the model, none if all fit.

    The prompt is the record's, with the taskset's system prompt. The tokenizer is loaded only where a prompt has more
    bytes than half the limit in tokens: a token has a byte or more.
    """
    limit = min(config.model.max_prompt_tokens, config.model.max_model_len - 1)
    system = taskset.format.system_prompt or ""
    texts = [text for record in records if isinstance(text := record.get(taskset.format.prompt_key), str)]
    candidates = [text for text in texts if len((system + text).encode("utf-8", "replace")) > limit // 2]
    length = _length(config, system) if candidates else None
    if length is None:
        return []
    count = sum(length(text) > limit for text in candidates[:MOST_COUNTED])
    among = f"of the first {MOST_COUNTED} of {len(candidates)} long ones" if len(candidates) > MOST_COUNTED else ""
    return [_line(taskset.name, count, among or f"of {len(records)}", limit)] if count else []


def _line(name: str, count: int, among: str, limit: int) -> str:
    return (
        f"taskset {name!r}: the prompts of {count} {among} records have more than {limit} tokens, and these tasks will "
        "fail: leave them out, or raise model.max_prompt_tokens and model.max_model_len"
    )


def _length(config: Config, system: str) -> Callable[[str], int] | None:
    """Return the function that counts the tokens of a prompt, None where the tokenizer is not on this machine."""
    if config.model.tiny is not None:  # a token for each character
        return lambda text: len(system) + len(text)
    try:
        folder = known_folder(str(config.model.model_path))
        codec = folder and TextCodec.load(folder, trust_remote_code=config.model.trust_remote_code)
    except ModelError:  # the check of the models tells of it
        return None
    return (lambda text: _tokens(codec, system, text)) if codec else None


def _tokens(codec: TextCodec, system: str, text: str) -> int:
    roles = [("system", system), ("user", text)] if system else [("user", text)]
    try:
        if codec.has_template:
            return len(codec.encode(codec.render([{"role": role, "content": content} for role, content in roles])))
        return len(codec.encode(system + text, special=True))
    except TextError:  # the engine refuses it for another reason
        return 0

"""Text and JSON forms of an experience: every token with its mask, logprob and advantage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from trinity_mq import terminal as output
from trinity_mq.messages.tasks import TRUTH
from trinity_mq.observability.experiences.token_texts import TokenTexts, spelled
from trinity_mq.terminal import escape_unsafe

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from trinity_mq.experience import Experience

COLUMNS = ("logprobs", "advantages", "returns", "teacher_logprobs", "token_level_reward")
"""Columns of the table of response tokens, in display order."""
FILE_WIDTH = 120
TITLES = {"advantages": "advantage", "teacher_logprobs": "teacher", "token_level_reward": "reward"}


def as_json(experience: Experience, texts: TokenTexts) -> dict[str, Any]:
    """Return an experience without multi-modal inputs and routed experts, for :func:`dump_line`."""
    ids = experience.tokens.tolist()
    fields: dict[str, Any] = {
        **experience.to_dict(),
        "uid": experience.eid.uid,
        "info": {key: _plain(value) for key, value in experience.info.items()},
        "tokens": ids,
        "token_texts": texts.of(ids),
        "reward": experience.reward,
    }
    for name in ("action_mask", *COLUMNS, "chosen", "rejected"):
        tensor: Tensor | None = getattr(experience, name)
        if tensor is not None:
            fields[name] = tensor.tolist()
    return fields


def json_fields() -> tuple[str, ...]:
    """Return the names of the fields that :func:`as_json` may return."""
    from trinity_mq.experience.record import READABLE_FIELDS

    return (*READABLE_FIELDS, "uid", "tokens", "token_texts", "action_mask", *COLUMNS, "chosen", "rejected")


def open_console(out: TextIO) -> Console:
    """Return a console on ``out``. A file or pipe gets a width that fits all columns."""
    return output.open_console(out, width=None if out.isatty() else FILE_WIDTH)


def print_title(console: Console, title: str, style: str) -> None:
    """Print a rule with a title. The title is not interpreted as markup."""
    from rich.text import Text

    console.rule(Text(escape_unsafe(title)), style=style)


def line(console: Console, name: str, value: str, style: str = "") -> None:
    """Print a value next to its name. Neither is interpreted as markup."""
    from rich.text import Text

    console.print(Text(escape_unsafe(f"{name:>10}  {value}"), style=style), soft_wrap=True)


def print_experience(console: Console, experience: Experience, texts: TokenTexts) -> None:
    """Print an experience with its token table."""
    print_title(console, f"experience {_place(experience)}", "cyan")
    for name, value in (*_facts(experience), *_conversation(experience)):
        line(console, name, value)
    ids = experience.tokens.tolist()
    prompt = ids[: experience.prompt_length]
    line(console, "prompt", f"{len(prompt)} tokens: {spelled(prompt, texts.of(prompt))}", "dim")
    if experience.experience_type == "dpo":
        for name in ("chosen", "rejected"):
            part = getattr(experience, name).tolist()
            line(console, name, f"{len(part)} tokens: {spelled(part, texts.of(part))}")
        return
    _table(console, experience, ids[experience.prompt_length :], texts)


def _place(experience: Experience) -> str:
    eid = experience.eid
    return f"batch {eid.batch} task {eid.task} run {eid.run} step {eid.step} [{eid.suffix}]"


def _facts(experience: Experience) -> Iterator[tuple[str, str]]:
    reward = "none" if experience.reward is None else f"{experience.reward:g}"
    advantage = ""
    if experience.advantages is not None and len(experience.advantages):
        trained = experience.advantages
        if experience.action_mask is not None and bool(experience.action_mask.any()):
            trained = trained[experience.action_mask]
        low, high = float(trained.min()), float(trained.max())
        advantage = f"   advantage {low:.4f}" + ("" if low == high else f" to {high:.4f}")
    yield "reward", reward + advantage
    if experience.versions:
        spans = ", ".join(f"{generation}.{step} from token {first}" for first, generation, step in experience.versions)
        yield "weights", spans if len(experience.versions) > 1 else spans.partition(" ")[0]
    kind = [experience.experience_type]
    if experience.temperature is not None:
        kind.append(f"temperature {experience.temperature:g}")
    if experience.truncate_status:
        kind.append(experience.truncate_status)
    if experience.taskset is not None or experience.index is not None:
        kind.append(f"record {experience.index} of {experience.taskset}")
    yield "type", ", ".join(kind)
    if experience.metrics:
        yield "metrics", ", ".join(f"{name}={value:g}" for name, value in experience.metrics.items())
    for name, value in experience.info.items():
        if name != TRUTH:
            yield "info", f"{name} = {_plain(value)!r}"


def _conversation(experience: Experience) -> Iterator[tuple[str, str]]:
    if experience.messages:
        for message in experience.messages:
            yield role_and_text(message)
    elif experience.prompt_text is not None:
        yield "asked", experience.prompt_text
    if experience.response_text is not None and not experience.messages:
        yield "answered", experience.response_text
    for name in ("chosen", "rejected"):
        for message in getattr(experience, f"{name}_messages") or ():
            role, text = role_and_text(message)
            yield f"{name}", f"{role}: {text}"
    if TRUTH in experience.info:
        yield "expected", str(_plain(experience.info[TRUTH]))


def role_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the role and text of a chat message. Content other than text, such as a tool call, is returned as JSON."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=repr)
    if calls := message.get("tool_calls"):
        text += f"{' ' if text else ''}calls {json.dumps(calls, ensure_ascii=False, default=repr)}"
    return str(message.get("role", "?")), text


def _table(console: Console, experience: Experience, response: list[int], texts: TokenTexts) -> None:
    from rich.table import Table
    from rich.text import Text

    mask = [] if experience.action_mask is None else experience.action_mask.tolist()
    columns = {name: tensor.tolist() for name in COLUMNS if (tensor := getattr(experience, name)) is not None}
    # a truncated prompt has no response; its placeholder rows have values but no tokens
    rows = max(map(len, (mask, *columns.values()))) if columns or mask else len(response)
    response = response[:rows]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("token", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", overflow="fold")
    for name in ("mask", *(TITLES.get(name, name.removesuffix("s")) for name in columns)):
        table.add_column(name, justify="right", no_wrap=True)
    token_texts = texts.of(response)
    for row in range(rows):
        has_token = row < len(response)
        text = token_texts[row] if has_token else None
        trained = row < len(mask) and mask[row]
        table.add_row(
            str(experience.prompt_length + row),
            str(response[row]) if has_token else "-",
            Text("-" if text is None else repr(text)),
            "1" if trained else "0",
            *(f"{column[row]:.4f}" if row < len(column) else "-" for column in columns.values()),
            style=None if trained else "dim",
        )
    console.print(table)


def _plain(value: Any) -> Any:
    """Return ``value`` with tensors and arrays, recognized by ``tolist``, converted to lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value

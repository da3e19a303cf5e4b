"""Merges turns of a conversation into one experience where each prompt continues the previous tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED, SINGLE_TURN, Versions


def merge_turns(experiences: Iterable[Experience]) -> list[Experience]:
    """Return ``experiences`` with each turn appended to the turn that it continues.

    A turn continues an earlier turn if its prompt begins with exactly the earlier turn's prompt and response tokens,
    and both were sampled at the same temperature. A turn is continued once: of several turns that branch off it, the
    first is appended and the others stay separate, because otherwise the common part would be trained on twice. The
    action mask of a merged experience covers the sampled tokens; tokens between the turns are masked and have logprob
    0. ``info["turns"]`` is the number of turns. The id comes from the first turn; response text, reward, info and
    metrics come from the last turn.
    """
    rows: list[list[Experience]] = []
    for experience in experiences:
        continued = [row for row in rows if _continues(experience, row[-1])]
        if continued:
            max(continued, key=lambda row: row[-1].tokens.shape[0]).append(experience)
        else:
            rows.append([experience])
    return [row[0] if len(row) == 1 else _merged(row) for row in rows]


def _continues(turn: Experience, earlier: Experience) -> bool:
    length = earlier.tokens.shape[0]
    return (
        turn.experience_type == earlier.experience_type == SINGLE_TURN
        and PROMPT_TRUNCATED not in (turn.truncate_status, earlier.truncate_status)
        and turn.temperature == earlier.temperature
        and length <= turn.prompt_length
        and torch.equal(turn.tokens[:length], earlier.tokens)
    )


def _merged(turns: list[Experience]) -> Experience:
    first, last = turns[0], turns[-1]
    size = last.tokens.shape[0] - first.prompt_length
    mask, logprobs = torch.zeros(size, dtype=torch.bool), torch.zeros(size)
    for turn in turns:
        sampled = slice(turn.prompt_length - first.prompt_length, turn.tokens.shape[0] - first.prompt_length)
        mask[sampled] = _present(turn.action_mask)
        logprobs[sampled] = _present(turn.logprobs)
    return Experience(
        eid=first.eid,
        tokens=last.tokens,
        logprobs=logprobs,
        action_mask=mask,
        prompt_length=first.prompt_length,
        reward=last.reward,
        prompt_text=first.prompt_text,
        response_text=last.response_text,
        truncate_status=last.truncate_status,
        versions=_versions(turns),
        temperature=first.temperature,
        info={**last.info, "turns": len(turns)},
        metrics=last.metrics,
        routed_experts=_routed_experts(turns),
    )


def _routed_experts(turns: list[Experience]) -> Tensor | None:
    """Return the experts of all tokens, each from the first turn that read the token; None if a turn has none."""
    parts: list[Tensor] = []
    size = 0
    for turn in turns:
        if turn.routed_experts is None:
            return None
        parts.append(turn.routed_experts[size:])
        size = len(turn.routed_experts)
    return torch.cat(parts)


def _present(column: Tensor | None) -> Tensor:
    assert column is not None  # recorded experiences have both columns
    return column


def _versions(turns: list[Experience]) -> Versions | None:
    """Return the run-length columns of the turns as one column; None if the versions of a turn are not known."""
    rows: Versions = []
    for turn in turns:
        if turn.versions is None:
            return None
        start = turn.prompt_length - turns[0].prompt_length
        for first, generation, step in turn.versions:
            if not rows or rows[-1][1:] != (generation, step):
                rows.append((start + first, generation, step))
    return rows

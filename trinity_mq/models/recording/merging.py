"""Merges turns of a conversation into one experience where each prompt continues the previous tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED, SINGLE_TURN, Versions


def merge_turns(experiences: Iterable[Experience]) -> list[Experience]:
    """Return ``experiences`` with each turn appended to the one it continues.

    A turn continues another where its prompt begins with exactly the tokens, prompt and response, of the other, and
    both were sampled at the same temperature. A turn is continued once: of several that branch off it the first is
    appended, the others stay, for otherwise the common part would be trained on twice. What the merged experience is
    trained on is what was sampled; tokens between the turns are masked and have logprob 0. ``info["turns"]`` says how
    many there are; identity is the first turn's, text of the response and whatever judges it the last one's.
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
    )


def _present(column: Tensor | None) -> Tensor:
    assert column is not None  # recorded experiences have both
    return column


def _versions(turns: list[Experience]) -> Versions | None:
    """Return the run-length columns of the turns as one; None where one is not known."""
    rows: Versions = []
    for turn in turns:
        if turn.versions is None:
            return None
        start = turn.prompt_length - turns[0].prompt_length
        for first, generation, step in turn.versions:
            if not rows or rows[-1][1:] != (generation, step):
                rows.append((start + first, generation, step))
    return rows

"""Texts about reviews of rollouts, and the connection to the stream of reviews."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from trinity_mq.errors import CommandError
from trinity_mq.reviews.ledger import Review, verdict_text
from trinity_mq.reviews.stream import NoReviews, ReviewStream
from trinity_mq.targets.connection import Target, open_bus
from trinity_mq.terminal import escape_to_one_line, escape_unsafe

SHOWN_TEXT = 60
"""Maximum characters of a prompt and of a response in the list."""


def as_dict(review: Review, now: float) -> dict[str, Any]:
    """Return a review as a JSON object."""
    request = review.request
    return {
        **request.model_dump(mode="json"),
        "seconds_left": round(max(0.0, request.deadline - now), 1),
        "verdict": None if review.verdict is None else review.verdict.model_dump(mode="json"),
        "closed": None if review.closed is None else review.closed.model_dump(mode="json"),
    }


def summary_lines(review: Review, now: float) -> list[str]:
    """Return up to three lines on a review: its state, the reasons why its rollout was selected, and the beginnings of
    the texts of the rollout's last call.
    """
    request = review.request
    call = request.calls[-1] if request.calls else None
    texts = "" if call is None else f"   {_begin(call.prompt)!r} -> {_begin(call.response)!r}"
    lines = [
        f"{request.request}  {_head(review, now)}",
        f"   {'; '.join(request.reasons)}",
        *([texts] if texts else []),
    ]
    return [escape_to_one_line(line) for line in lines]


def full_text(review: Review, now: float) -> str:
    """Return a review as a page of text."""
    request = review.request
    lines = [f"{request.request}  {_head(review, now)}", f"run: {request.uid}", f"why: {'; '.join(request.reasons)}"]
    if request.parts:
        lines.append("parts: " + ", ".join(f"{name} {value:g}" for name, value in request.parts.items()))
    for number, call in enumerate(request.calls):
        cut = ", cut at its limit" if call.truncated else ""
        lines += [f"-- step {number}: prompt", textwrap.indent(call.prompt, "   ")]
        lines += [f"-- step {number}: response{cut}", textwrap.indent(call.response, "   ")]
    if request.expected is not None:
        lines += ["-- expected", textwrap.indent(request.expected, "   ")]
    return escape_unsafe("\n".join(lines))


def _head(review: Review, now: float) -> str:
    request = review.request
    reward = "no reward" if request.reward is None else f"reward {request.reward:g}"
    default = request.default if request.default_reward is None else f"{request.default} {request.default_reward:g}"
    if review.closed is not None:
        state = f"decided: {verdict_text(review.closed)}"
    elif review.verdict is not None:
        state = f"has a verdict: {verdict_text(review.verdict)}"
    elif (remaining_s := request.deadline - now) > 0:
        state = f"{remaining_s:.0f} s left, then {default}"
    else:
        state = f"its time is over: {default} applies when an operator processes the batch"
    return f"batch {request.batch}, {reward}; {state}"


def _begin(text: str) -> str:
    return text if len(text) <= SHOWN_TEXT else f"{text[: SHOWN_TEXT - 3]}..."


def find_review(reviews: ReviewStream, prefix: str) -> Review:
    """Return the review whose id begins with ``prefix``.

    Raises:
        CommandError: No review or several reviews match.
    """
    matches = [review for review in reviews.ledger if review.request.request.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise CommandError(
            f"{prefix!r} begins {len(matches)} requests: give more characters of it (`trinity-mq review list`)"
        )
    raise CommandError(f"no request {prefix!r} is known: `trinity-mq review list --all` lists the known requests")


@asynccontextmanager
async def following(target: Target) -> AsyncIterator[ReviewStream]:
    """Open a bus to the run's broker, and follow the reviews of the run inside the block.

    Raises:
        CommandError: No operator of the run asks people.
    """
    async with open_bus(target, "review") as (bus, topology):
        try:
            async with ReviewStream(bus, topology).following() as reviews:
                yield reviews
        except NoReviews as error:
            raise CommandError(f"{error}; the operator `human_review` does (operator.operators)") from error

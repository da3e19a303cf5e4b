"""``trinity-mq review``: lists the runs that wait for a person's verdict, shows a run, and sends verdicts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from trinity_mq.cli.arguments import add_actions, add_broker
from trinity_mq.cli.arguments import add_target as add_target_and_settings
from trinity_mq.cli.broker.connection import Target, find_target, reached
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.cli.output import one_line, visible
from trinity_mq.messages import Verdict
from trinity_mq.reviews.ledger import Review, in_words
from trinity_mq.reviews.stream import NoReviews, ReviewStream

SHOWN_TEXT = 60
"""Maximum characters of a prompt and of a response in the list."""
COUNTED_WITHIN = 5.0
"""Seconds to wait for the operator's report that a verdict counted."""

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``trinity-mq review``."""
    add = add_actions(parser)
    listing = add("list", "list the runs that wait for a verdict", list_reviews)
    add_target_and_settings(listing)
    listing.add_argument("--all", action="store_true", help="those that are decided too")
    showing = add("show", "show one with its texts, its reward and why it was chosen", show)
    keeping = add("keep", "let it count as it is", give)
    dropping = add("drop", "leave it out of its batch", give)
    rewarding = add("reward", "give it another reward", give)
    for action in (showing, keeping, dropping, rewarding):
        add_target_and_settings(action)
        action.add_argument("id", metavar="ID", help="of the request, or the beginning of it")
    rewarding.add_argument("value", metavar="VALUE", type=float, help="the new reward")
    for action in (keeping, dropping, rewarding):
        action.add_argument("--note", default="", help="for people who read it later")
        action.add_argument("--by", default=None, help="who gives it (default: the user of this machine)")
    for action in (listing, showing, keeping, dropping, rewarding):
        add_broker(action)
        action.add_argument("--json", action="store_true", help="as JSON")


def list_reviews(arguments: argparse.Namespace) -> int:
    """Print the runs that wait for a verdict, one paragraph each. Return 0, even if the list is empty."""

    async def look(reviews: ReviewStream) -> list[Review]:
        return list(reviews.ledger) if arguments.all else reviews.pending()

    selection = _with_reviews(arguments, look)
    now = time.time()
    if arguments.json:
        print(json.dumps([as_dict(review, now) for review in selection], ensure_ascii=False))
    elif not selection:
        print("no run waits for a verdict")
    else:
        print("\n".join(line for review in selection for line in in_short(review, now)))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print one review with all its texts. Return 0."""

    async def look(reviews: ReviewStream) -> Review:
        return _find(reviews, arguments.id)

    review, now = _with_reviews(arguments, look), time.time()
    print(json.dumps(as_dict(review, now), ensure_ascii=False) if arguments.json else as_page(review, now))
    return 0


def give(arguments: argparse.Namespace) -> int:
    """Send a verdict and print whether it counts. Return 0, or 1 if it does not count."""
    verdict: Verdict = arguments.action
    reward = arguments.value if verdict == "reward" else None
    by = _user() if arguments.by is None else arguments.by

    async def send(reviews: ReviewStream) -> tuple[Review, str]:
        review = _find(reviews, arguments.id)
        request = review.request.request
        try:
            applied = await reviews.send(request, verdict, reward, by=by, note=arguments.note)
        except ValueError as error:
            raise CommandError(f"this verdict cannot be sent: {error}") from error
        if applied.taken == "new":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COUNTED_WITHIN):
                    await reviews.changed.until(lambda: review.closed is not None)
        return review, "" if applied.taken == "new" else applied.reason

    review, reason = _with_reviews(arguments, send)
    is_overridden = review.closed is not None and (review.closed.verdict, review.closed.reward) != (verdict, reward)
    if not reason and is_overridden and review.closed is not None:
        reason = f"it was closed meanwhile: {in_words(review.closed)}"
    if arguments.json:
        print(json.dumps({**as_dict(review, time.time()), "counts": not reason, "reason": reason}, ensure_ascii=False))
    elif reason:
        print(f"{review.request.request}: the verdict does not count: {reason}", file=sys.stderr)
    elif review.closed is None:
        print(f"{review.request.request}: noted; it counts once an operator has read it")
    else:
        print(f"{review.request.request}: {in_words(review.closed)} counts")
    return 1 if reason else 0


def as_dict(review: Review, now: float) -> dict[str, Any]:
    """Return a review as a JSON object."""
    request = review.request
    return {
        **request.model_dump(mode="json"),
        "seconds_left": round(max(0.0, request.deadline - now), 1),
        "verdict": None if review.verdict is None else review.verdict.model_dump(mode="json"),
        "closed": None if review.closed is None else review.closed.model_dump(mode="json"),
    }


def in_short(review: Review, now: float) -> list[str]:
    """Return up to three lines on a review: its state, the reasons for its selection, and the beginnings of its
    texts.
    """
    request = review.request
    call = request.calls[-1] if request.calls else None
    texts = "" if call is None else f"   {_begin(call.prompt)!r} -> {_begin(call.response)!r}"
    lines = [
        f"{request.request}  {_head(review, now)}",
        f"   {'; '.join(request.reasons)}",
        *([texts] if texts else []),
    ]
    return [one_line(line) for line in lines]


def as_page(review: Review, now: float) -> str:
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
    return visible("\n".join(lines))


def _head(review: Review, now: float) -> str:
    request = review.request
    reward = "no reward" if request.reward is None else f"reward {request.reward:g}"
    default = request.default if request.default_reward is None else f"{request.default} {request.default_reward:g}"
    if review.closed is not None:
        state = f"decided: {in_words(review.closed)}"
    elif review.verdict is not None:
        state = f"has a verdict: {in_words(review.verdict)}"
    elif (remaining_s := request.deadline - now) > 0:
        state = f"{remaining_s:.0f} s left, then {default}"
    else:
        state = f"its time is over: {default} counts once an operator takes the batch up"
    return f"batch {request.batch}, {reward}; {state}"


def _begin(text: str) -> str:
    return text if len(text) <= SHOWN_TEXT else f"{text[: SHOWN_TEXT - 3]}..."


def _find(reviews: ReviewStream, prefix: str) -> Review:
    """Return the review whose id begins with ``prefix``.

    Raises:
        CommandError: No review or several reviews match.
    """
    matches = [review for review in reviews.ledger if review.request.request.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise CommandError(f"{prefix!r} begins {len(matches)} requests: give more of it (`trinity-mq review list`)")
    raise CommandError(f"no request {prefix!r} is known: `trinity-mq review list --all` names those that are")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user of a container may have no name
        return ""


def _with_reviews(arguments: argparse.Namespace, work: Callable[[ReviewStream], Awaitable[T]]) -> T:
    return run_to_the_end(_run(find_target(arguments), work))


async def _run(target: Target, work: Callable[[ReviewStream], Awaitable[T]]) -> T:
    async with _following(target) as reviews:
        return await work(reviews)


@asynccontextmanager
async def _following(target: Target) -> AsyncIterator[ReviewStream]:
    async with reached(target, "review") as (bus, topology):
        try:
            async with ReviewStream(bus, topology).following() as reviews:
                yield reviews
        except NoReviews as error:
            raise CommandError(f"{error}; the operator `human_review` does (operator.operators)") from error

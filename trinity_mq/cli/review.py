"""``trinity-mq review``: lists the rollouts that wait for a person's verdict, shows one rollout, and sends verdicts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from trinity_mq.cli.arguments import add_actions, add_broker
from trinity_mq.cli.arguments import add_target as add_target_and_settings
from trinity_mq.errors import CommandError
from trinity_mq.messages import Verdict
from trinity_mq.operations.review import as_dict, find_review, following, full_text, summary_lines
from trinity_mq.reviews.ledger import Review, verdict_text
from trinity_mq.reviews.stream import ReviewStream
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import Target, find_target

COUNTED_WITHIN = 5.0
"""Seconds to wait for the operator's report that a verdict counted."""

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``trinity-mq review``."""
    add = add_actions(parser)
    listing = add("list", "list the runs that wait for a verdict", list_reviews)
    add_target_and_settings(listing)
    listing.add_argument("--all", action="store_true", help="include decided reviews")
    showing = add("show", "show a run with its texts, its reward and the reason for the review", show)
    keeping = add("keep", "accept the run unchanged", send_verdict)
    dropping = add("drop", "leave the run out of its batch", send_verdict)
    rewarding = add("reward", "give the run another reward", send_verdict)
    for action in (showing, keeping, dropping, rewarding):
        add_target_and_settings(action)
        action.add_argument("id", metavar="ID", help="id of the request, or its beginning")
    rewarding.add_argument("value", metavar="VALUE", type=float, help="the new reward")
    for action in (keeping, dropping, rewarding):
        action.add_argument("--note", default="", help="remark for later readers")
        action.add_argument("--by", default=None, help="who gives it (default: the user of this machine)")
    for action in (listing, showing, keeping, dropping, rewarding):
        add_broker(action)
        action.add_argument("--json", action="store_true", help="print JSON")


def list_reviews(arguments: argparse.Namespace) -> int:
    """Print the rollouts that wait for a verdict, or with ``--all`` also the decided reviews, a paragraph each. Return
    0, even if the list is empty.
    """

    async def look(reviews: ReviewStream) -> list[Review]:
        return list(reviews.ledger) if arguments.all else reviews.pending()

    selection = _with_reviews(arguments, look)
    now = time.time()
    if arguments.json:
        print(json.dumps([as_dict(review, now) for review in selection], ensure_ascii=False))
    elif not selection:
        arguments.is_last = True
        print("no run waits for a verdict")
    else:
        print("\n".join(line for review in selection for line in summary_lines(review, now)))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the review of one rollout with all its texts. Return 0."""

    async def look(reviews: ReviewStream) -> Review:
        return find_review(reviews, arguments.id)

    review, now = _with_reviews(arguments, look), time.time()
    print(json.dumps(as_dict(review, now), ensure_ascii=False) if arguments.json else full_text(review, now))
    return 0


def send_verdict(arguments: argparse.Namespace) -> int:
    """Send a verdict on a rollout and print whether it counts. Return 1 if it does not count, else 0, also if no
    operator has read it yet.
    """
    verdict: Verdict = arguments.action
    reward = arguments.value if verdict == "reward" else None
    by = _user() if arguments.by is None else arguments.by

    async def send(reviews: ReviewStream) -> tuple[Review, str]:
        review = find_review(reviews, arguments.id)
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
        reason = f"it was closed in the meantime: {verdict_text(review.closed)}"
    if arguments.json:
        print(json.dumps({**as_dict(review, time.time()), "counts": not reason, "reason": reason}, ensure_ascii=False))
    elif reason:
        print(f"{review.request.request}: the verdict does not count: {reason}", file=sys.stderr)
    elif review.closed is None:
        print(f"{review.request.request}: noted; it counts once an operator has read it")
    else:
        print(f"{review.request.request}: {verdict_text(review.closed)} counts")
    return 1 if reason else 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user of a container may have no name
        return ""


def _with_reviews(arguments: argparse.Namespace, work: Callable[[ReviewStream], Awaitable[T]]) -> T:
    return run_until_complete(_run(find_target(arguments), work))


async def _run(target: Target, work: Callable[[ReviewStream], Awaitable[T]]) -> T:
    async with following(target) as reviews:
        return await work(reviews)

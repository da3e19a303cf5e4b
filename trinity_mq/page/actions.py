"""Requests of the page that reach the broker: dead letters, reviews, commands to agents, and the runs on the broker."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Literal, get_args
from urllib.parse import unquote, urlsplit

from trinity_mq.bus import Bus, Topology
from trinity_mq.messages import ControlEvent, ReviewVerdict
from trinity_mq.observability.sources import BrokerSource
from trinity_mq.operations import dead_letters as dead
from trinity_mq.operations.doctor.facts import API_PATHS, DoctorFacts, ask_management, management_url
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.targets.connection import Target, open_bus

Verb = Literal["restart", "drain", "pause", "resume"]
LISTED = 200
"""Maximum number of listed dead letters."""


QUEUE = re.compile(r"tmq\.(?P<run>[a-z0-9-]{1,40})\.(?P<name>.+)")


class ActionError(Exception):
    """The request cannot be carried out; the message gives the reason and a remedy."""


class BrokerActions:
    """Requests to the broker.

    Args:
        source: Holds the connection to the run's broker while it is connected.
        stopped: Returns the run if its private broker does not run now, else None.
    """

    def __init__(self, source: BrokerSource, stopped: Callable[[], Target | None] = lambda: None) -> None:
        self._source, self._stopped = source, stopped
        self._starting = asyncio.Lock()
        self._cached_letters: tuple[int, list[dict[str, Any]]] | None = None
        """Time at which the run's folder was last locked, in nanoseconds since the epoch, and the dead letters
        read then. The private broker was started to read them. None: nothing is cached.
        """

    def _connection(self) -> tuple[Bus, Topology]:
        if self._source.bus is None or self._source.topology is None:
            raise ActionError(
                "there is no connection to the run's broker: it is not running, or cannot be reached; name another "
                "broker with --broker URL"
            )
        return self._source.bus, self._source.topology

    @contextlib.asynccontextmanager
    async def _reached(self, target: Target | None) -> AsyncIterator[tuple[Bus, Topology]]:
        """Open a bus to the run's broker. For ``target``, a run that does not run now, start its private broker and
        open a bus to it.
        """
        if target is None:
            yield self._connection()
            return
        async with open_bus(target, "dash") as connection:
            yield connection

    async def _stopped_broker(self) -> Target | None:
        return await asyncio.to_thread(self._stopped) if self._source.bus is None else None

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Return at most :data:`LISTED` dead letters, oldest first, without removing them. Dead letters of a private
        broker that does not run now are cached, because they change only after a process has locked the run's folder.

        Raises:
            ActionError: There is no connection, and no private broker to start.
        """
        async with self._starting:
            target = await self._stopped_broker()
            if (
                target is not None
                and self._cached_letters is not None
                and self._cached_letters[0] == _last_start(target)
            ):
                return self._cached_letters[1]
            async with self._reached(target) as (bus, topology):
                letters, _ = await dead.letters(bus, topology, LISTED)
            rows = [dict(zip(dead.COLUMNS, dead.row(letter), strict=True)) for letter in letters]
            self._cached_letters = None if target is None else (_last_start(target), rows)
            return rows

    async def runs(self) -> dict[str, Any]:
        """Return the runs on the same broker, and the reason if they are unknown."""
        if self._source.url is None:
            return {"broker": [], "unknown": "the broker of this run is not running"}
        rows, unknown = await broker_runs(self._source.url)
        return {"broker": rows, "unknown": unknown}

    async def replay(self, batches: set[str]) -> dict[str, Any]:
        """Publish dead batches again: only ``batches``, or all dead batches if ``batches`` is empty. Return a line for
        each published batch, a line for each problem, and the number of letters that stay in the queue.

        Raises:
            ActionError: There is no connection, and no private broker to start.
        """
        async with self._starting, self._reached(await self._stopped_broker()) as (bus, topology):
            republished, problems, remaining = await dead.republish_batches(bus, topology, batches)
        return {"republished": republished, "problems": problems, "kept": remaining}

    def reviews(self) -> list[dict[str, Any]]:
        """Return the rollouts that wait for the verdict of a person, in the order of their requests. The list is empty
        if no operator has asked for verdicts.
        """
        if self._source.reviews is None:
            return []
        return [review.request.model_dump(mode="json") for review in self._source.reviews.pending()]

    async def give_verdict(self, request: str, body: dict[str, Any]) -> dict[str, str]:
        """Give a verdict on a rollout. Return whether it was taken, and the reason if it was not.

        Raises:
            ActionError: No operator of the run asks for verdicts, or the broker is not reachable.
            ValueError: The verdict is not valid.
        """
        if self._source.reviews is None:
            self._connection()
            raise ActionError(
                "the stream of reviews is not read: no operator of this run asks for verdicts (operator human_review), "
                "or the broker does not answer now; try again once the page says that it is live"
            )
        verdict = ReviewVerdict.model_validate({**body, "request": request})
        applied = await self._source.reviews.send(
            request, verdict.verdict, verdict.reward, by=verdict.by or "dash", note=verdict.note
        )
        return {"taken": applied.taken, "reason": applied.reason}

    async def control(self, agent: str, verb: str) -> None:
        """Send a command to an agent.

        Raises:
            ActionError: There is no connection, the command does not exist, or the agent does not listen.
        """
        if verb not in get_args(Verb):
            raise ActionError(f"verb is {verb!r}, wanted one of {', '.join(get_args(Verb))}")
        bus, topology = self._connection()
        event = ControlEvent.model_validate({"verb": verb, "target": agent, "reason": "asked for on the page"})
        message = envelope(event, message_id=f"dash-{uuid.uuid4().hex}")
        if not await bus.publish(topology.exchange("control"), f"{verb}.{agent}", message):
            raise ActionError(f"no agent {agent!r} is listening; the table of agents shows the agents that are")


def _last_start(target: Target) -> int:
    """Return the time at which a process last locked the run's folder, in nanoseconds since the epoch."""
    folder = target.folder
    return 0 if folder is None else folder.last_locked_ns()


def runs_of(queues: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each run that has queues: its name, and its numbers of messages (dead letters included), dead
    letters, consumers and queues. Queues of other systems are skipped.

    A run without consumers is over or stopped.
    """
    rows: dict[str, dict[str, Any]] = {}
    for queue in queues:
        match = QUEUE.fullmatch(str(queue.get("name", "")))
        if match is None:
            continue
        row = rows.setdefault(
            match["run"], {"run": match["run"], "messages": 0, "dead": 0, "consumers": 0, "queues": 0}
        )
        messages = int(queue.get("messages") or 0)
        row["queues"] += 1
        row["consumers"] += int(queue.get("consumers") or 0)
        row["messages"] += messages
        if match["name"] == "dead":
            row["dead"] = messages
    return [rows[name] for name in sorted(rows)]


async def broker_runs(url: str) -> tuple[list[dict[str, Any]], str]:
    """Return the runs on a broker's virtual host, or an empty list and why they are unknown.

    Args:
        url: AMQP URL of the broker. Of several comma-separated URLs the first is used.
    """
    first = url.split(",", maxsplit=1)[0]
    parts = urlsplit(first)
    no_answers = dict.fromkeys(name for name in API_PATHS if name != "queues")
    facts = DoctorFacts(
        vhost=unquote(parts.path[1:]) or "/", user=unquote(parts.username or "guest"), clock=None, **no_answers
    )
    await ask_management(management_url(first, None), None, facts)
    queues = facts.get("queues")
    return (runs_of(queues), "") if queues is not None else ([], facts.why("queues"))

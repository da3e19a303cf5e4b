"""Requests of the page that reach the broker: dead letters, and commands to agents."""

from __future__ import annotations

import uuid
from typing import Any, Literal, get_args

from trinity_mq.bus import Bus, Topology
from trinity_mq.cli.commands import dead
from trinity_mq.cli.dash.broker_runs import broker_runs
from trinity_mq.cli.observe.sources import BrokerSource
from trinity_mq.messages import ControlEvent, ReviewVerdict
from trinity_mq.runtime.deliveries import envelope

Verb = Literal["restart", "drain", "pause", "resume"]
LISTED = 200
"""Dead letters that are listed at most."""


class ActionError(Exception):
    """The request cannot be done; the message says why, and what to do."""


class Actions:
    """Requests to the broker.

    Args:
        source: Holds the connection, while there is one.
    """

    def __init__(self, source: BrokerSource) -> None:
        self._source = source

    def _connection(self) -> tuple[Bus, Topology]:
        if self._source.bus is None or self._source.topology is None:
            raise ActionError(
                "there is no connection to the run's broker: it does not run, or is not reached; --broker URL names one"
            )
        return self._source.bus, self._source.topology

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Return dead letters, oldest first; they stay where they are.

        Raises:
            ActionError: There is no connection.
        """
        bus, topology = self._connection()
        letters, _ = await dead.letters(bus, topology, LISTED)
        return [dict(zip(dead.COLUMNS, dead.row(letter), strict=True)) for letter in letters]

    async def runs(self) -> dict[str, Any]:
        """Return the runs on the same broker, or why they are not known."""
        if self._source.url is None:
            return {"broker": [], "unknown": "no broker of this run is at work"}
        found, unknown = await broker_runs(self._source.url)
        return {"broker": found, "unknown": unknown}

    async def replay(self, batches: set[str]) -> dict[str, Any]:
        """Publish dead batches again, all or those of ``batches``.

        Raises:
            ActionError: There is no connection.
        """
        bus, topology = self._connection()
        republished, problems, kept = await dead.republish_batches(bus, topology, batches)
        return {"republished": republished, "problems": problems, "kept": kept}

    def reviews(self) -> list[dict[str, Any]]:
        """Return the runs that wait for a verdict, in the order in which they were asked about."""
        if self._source.reviews is None:
            return []
        return [review.request.model_dump(mode="json") for review in self._source.reviews.pending()]

    async def give_verdict(self, request: str, body: dict[str, Any]) -> dict[str, str]:
        """Give a verdict on a run, and return its effect.

        Raises:
            ActionError: Nobody is asked.
            ValueError: The verdict is none.
        """
        if self._source.reviews is None:
            raise ActionError("no operator of this run asks for verdicts (operator human_review)")
        given = ReviewVerdict.model_validate({**body, "request": request})
        applied = await self._source.reviews.send(
            request, given.verdict, given.reward, by=given.by or "dash", note=given.note
        )
        return {"taken": applied.taken, "reason": applied.reason}

    async def control(self, agent: str, verb: str) -> None:
        """Send a command to an agent.

        Raises:
            ActionError: There is no connection, or no such command.
        """
        if verb not in get_args(Verb):
            raise ActionError(f"verb is {verb!r}, wanted one of {', '.join(get_args(Verb))}")
        bus, topology = self._connection()
        event = ControlEvent.model_validate({"verb": verb, "target": agent, "reason": "asked for on the page"})
        message = envelope(event, message_id=f"dash-{uuid.uuid4().hex}")
        if not await bus.publish(topology.exchange("control"), f"{verb}.{agent}", message):
            raise ActionError(f"no agent {agent!r} listens; the table of agents names those that do")

"""What a runner sends of a slice: its experiences, confirmed, and then what became of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

import structlog
from pydantic import ValidationError

from trinity_mq.bus import Bus, MessageTooLarge, Topology
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import BrokerConfig
from trinity_mq.experience import DecodeError, EncodeError, Experience
from trinity_mq.messages import Outcome, TaskResult, TaskSlice, Version
from trinity_mq.runtime.blobs import BlobStore
from trinity_mq.runtime.errors import RestartMe
from trinity_mq.runtime.mail import envelope
from trinity_mq.runtime.notify import Notifier
from trinity_mq.scheduling.batch_blobs import Content, delete_blobs, part_name, stored
from trinity_mq.scheduling.parts import part_mail, slice_result, split_to_size
from trinity_mq.scheduling.status import SliceOutcome
from trinity_mq.scheduling.work import Work

log = structlog.get_logger(__name__)

RETURNED_PAUSE = 0.2
"""Seconds between tries of a part that came back although its queue exists, unless a beat comes first."""
SMALL = 64 * 1024
"""Bytes: what is smaller is encoded where it is. A thread costs more, and the loop waits for less than 1 ms."""
TOKEN_BYTES = 32
"""At most, in all fields together."""
PLAIN = frozenset({str, int, float, bool, type(None)})


class Reports:
    """Publishes for one runner.

    Args:
        bus: Connected by the time something is published.
        topology: The run's names.
        config: Sizes and compression.
        store: For what no message takes.
        runner: Whose reports they are.
        woken: Notified on beats.
        forgotten: Says whether nobody waits for a slice any more.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        config: BrokerConfig,
        store: BlobStore | None,
        *,
        runner: str,
        woken: Notifier,
        forgotten: Callable[[TaskSlice], bool],
    ) -> None:
        self._bus, self._topology, self._config, self._store = bus, topology, config, store
        self._runner, self._woken, self._forgotten = runner, woken, forgotten

    def result(self, work: Work, end: Outcome, message: str | None = None) -> TaskResult:
        """Return the result of a slice that leaves nothing."""
        return slice_result(
            work.piece,
            work.attempt,
            self._runner,
            end,
            message=message,
            seconds=work.seconds,
            returned=work.delivery.deliveries_before,
        )

    async def prepared(self, work: Work, outcome: SliceOutcome, end: Outcome) -> tuple[list[Content], TaskResult]:
        """Return the experience parts, stored where they are too large, and the result. Nothing is out before all of it
        is known to be fit to travel.

        Raises:
            StoreUnavailable: A part has to be stored, and cannot be.
        """
        piece, limit = work.piece, self._bus.max_message_bytes
        try:
            bodies: list[bytes] = []
            if piece.deliver != "none" and outcome.experiences:
                split = functools.partial(split_to_size, compression=self._config.compression, store=self._store)
                if is_small(outcome.experiences):
                    bodies = split(outcome.experiences, limit)
                else:
                    bodies = await asyncio.to_thread(split, outcome.experiences, limit)
            result = slice_result(
                piece,
                work.attempt,
                self._runner,
                end,
                outcome=outcome,
                parts=len(bodies),
                seconds=work.seconds,
                returned=work.delivery.deliveries_before,
            )
            contents = await stored(self._store, bodies, limit, lambda n: part_name(piece.ticket, work.attempt, n))
        except (EncodeError, DecodeError, MessageTooLarge, ValidationError) as error:
            log.warning("slice_unfit", ticket=piece.ticket, task=piece.task_id, reason=str(error))
            return [], self.result(work, "failed", str(error))
        return contents, result

    async def publish_parts(self, work: Work, contents: list[Content], oldest: Version | None) -> bool:
        """Publish the experiences, confirmed; False when nobody takes them any more, and then nothing is left of them
        in the store.
        """
        piece = work.piece
        queue = self._topology.batch_queue(piece.batch, piece.ticket) if contents else None
        key = self._topology.batch_routing_key(piece.batch, piece.ticket)
        exchange = self._topology.exchange("experiences")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + piece.slice_timeout
        for part, content in enumerate(contents):
            mail = part_mail(piece, work.attempt, part, len(contents), content, oldest)
            while not await self._bus.publish(exchange, key, mail):
                gone = queue is None or await self._bus.depth(queue.name) is None
                # a slice that was cut off is given time for what it has: its ticket is not listed any more, and waits
                cut_off = work.why is None and self._forgotten(piece)
                if gone or cut_off or loop.time() > give_up:
                    nobodys = [n for n, each in enumerate(contents) if not isinstance(each, bytes)]
                    await delete_blobs(self._store, *(part_name(piece.ticket, work.attempt, n) for n in nobodys))
                    return False
                # it exists unbound: about to be closed, and then missing from the explorer's next beat
                await self._woken.wait(RETURNED_PAUSE)
        return True

    async def report(self, work: Work, result: TaskResult) -> None:
        """Publish the result, confirmed.

        Raises:
            RestartMe: There is no stream of results.
        """
        mail = envelope(result, message_id=f"result-{result.attempt}")
        if not await self._bus.publish(self._topology.exchange("results"), batch_key(work.piece.batch), mail):
            raise RestartMe(f"{self._topology.results.name} does not exist any more; a start declares it again")


def is_small(experiences: Sequence[Experience]) -> bool:
    """Say whether experiences surely take less than ``SMALL`` bytes, by what can be seen at a glance."""
    size = 0
    for each in experiences:
        if (
            each.messages
            or each.tools
            or each.multi_modal_inputs
            or each.chosen is not None
            or each.routed_experts is not None
        ):
            return False
        size += TOKEN_BYTES * each.tokens.shape[0] + len(each.prompt_text or "") + len(each.response_text or "")
        for value in each.info.values():
            if type(value) not in PLAIN:
                return False
            size += len(value) if isinstance(value, str) else 0
    return size < SMALL

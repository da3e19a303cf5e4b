"""What a runner sends of a slice: its experiences, confirmed, and then what became of it.

What is small and ready at the same time travels together (shares.py, TaskResults): a message costs much more than what
is in it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

import structlog
from pydantic import ValidationError

from trinity_agents.runner.in_flight_slice import InFlightSlice
from trinity_mq.bus import Bus, MessageTooLarge, Topology
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import BrokerConfig
from trinity_mq.experience import DecodeError, EncodeError, Experience, ExperienceBatch
from trinity_mq.messages import BatchId, Outcome, TaskResult, TaskResults, TaskSlice, Version
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import RestartMe
from trinity_mq.runtime.notify import Notifier
from trinity_mq.transport.batch_blobs import Content, delete_blobs, part_name, stored
from trinity_mq.transport.batched_publish import BatchedPublish
from trinity_mq.transport.blobs import BlobStore
from trinity_mq.transport.co_batched_parts import Member, share_mail
from trinity_mq.transport.experience_parts import part_mail, split_to_size

log = structlog.get_logger(__name__)

MESSAGE_LIMIT = 2000
"""Characters of a failure's message that travel: a stream of results is no place for a workflow's whole output."""
RETURNED_PAUSE = 0.2
"""Seconds between tries of a part that came back although its queue exists, unless a beat comes first."""
REPLACED_PAUSE = 1.0
"""Seconds after which a batch queue that is missing, though its ticket is open, is looked for once more."""
SMALL = 64 * 1024
"""Bytes: what is smaller is encoded where it is, and shares a message. A thread costs more."""
SHARED = 256 * 1024
"""Bytes of a message that several attempts share, at most: the loop waits for it for about 1 ms."""
MOST_RESULTS = 64
"""In one message."""
CROWD = 8
"""Slices in hand from which on a message waits for company: others are likely to end soon."""
LINGER = 0.005
"""Seconds that it waits. Four times that leaves a third of two cores idle where tasks take no time at all."""
TOKEN_BYTES = 32
"""At most, in all fields together."""
PLAIN = frozenset({str, int, float, bool, type(None)})


class ResultPublisher:
    """Publishes for one runner.

    Args:
        bus: Connected by the time something is published.
        topology: The run's names.
        config: Sizes and compression.
        store: For what no message takes.
        runner: Whose reports they are.
        woken: Notified on beats.
        forgotten: Says whether nobody waits for a slice any more.
        in_hand: Says how many slices the runner has.
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
        in_hand: Callable[[], int],
    ) -> None:
        self._bus, self._topology, self._config, self._store = bus, topology, config, store
        self._in_hand = in_hand
        self._runner, self._woken, self._forgotten = runner, woken, forgotten
        self._shares = BatchedPublish(
            self._publish_shares, most=SHARED, weight=lambda member: member.size, linger=self._pause
        )
        self._results = BatchedPublish(self._publish_results, most=MOST_RESULTS, linger=self._pause)

    def result(self, work: InFlightSlice, end: Outcome, message: str | None = None) -> TaskResult:
        """Return the result of a slice that leaves nothing."""
        return slice_result(
            work.task_slice,
            work.attempt,
            self._runner,
            end,
            message=message,
            seconds=work.seconds,
            returned=work.delivery.deliveries_before,
        )

    async def deliver(self, work: InFlightSlice, outcome: SliceOutcome, end: Outcome) -> TaskResult:
        """Publish the experiences, confirmed, and return the result to report then. It is *late* when nobody takes them
        any more, and *failed* when they are not fit to travel: then none of them is out.

        Raises:
            StoreUnavailable: A part has to be stored, and cannot be.
        """
        task_slice = work.task_slice
        experiences = outcome.experiences if task_slice.deliver != "none" else []
        size = size_at_most(experiences)
        try:
            if not experiences:
                return self._done(work, outcome, end, parts=0)
            if size <= SMALL:
                result = self._done(work, outcome, end, parts=1)
                member = Member(task_slice, work.attempt, experiences, size, outcome.version_min)
                taken = await self._taken(work, functools.partial(self._share, member))
            else:
                contents = await self._contents(work, experiences, size)
                result = self._done(work, outcome, end, parts=len(contents))
                taken = await self._publish(work, contents, outcome.version_min)
        except (EncodeError, DecodeError, MessageTooLarge, ValidationError) as error:
            log.warning("slice_unfit", ticket=task_slice.ticket, task=task_slice.task_id, reason=str(error))
            return self.result(work, "failed", str(error))
        return result if taken else self.result(work, "late", "its batch is closed")

    async def report(self, work: InFlightSlice, result: TaskResult) -> None:
        """Publish the result, confirmed.

        Raises:
            RestartMe: There is no stream of results.
        """
        if not await self._results.ask(batch_key(work.task_slice.batch), result):
            raise RestartMe(f"{self._topology.results.name} does not exist any more; a start declares it again")

    async def close(self) -> None:
        """Drop what is not published yet."""
        await self._shares.close()
        await self._results.close()

    # -- inside

    def _pause(self) -> float:
        return LINGER if self._in_hand() >= CROWD else 0.0

    def _done(self, work: InFlightSlice, outcome: SliceOutcome, end: Outcome, *, parts: int) -> TaskResult:
        return slice_result(
            work.task_slice,
            work.attempt,
            self._runner,
            end,
            outcome=outcome,
            parts=parts,
            seconds=work.seconds,
            returned=work.delivery.deliveries_before,
        )

    async def _contents(self, work: InFlightSlice, experiences: list[Experience], size: int) -> list[Content]:
        """Return the parts of one attempt, stored where they are too large for a message."""
        limit = self._bus.max_message_bytes
        split = functools.partial(split_to_size, compression=self._config.compression, store=self._store)
        bodies = await asyncio.to_thread(split, experiences, limit)
        name = functools.partial(part_name, work.task_slice.ticket, work.attempt)
        return await stored(self._store, bodies, limit, name)

    async def _publish(self, work: InFlightSlice, contents: list[Content], oldest: Version | None) -> bool:
        """Publish the parts of one attempt; False when nobody takes them any more, and then nothing is left of them in
        the store.
        """
        task_slice = work.task_slice
        exchange, key = (
            self._topology.exchange("experiences"),
            self._topology.batch_routing_key(task_slice.batch, task_slice.ticket),
        )
        for part, content in enumerate(contents):
            mail = part_mail(task_slice, work.attempt, part, len(contents), content, oldest)
            if not await self._taken(work, functools.partial(self._bus.publish, exchange, key, mail)):
                nobodys = [n for n, each in enumerate(contents) if not isinstance(each, bytes)]
                await delete_blobs(self._store, *(part_name(task_slice.ticket, work.attempt, n) for n in nobodys))
                return False
        return True

    async def _taken(self, work: InFlightSlice, publish: Callable[[], Awaitable[bool]]) -> bool:
        """Publish until the batch queue takes it; False when nobody waits for it any more."""
        task_slice, loop = work.task_slice, asyncio.get_running_loop()
        give_up = loop.time() + task_slice.slice_timeout
        replaced = False
        while not await publish():
            gone = await self._bus.depth(self._topology.batch_queue(task_slice.batch, task_slice.ticket).name) is None
            forgotten = self._forgotten(task_slice)
            if gone and not forgotten and not replaced:
                replaced = True  # or so it seems: then it is there a moment later
                await asyncio.sleep(REPLACED_PAUSE)
                continue
            # a slice that was cut off is given time for what it has: its ticket is not listed any more, and waits
            if gone or (forgotten and work.why is None) or loop.time() > give_up:
                return False
            # it exists unbound: about to be closed, and then missing from the explorer's next beat
            await self._woken.wait(RETURNED_PAUSE)
        return True

    async def _share(self, member: Member) -> bool:
        answer = await self._shares.ask((member.task_slice.batch, member.task_slice.ticket), member)
        if isinstance(answer, EncodeError | MessageTooLarge):
            raise answer
        return answer

    async def _publish_shares(
        self, ticket: tuple[BatchId, str], members: list[Member]
    ) -> list[bool | EncodeError | MessageTooLarge]:
        """Publish the experiences of several attempts as one part; one that is unfit holds up no other."""
        experiences = [each for member in members for each in member.experiences]
        try:
            body = ExperienceBatch.of(experiences).encode(self._config.compression)
            first = members[0]
            mail = (
                part_mail(first.task_slice, first.attempt, 0, 1, body, first.oldest)
                if len(members) == 1
                else share_mail(members, body)
            )
            key = self._topology.batch_routing_key(*ticket)
            taken = await self._bus.publish(self._topology.exchange("experiences"), key, mail)
        except (EncodeError, MessageTooLarge) as error:
            if len(members) == 1:
                return [error]
            return [answer for member in members for answer in await self._publish_shares(ticket, [member])]
        return [taken] * len(members)

    async def _publish_results(self, batch: str, results: list[TaskResult]) -> list[bool]:
        if len(results) == 1:
            mail = envelope(results[0], message_id=f"result-{results[0].attempt}")
        else:
            ids = f"results-{results[0].attempt}+{len(results) - 1}"
            mail = envelope(TaskResults(results=results), message_id=ids, headers={"batch": results[0].batch})
        return [await self._bus.publish(self._topology.exchange("results"), batch, mail)] * len(results)


def size_at_most(experiences: Sequence[Experience]) -> int:
    """Return bytes that experiences surely fit into, more than ``SMALL`` where that cannot be said at a glance."""
    size = 0
    for each in experiences:
        if (
            each.messages
            or each.tools
            or each.multi_modal_inputs
            or each.chosen is not None
            or each.routed_experts is not None
        ):
            return SMALL + 1
        size += TOKEN_BYTES * each.tokens.shape[0] + len(each.prompt_text or "") + len(each.response_text or "")
        for value in each.info.values():
            if type(value) not in PLAIN:
                return SMALL + 1
            size += len(value) if isinstance(value, str) else 0
    return size


def end_of(task_slice: TaskSlice, outcome: SliceOutcome) -> Outcome:
    """Return how a slice ended whose workflow had its turn."""
    if len(outcome.runs) == task_slice.repeat_times:
        return "finished"
    return "partial" if outcome.runs else "failed"


def slice_result(
    task_slice: TaskSlice,
    attempt: str,
    runner: str,
    end: Outcome,
    *,
    parts: int = 0,
    outcome: SliceOutcome | None = None,
    message: str | None = None,
    seconds: float = 0.0,
    returned: int = 0,
) -> TaskResult:
    """Return what the explorer is told of an attempt; ``outcome`` is what the workflow left, if it had its turn.

    Raises:
        ValidationError: The outcome's metrics are no numbers.
    """
    done = outcome or SliceOutcome.failure(message or "")
    text = message if outcome is None else outcome.message
    return TaskResult(
        batch=task_slice.batch,
        ticket=task_slice.ticket,
        task_id=task_slice.task_id,
        run_base=task_slice.run_base,
        repeat_times=task_slice.repeat_times,
        attempt=attempt,
        outcome=end,
        runner=runner,
        returned=returned,
        runs=done.runs,
        parts=parts,
        metrics=done.metrics,
        message=text and text[:MESSAGE_LIMIT].encode(errors="replace").decode(),
        seconds=seconds,
        version_min=done.version_min,
        version_max=done.version_max,
    )

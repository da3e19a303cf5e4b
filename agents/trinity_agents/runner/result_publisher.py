"""Publishes the experiences of a slice with confirms, and then its outcome.

Small parts and results that are ready at the same time share a message (experience_parts.py, TaskResults), because a
message costs much more than its content. :class:`BatchedPublish` coalesces the concurrent calls.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

import structlog
from pydantic import ValidationError
from torch import Tensor

from trinity_agents.runner.in_flight_slice import InFlightSlice
from trinity_mq.bus import Bus, MessageTooLarge, Topology
from trinity_mq.bus.properties import HeaderValue
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import BrokerConfig
from trinity_mq.experience import DecodeError, EncodeError, Experience, ExperienceBatch
from trinity_mq.experience.fields import TENSOR_FIELDS
from trinity_mq.messages import BatchId, ContentError, Outcome, TaskResult, TaskResults, TaskSlice, Version
from trinity_mq.rollout.run_results import answer_texts
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry.trace import span
from trinity_mq.transport.batch_blobs import Content, delete_blobs, part_name, store_large_bodies
from trinity_mq.transport.blobs import BlobStore
from trinity_mq.transport.experience_parts import PartMember, part_message, shared_part_message, split_to_size

log = structlog.get_logger(__name__)

MESSAGE_LIMIT = 2000
"""Maximum characters of a failure message in a result; the results stream must not hold whole workflow outputs."""
RETURNED_PAUSE = 0.2
"""Seconds between attempts to publish a part that the broker returned although the batch queue exists, unless a
heartbeat arrives first."""
REPLACED_PAUSE = 1.0
"""Seconds after which a missing batch queue is checked a second time if its ticket is open."""
SHARED = 1024 * 1024
"""Maximum bytes of experiences that are encoded on the event loop and share a message with other attempts. This blocks
the loop for about 1 ms; a thread and a separate body for each attempt cost several times as much in total."""
EXPERIENCE_COST = SHARED // 128
"""Bytes that a smaller experience counts as, because encoding even a short experience takes time."""
MOST_RESULTS = 64
"""Maximum number of results in one message."""
CROWD = 8
"""Number of slices in flight from which a message waits for further content, because some slices are likely to end
soon."""
LINGER = 0.005
"""Seconds that a message waits for further content. With 0.02 s and very short tasks, two cores were idle for a third
of the time."""
PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types of ``info`` values whose size is cheap to estimate."""

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ResultPublisher:
    """Publishes the experiences and results of one runner.

    Args:
        bus: A bus that is connected before the first publish.
        topology: Names of the run's queues and exchanges.
        config: Size limits and compression.
        store: Blob store for content that is too large for a message.
        runner: Id of the runner.
        woken: Notified on heartbeats.
        abandoned: Returns whether the owner of a slice does not wait for it any more.
        in_flight_count: Returns the number of slices in flight at the runner.
        keeps_answers: True: results of evaluations contain the answers.
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
        abandoned: Callable[[TaskSlice], bool],
        in_flight_count: Callable[[], int],
        keeps_answers: bool = False,
    ) -> None:
        self._bus, self._topology, self._config, self._store = bus, topology, config, store
        self._in_flight_count, self._keeps_answers = in_flight_count, keeps_answers
        self._runner, self._woken, self._abandoned = runner, woken, abandoned
        self._shared_limit = min(SHARED, config.max_message_bytes // 2)
        self._shared_parts = BatchedPublish(
            self._publish_shared_part,
            max_batch_size=self._shared_limit,
            size_of=lambda member: member.size,
            linger_seconds=self._pause,
        )
        self._results = BatchedPublish(self._publish_results, max_batch_size=MOST_RESULTS, linger_seconds=self._pause)

    def result(
        self,
        in_flight: InFlightSlice,
        end: Outcome,
        *,
        outcome: SliceOutcome | None = None,
        parts: int = 0,
        message: str | None = None,
        kind: str | None = None,
    ) -> TaskResult:
        """Return the result of a slice.

        ``outcome`` is the workflow's outcome, whose finished runs count. Without ``outcome`` no run counts, and
        ``message`` and ``kind`` describe the failure.

        Raises:
            ValidationError: The outcome's metrics are not numbers.
        """
        task_slice, outcome = in_flight.task_slice, outcome or SliceOutcome(message=message, failure_kind=kind)
        text = outcome.message
        return TaskResult(
            batch=task_slice.batch,
            ticket=task_slice.ticket,
            task_id=task_slice.task_id,
            run_base=task_slice.run_base,
            repeat_times=task_slice.repeat_times,
            attempt=in_flight.attempt,
            outcome=end,
            runner=self._runner,
            returned=in_flight.past.count,
            runs=outcome.runs,
            parts=parts,
            metrics=outcome.metrics,
            answers=answer_texts(outcome) if self._keeps_answers and task_slice.lane == "eval" else [],
            message=text and text[:MESSAGE_LIMIT].encode(errors="replace").decode(),
            failure_kind=outcome.failure_kind,
            seconds=in_flight.seconds,
            version_min=outcome.version_min,
            version_max=outcome.version_max,
        )

    async def deliver(self, in_flight: InFlightSlice, outcome: SliceOutcome, end: Outcome) -> TaskResult:
        """Publish the experiences with confirms, and return the result to report next.

        The result is *late* if the batch queue does not take the experiences any more. It is *failed* if they cannot be
        encoded or are too large; then no experience was published.

        Raises:
            StoreUnavailable: A part is too large for a message and cannot be stored.
        """
        task_slice = in_flight.task_slice
        experiences = outcome.experiences if task_slice.deliver != "none" else []
        size = max_encoded_size(experiences)
        try:
            if not experiences:
                return self.result(in_flight, end, outcome=outcome)
            if size <= self._shared_limit:
                result = self.result(in_flight, end, outcome=outcome, parts=1)
                member = PartMember(task_slice, in_flight.attempt, experiences, size, outcome.version_min)
                ticket = (task_slice.batch, task_slice.ticket, in_flight.delivery.run_id)
                taken = await self._taken(in_flight, functools.partial(self._shared_parts.publish, ticket, member))
            else:
                contents = await self._contents(in_flight, experiences)
                result = self.result(in_flight, end, outcome=outcome, parts=len(contents))
                taken = await self._publish(in_flight, contents, outcome.version_min)
        except (EncodeError, DecodeError, MessageTooLarge, ValidationError) as error:
            log.warning("slice_unfit", ticket=task_slice.ticket, task=task_slice.task_id, reason=str(error))
            return self.result(in_flight, "failed", message=str(error), kind="workflow")
        return result if taken else self.result(in_flight, "late", message="its batch is closed")

    async def report(self, in_flight: InFlightSlice, result: TaskResult) -> None:
        """Publish the result with a confirm. A result that does not fit into a message is published without its
        answers, and if that is not enough, or a message cannot carry its content, as *failed*.

        Raises:
            RestartRequested: The stream of results does not exist.
        """
        key = (batch_key(in_flight.task_slice.batch), in_flight.delivery.run_id)
        try:
            taken = await self._results.publish(key, result)
        except ContentError as error:
            taken = await self._results.publish(
                key, self.result(in_flight, "failed", message=str(error), kind="workflow")
            )
        except MessageTooLarge as error:
            if result.answers:
                await self.report(in_flight, result.model_copy(update={"answers": []}))
                return
            reason = f"{error}; or lower explorer.max_repeat_times_per_runner: the metrics of all runs travel together"
            taken = await self._results.publish(key, self.result(in_flight, "failed", message=reason, kind="workflow"))
        if not taken:
            raise RestartRequested(
                f"{self._topology.results.name} does not exist any more; a restart declares it again"
            )

    async def close(self) -> None:
        """Drop all content that is not published yet; callers that wait for it are cancelled."""
        await self._shared_parts.close()
        await self._results.close()

    # -- private

    def _pause(self) -> float:
        return LINGER if self._in_flight_count() >= CROWD else 0.0

    async def _contents(self, in_flight: InFlightSlice, experiences: list[Experience]) -> list[Content]:
        """Return the parts of one attempt; parts that are too large for a message are stored as blobs."""
        limit = self._bus.max_message_bytes
        split = functools.partial(split_to_size, compression=self._config.compression, store=self._store)
        with span("encode experiences", threads=True):
            bodies = await asyncio.to_thread(split, experiences, limit)
        name = functools.partial(part_name, in_flight.task_slice.ticket, in_flight.attempt)
        return await store_large_bodies(self._store, bodies, limit, name)

    async def _publish(self, in_flight: InFlightSlice, contents: list[Content], oldest: Version | None) -> bool:
        """Publish the parts of one attempt; return False if the batch queue does not take them any more.

        In this case the blobs of the attempt are deleted.
        """
        task_slice = in_flight.task_slice
        exchange = self._topology.exchange("experiences")
        key = self._topology.batch_routing_key(task_slice.batch, task_slice.ticket)
        for part, content in enumerate(contents):
            message = part_message(task_slice, in_flight.attempt, part, len(contents), content, oldest)
            message = message.of_run(in_flight.delivery.run_id)
            if not await self._taken(in_flight, functools.partial(self._bus.publish, exchange, key, message)):
                orphans = [n for n, content in enumerate(contents) if not isinstance(content, bytes)]
                await delete_blobs(self._store, *(part_name(task_slice.ticket, in_flight.attempt, n) for n in orphans))
                return False
        return True

    async def _taken(self, in_flight: InFlightSlice, publish: Callable[[], Awaitable[bool]]) -> bool:
        """Publish until the batch queue takes the message. Return False if the slice is not wanted any more, or if the
        queue has not taken the message within the slice's time limit.
        """
        task_slice, loop = in_flight.task_slice, asyncio.get_running_loop()
        give_up = loop.time() + task_slice.slice_timeout
        replaced = False
        while not await publish():
            is_missing = (
                await self._bus.depth(self._topology.batch_queue(task_slice.batch, task_slice.ticket).name) is None
            )
            abandoned = self._abandoned(task_slice)
            if is_missing and not abandoned and not replaced:
                replaced = True  # the queue may just be recreated, so it is checked again
                await asyncio.sleep(REPLACED_PAUSE)
                continue
            # A slice that was cut off may still publish its runs: its ticket is not listed any more but still waits.
            if is_missing or (abandoned and in_flight.why is None) or loop.time() > give_up:
                return False
            # The queue exists but is unbound: the batch is about to be closed, and the next heartbeat will not list it.
            await self._woken.wait(RETURNED_PAUSE)
        return True

    async def _publish_shared_part(
        self, ticket: tuple[BatchId, str, str | None], members: list[PartMember]
    ) -> list[bool | Exception]:
        """Publish the experiences of several attempts as one part; an unfit attempt does not affect other attempts."""
        batch, name, run_id = ticket
        try:
            with span("encode experiences", batch) as traced:
                body = ExperienceBatch.of(
                    [experience for member in members for experience in member.experiences]
                ).encode(self._config.compression)
                traced.size, traced.count = len(body), len(members)
            key = self._topology.batch_routing_key(batch, name)
            message = shared_part_message(members, body).of_run(run_id)
            taken = await self._bus.publish(self._topology.exchange("experiences"), key, message)
        except (EncodeError, MessageTooLarge) as error:
            if len(members) == 1:
                return [error]
            return [answer for member in members for answer in await self._publish_shared_part(ticket, [member])]
        return [taken] * len(members)

    async def _publish_results(self, key: tuple[str, str | None], results: list[TaskResult]) -> list[bool | Exception]:
        """Publish results in one message, or in several messages if they are too large together."""
        batch, run_id = key
        try:
            with span("encode results", results[0].batch, count=len(results)) as traced:
                if len(results) == 1:
                    message = envelope(results[0], message_id=f"result-{results[0].attempt}")
                else:
                    ids = f"results-{results[0].attempt}+{len(results) - 1}"
                    named: dict[str, HeaderValue] = {"batch": results[0].batch}
                    message = envelope(TaskResults(results=results), message_id=ids, headers=named)
                traced.size = len(message.body)
            exchange = self._topology.exchange("results")
            return [await self._bus.publish(exchange, batch, message.of_run(run_id))] * len(results)
        except (MessageTooLarge, ContentError) as error:
            if len(results) == 1:
                return [error]
            half = len(results) // 2
            return [
                *await self._publish_results(key, results[:half]),
                *await self._publish_results(key, results[half:]),
            ]


def max_encoded_size(experiences: Sequence[Experience]) -> int:
    """Return a cheap upper bound of the encoded bytes of texts and tensors, with at least ``EXPERIENCE_COST`` per
    experience.

    The result is more than ``SHARED`` if no cheap bound is possible.
    """
    size = 0
    for experience in experiences:
        if experience.messages or experience.tools or experience.multi_modal_inputs or experience.custom_fields:
            return SHARED + 1
        texts = (experience.prompt_text or "", experience.response_text or "")
        experience_bytes, fields = sum(map(_max_text_bytes, texts)), vars(experience)
        for name in TENSOR_FIELDS:
            value = fields[name]
            if value is None:
                continue
            if not isinstance(value, Tensor):
                return SHARED + 1
            experience_bytes += value.nbytes
        for value in experience.info.values():
            if type(value) not in PLAIN:
                return SHARED + 1
            experience_bytes += _max_text_bytes(value) if isinstance(value, str) else 0
        size += max(experience_bytes, EXPERIENCE_COST)
    return size


def _max_text_bytes(text: str) -> int:
    """Return an upper bound of the bytes of a text in UTF-8, without encoding it."""
    return len(text) if text.isascii() else 4 * len(text)


class BatchedPublish(Generic[Key, Item, Answer]):
    """Batches items per key: items that arrive during a call are processed by the next call. Each call is made after
    ``linger_seconds``, by default at once.

    Args:
        call: Processes several items of one key. It returns an answer or an exception for each item. If it raises, its
            exception is raised for every item.
        max_batch_size: Maximum total size of the items of one call. A single item may be larger.
        size_of: Returns the size of an item.
        linger_seconds: Returns the seconds to wait for further items before a call.
    """

    def __init__(
        self,
        call: Callable[[Key, list[Item]], Awaitable[Sequence[Answer | Exception]]],
        *,
        max_batch_size: int,
        size_of: Callable[[Item], int] = lambda item: 1,
        linger_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._call, self._max_batch_size = call, max_batch_size
        self._size_of, self._linger_seconds = size_of, linger_seconds
        self._waiting: dict[Key, deque[tuple[Item, asyncio.Future[Answer]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, key: Key, item: Item) -> Answer:
        """Process ``item`` in a batch and return its answer, or raise its exception. A cancelled caller does not learn
        the outcome.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if key in self._waiting:
            self._waiting[key].append((item, future))
        else:
            self._waiting[key] = deque([(item, future)])
            task = asyncio.create_task(self._serve(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def close(self) -> None:
        """Cancel the running calls and all waiting items."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, key: Key) -> None:
        waiting = self._waiting[key]
        group: list[tuple[Item, asyncio.Future[Answer]]] = []
        try:
            while waiting:
                if (seconds := self._linger_seconds()) > 0.0:
                    await asyncio.sleep(seconds)
                group = self._next(waiting)
                answered: list[tuple[tuple[Item, asyncio.Future[Answer]], Answer | Exception]]
                try:
                    answers = await self._call(key, [item for item, _ in group])
                    answered = list(zip(group, answers, strict=True))
                except Exception as error:
                    answered = [(entry, error) for entry in group]
                for (_, future), answer in answered:
                    if future.done():
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
        finally:
            del self._waiting[key]
            for _, future in (*group, *waiting):
                future.cancel()

    def _next(self, waiting: deque[tuple[Item, asyncio.Future[Answer]]]) -> list[tuple[Item, asyncio.Future[Answer]]]:
        group = [waiting.popleft()]
        total = self._size_of(group[0][0])
        while waiting and (total := total + self._size_of(waiting[0][0])) <= self._max_batch_size:
            group.append(waiting.popleft())
        return group

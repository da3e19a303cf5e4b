"""Runs the operator chain on the parts of a batch, and splits the result into chunks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from trinity_agents.operator.reviews import BatchReviews
from trinity_mq.bus import Bus, Incoming, QueueGone, Topology
from trinity_mq.config import Config
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.messages import BatchClosed
from trinity_mq.models.auxiliary_clients import auxiliary_clients
from trinity_mq.models.engine_selection import EngineSelector
from trinity_mq.operators import AdvantageOperator, ExperienceOperatorV1, create_operators, run_chain
from trinity_mq.operators.outcome_metrics import outcome_metrics
from trinity_mq.runtime.deliveries import REFERENCE
from trinity_mq.runtime.peers import Peers
from trinity_mq.telemetry.group_drops import LEFT_OUT
from trinity_mq.telemetry.trace import span
from trinity_mq.transport.batch_blobs import Content, chunk_name, store_large_bodies
from trinity_mq.transport.blobs import BlobStore, run_with_store_retries
from trinity_mq.transport.experience_parts import ReceivedPart, decode_parts, split_to_size


@dataclass(frozen=True)
class ProcessedBatch:
    """Result of the operator chain on a batch."""

    processing_id: str
    """Unique id of this processing, part of the names of its messages and blobs."""
    chunks: list[Content]
    experiences: int
    metrics: dict[str, float]
    filtered_groups: int
    """Number of groups that the operators removed completely."""
    bad: list[tuple[Incoming, str]]
    """Parts that do not decode, each with its reason."""


class ChainRun:
    """The operator chain of a run, with its auxiliary clients and, if operators ask people, the run's reviews.

    Args:
        config: The run's configuration.
        bus: A connected bus.
        topology: The run's names.
        store: Blob store of the run.
        peers: Heartbeats of the run's agents.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        config: Config,
        bus: Bus,
        topology: Topology,
        store: BlobStore | None,
        peers: Peers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._bus, self._topology, self._store, self._peers = config, bus, topology, store, peers
        self._clock = clock
        self._chain: list[ExperienceOperatorV1] = []
        self._reviews: BatchReviews | None = None

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Create and prepare the operators; ``stack`` closes them."""
        names = [model.name for model in self._config.explorer.auxiliary_models]
        clients = auxiliary_clients(names, EngineSelector(lambda: self._peers.alive("engine")).auxiliary)
        self._chain = create_operators(self._config.operator.operators, clients)
        self._chain.append(AdvantageOperator(self._config.algorithm))
        for client in (client for model_clients in clients.values() for client in model_clients):
            stack.push_async_callback(client.close)
        await self._open_reviews(stack)
        for operator in self._chain:
            stack.push_async_callback(operator.close)
            await operator.prepare()

    async def _open_reviews(self, stack: contextlib.AsyncExitStack) -> None:
        asking = [operator for operator in self._chain if operator.asks_people]
        if not asking:
            return
        self._reviews = BatchReviews(self._bus, self._topology, self._clock)
        following = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(following.create_task(self._reviews.stream.follow(), name="follow reviews").cancel)
        for operator in asking:
            operator.set_reviews(self._reviews)

    def unanswered(self) -> tuple[int, float]:
        """Return the number of runs that wait for a person's verdict, and the seconds until the defaults count."""
        return (0, 0.0) if self._reviews is None else self._reviews.unanswered()

    async def process(self, manifest: BatchClosed, parts: Collection[ReceivedPart]) -> ProcessedBatch:
        """Return the result of the chain on the parts; chunks that are too large for a message are stored as blobs.

        Raises:
            QueueGone: Another operator has processed the batch in the meantime, and deleted the blobs of the parts.
            StoreUnavailable: A blob of the parts cannot be read now, or a chunk cannot be stored.
            OperatorError: The chain failed.
        """
        loop, processing_id, limit = asyncio.get_running_loop(), uuid.uuid4().hex, self._bus.max_message_bytes
        is_stored = any(part.incoming.content_type == REFERENCE for part in parts)
        with span("decode parts", threads=True):
            experiences, bad = await (run_with_store_retries if is_stored else asyncio.to_thread)(
                decode_parts, parts, self._store
            )
        if bad and await self._bus.depth(self._topology.batch_queue(manifest.batch, manifest.ticket).name) is None:
            raise QueueGone(manifest.ticket)
        with span("measure outcomes", threads=True):
            outcomes = await asyncio.to_thread(lambda: outcome_metrics(ExperienceBatch.of(experiences)))
        if self._reviews is not None:
            self._reviews.begin(manifest)
        started = loop.time()
        with span("run operators", threads=True):
            remaining, metrics = await run_chain(self._chain, experiences, timeout=self._config.operator.timeout)
        metrics |= outcomes
        metrics["time/operators"] = loop.time() - started
        with span("count groups", threads=True):
            filtered = await asyncio.to_thread(lost_groups, experiences, remaining)
        metrics[LEFT_OUT.metric] = float(filtered)
        split = functools.partial(split_to_size, compression=self._config.broker.compression, store=self._store)
        with span("encode chunks", threads=True) as traced:
            bodies = await asyncio.to_thread(split, remaining, limit)
            traced.size = sum(map(len, bodies))
        name = functools.partial(chunk_name, manifest.ticket, processing_id)
        chunks = await store_large_bodies(self._store, bodies, limit, name)
        metrics["experience_pipeline/chunks_by_reference"] = float(
            sum(not isinstance(content, bytes) for content in chunks)
        )
        return ProcessedBatch(processing_id, chunks, len(remaining), metrics, filtered, bad)


def lost_groups(before: Sequence[Experience], after: Sequence[Experience]) -> int:
    """Return the number of groups (``eid.tid``) that have experiences in ``before`` but not in ``after``."""
    return len(set(ExperienceBatch.of(before).ids("tid")) - {*ExperienceBatch.of(after).ids("tid")})

"""Runs the operator chain on the parts of a batch, and splits the result into chunks.

Operators get clients of auxiliary models (:func:`auxiliary_clients`) and ask people over the stream of reviews
(:class:`BatchReviews`). The outcome metrics describe the answers as the runners sent them, before any operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import structlog

from trinity_mq.algorithms.estimators.runs import deviation, run_values, scores
from trinity_mq.bus import Bus, BusError, Incoming, QueueGone, Topology
from trinity_mq.config import Config
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchClosed, BatchId, ReviewClosed, ReviewRequest, ReviewVerdict
from trinity_mq.models.engine_selection import EngineSelector
from trinity_mq.models.inference import InferenceModel
from trinity_mq.operators import AdvantageOperator, ExperienceOperatorV1, create_operators, run_chain
from trinity_mq.reviews.base import Answer, Decision, Question
from trinity_mq.reviews.stream import CLOSED, REQUEST, ReviewStream
from trinity_mq.runtime.deliveries import REFERENCE
from trinity_mq.runtime.peers import Peers
from trinity_mq.telemetry.group_drops import LEFT_OUT
from trinity_mq.telemetry.trace import span
from trinity_mq.transport.batch_blobs import Content, chunk_name, store_large_bodies
from trinity_mq.transport.blobs import BlobStore, run_with_store_retries
from trinity_mq.transport.experience_parts import ReceivedPart, decode_parts, split_to_size

if TYPE_CHECKING:
    import openai

TIMEOUT = 600.0
"""Seconds for one answer of an auxiliary model."""
RETRIES = 5
"""Retries of a request to an auxiliary model if no engine is alive or the engine serves nothing at present."""
log = structlog.get_logger(__name__)
CLOSE_WITHIN = 10.0
"""Maximum seconds to publish the final answer after a verdict or the deadline; after that the answer counts although it
is not published.
"""


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
        topology: Names of the run's queues and exchanges.
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
        """Return the number of rollout runs that wait for a person's verdict, and the seconds until all of them get the
        default verdict. Both are 0 if no operator asks people.
        """
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
            outcomes = await asyncio.to_thread(outcome_metrics, experiences)
        if self._reviews is not None:
            self._reviews.begin(manifest)
        started = loop.time()
        with span("run operators", threads=True):
            remaining, metrics = await run_chain(self._chain, experiences, timeout=self._config.operator.timeout)
        metrics |= outcomes
        metrics["time/operators"] = loop.time() - started
        with span("count groups", threads=True):
            filtered = await asyncio.to_thread(
                lambda: len({*experiences.ids("tid")} - {*ExperienceBatch.of(remaining).ids("tid")})
            )
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


def outcome_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """Return mean and spread of the rewards of rollout runs, and the number of groups whose runs have equal rewards.
    Return an empty dict if no run has a finite reward.

    The reward of a run is the reward of its last workflow step. Runs without a finite reward do not count. A group of
    at least two runs with equal rewards is ``all_correct`` if the score (:func:`scores`) of each run is above 0, and
    ``all_wrong`` if no score is. Standard deviations are unbiased; the deviation within groups is a mean over groups of
    at least two runs.
    """
    groups = {tid: np.array(list(runs.values())) for tid, runs in run_values(batch, batch.values("reward"))[0].items()}
    groups = {tid: rewards for tid, rewards in groups.items() if len(rewards)}
    if not groups:
        return {}
    right = {tid: [score > 0 for score in runs.values()] for tid, runs in run_values(batch, scores(batch))[0].items()}
    compared = {tid: rewards for tid, rewards in groups.items() if len(rewards) > 1}
    equal = [right[tid] for tid, rewards in compared.items() if rewards.min() == rewards.max() and right[tid]]
    whole = np.concatenate(list(groups.values()))
    metrics = {
        "reward/mean": float(whole.mean()),
        "reward/std": deviation(whole),
        "reward/min": float(whole.min()),
        "reward/max": float(whole.max()),
        "groups/size": len(whole) / len(groups),
        "groups/zero_std_all_correct": float(sum(map(all, equal))),
        "groups/zero_std_all_wrong": float(sum(not any(group) for group in equal)),
    }
    if compared:
        metrics["reward_std_within_group"] = float(np.mean([deviation(rewards) for rewards in compared.values()]))
    return metrics


def auxiliary_clients(
    names: Iterable[str], choose: Callable[[str], InferenceModel]
) -> dict[str | int, list[openai.AsyncOpenAI]]:
    """Return, for each auxiliary model by name, a list with one client; the caller closes the clients.

    Each request is sent to the engine that serves the model at that moment, because an engine gets another address when
    it restarts. If no engine is alive, the request is retried and then fails like a request to an unreachable server:
    ``openai.APIConnectionError``.

    Args:
        names: Names of models from ``explorer.auxiliary_models``.
        choose: Returns an engine of a model, such as :meth:`EngineSelector.auxiliary`; raises EngineLost.
    """
    model_names = list(names)
    if not model_names:
        return {}
    import openai  # the import takes seconds, which a run without auxiliary models need not spend

    return {
        name: [
            openai.AsyncOpenAI(
                base_url=f"http://{name}/v1",
                api_key="none",  # engines need no key, but the client requires one
                timeout=TIMEOUT,
                max_retries=RETRIES,
                http_client=openai.DefaultAsyncHttpxClient(
                    event_hooks={"request": [_to_engine_of(name, choose)]},
                    trust_env=False,  # a proxy does not reach an engine
                ),
            )
        ]
        for name in model_names
    }


def _to_engine_of(name: str, choose: Callable[[str], InferenceModel]) -> Callable[[Any], Awaitable[None]]:
    async def redirect(request: Any) -> None:
        engine = urlsplit(choose(name).url)
        request.url = request.url.copy_with(scheme=engine.scheme, host=engine.hostname, port=engine.port)
        request.headers["Host"] = engine.netloc

    return redirect


class BatchReviews:
    """Asks people about rollout runs of the batch in progress: implements :class:`trinity_mq.reviews.base.Reviews`.

    Args:
        bus: A connected bus.
        topology: Names of the run's queues and exchanges.
        clock: Returns seconds since the epoch, because another operator that takes over the batch keeps the deadlines.
    """

    def __init__(self, bus: Bus, topology: Topology, clock: Callable[[], float] = time.time) -> None:
        self.stream = ReviewStream(bus, topology, declare=True)
        self._clock = clock
        self._batch: BatchId = 0
        self._ticket = ""
        self._asked = 0
        """Number of :meth:`ask` calls for the batch, which keeps the requests of the chain's operators apart."""
        self._unanswered: dict[str, float] = {}
        """Deadline in seconds since the epoch of each unanswered question, by request id."""

    def begin(self, manifest: BatchClosed) -> None:
        """Start the reviews of another batch."""
        self._batch, self._ticket, self._asked = manifest.batch, manifest.ticket, 0

    def unanswered(self) -> tuple[int, float]:
        """Return the number of unanswered questions, and the seconds until all of them get the default verdict."""
        remaining_s = max(self._unanswered.values(), default=self._clock()) - self._clock()
        return len(self._unanswered), max(0.0, remaining_s)

    async def ask(self, questions: Sequence[Question], *, seconds: float, default: Decision) -> list[Answer]:
        now, self._asked = self._clock(), self._asked + 1
        requests = [self._request(question, now, now + seconds, default) for question in questions]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(request)) for request in requests]
        return [task.result() for task in tasks]

    def _request(self, question: Question, now: float, deadline: float, default: Decision) -> ReviewRequest:
        return ReviewRequest(
            request=request_id(self._ticket, self._asked, question.uid),
            batch=self._batch,
            ticket=self._ticket,
            uid=question.uid,
            calls=list(question.calls),
            reward=question.reward,
            parts=question.parts,
            reasons=list(question.reasons),
            expected=question.expected,
            asked=now,
            deadline=deadline,
            default=default.verdict,
            default_reward=default.reward,
        )

    async def _answer(self, request: ReviewRequest) -> Answer:
        self._unanswered[request.request] = request.deadline
        try:
            await self._ask_once(request)
            verdict = await self._verdict(request)
            closed = await self._close(_closing(request, verdict))
        finally:
            del self._unanswered[request.request]
            self.stream.forget(request.request)
        return Answer(Decision(closed.verdict, closed.reward), closed.how == "timeout", closed.by, closed.note)

    async def _ask_once(self, request: ReviewRequest) -> None:
        """Publish a request before its deadline, unless it is already on the stream. A failure is only logged: the
        question then gets its default verdict.
        """
        seconds = request.deadline - self._clock()
        try:
            async with asyncio.timeout(seconds):
                await self.stream.changed.until(self.stream.is_ready)
                if self._is_known(request):
                    return
                await self.stream.publish(request, REQUEST, f"review-{request.request}", timeout=seconds)
                while not self._is_known(request):
                    await self.stream.until_changed(request.request, seconds)
        except (TimeoutError, BusError) as error:
            log.warning("review_not_asked", request=request.request, reason=str(error) or "no broker within its time")

    def _is_known(self, request: ReviewRequest) -> bool:
        ledger = self.stream.ledger
        return ledger.get(request.request) is not None or ledger.closing(request.request) is not None

    async def _verdict(self, request: ReviewRequest) -> ReviewVerdict | ReviewClosed | None:
        """Return the first verdict, or the final answer on the stream. Return None after the earlier of two deadlines:
        of ``request`` and of the request on the stream.
        """
        ledger = self.stream.ledger
        while True:
            if (closed := ledger.closing(request.request)) is not None:
                return closed
            review = ledger.get(request.request)
            if review is not None and review.verdict is not None:
                return review.verdict
            deadline = request.deadline if review is None else min(request.deadline, review.request.deadline)
            if (remaining_s := deadline - self._clock()) <= 0:
                return None
            await self.stream.until_changed(request.request, remaining_s)

    async def _close(self, closing: ReviewClosed) -> ReviewClosed:
        """Publish the final answer and return the first final answer on the stream, which another operator may have
        published. Return ``closing`` if it cannot be published within :data:`CLOSE_WITHIN` seconds.
        """
        ledger, request = self.stream.ledger, closing.request
        if (closed := ledger.closing(request)) is not None:
            return closed
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await self.stream.publish(closing, CLOSED, f"review-closed-{request}", timeout=CLOSE_WITHIN)
                while (closed := ledger.closing(request)) is None:
                    await self.stream.until_changed(request, CLOSE_WITHIN)
                return closed
        except (TimeoutError, BusError) as error:
            log.warning("review_not_closed", request=request, reason=str(error) or f"not within {CLOSE_WITHIN:g} s")
            return closing


def request_id(ticket: str, place: int, uid: str) -> str:
    """Return the id of the request about experience ``uid`` in the ``place``-th call of ``ask`` for a ticket."""
    return hashlib.sha256(f"{ticket}\n{place}\n{uid}".encode()).hexdigest()[:16]


def _closing(request: ReviewRequest, verdict: ReviewVerdict | ReviewClosed | None) -> ReviewClosed:
    if isinstance(verdict, ReviewClosed):
        return verdict
    common = {"request": request.request, "batch": request.batch, "ticket": request.ticket}
    if verdict is None:
        return ReviewClosed(**common, verdict=request.default, reward=request.default_reward, how="timeout")
    return ReviewClosed(
        **common, verdict=verdict.verdict, reward=verdict.reward, how="verdict", by=verdict.by, note=verdict.note
    )

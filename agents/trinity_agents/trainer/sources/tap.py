"""Train batches from the stream of processed batches of another run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from trinity_agents.trainer.sources.base import TrainBatch
from trinity_agents.trainer.sources.last_batch import LastBatch
from trinity_agents.trainer.sources.stream import StreamSource, TapRules
from trinity_agents.trainer.sources.tapped_run import TappedRun
from trinity_mq.bus import AddressError, Bus, StreamCut, Topology, create_bus
from trinity_mq.config import Config
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchReady, RunEnd
from trinity_mq.operators import AdvantageOperator, create_operators
from trinity_mq.operators.base import ExperienceOperatorV1
from trinity_mq.operators.chain import OperatorError, run_chain
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry.group_drops import TAP_FILTERED
from trinity_mq.transport.blobs import open_store
from trinity_mq.transport.ready_stream import ReadyStream

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between checks for the other run's broker."""
COMPARED = 64
"""Maximum number of texts of the first batch with which the tokenizers are compared."""


class TapSource:
    """Batches of another run, in the order of publication by its operators; each batch is one train step.

    The advantages come from this run's own operators and algorithm. The position is part of the checkpoint: a trainer
    that is killed at any point resumes with the next batch. The other run's weight versions count its own train steps,
    so this run's first version replaces them: staleness is counted in train steps of this run.

    Args:
        config: Configuration of the run that trains.
        bus: Bus of the run that trains, for dead letters.
        topology: Names of the queues and exchanges of the run that trains.
        by: Id of the trainer.
        codec: The trainer's tokenizer.
        create_bus: Creates the bus to the broker of the other run.
    """

    def __init__(
        self,
        config: Config,
        bus: Bus,
        topology: Topology,
        by: str,
        codec: TextCodec,
        create_bus: Callable[[BrokerConfig, Topology, str], Bus] = create_bus,
    ) -> None:
        self._create_bus = create_bus
        self._config, self._own_bus, self._own_topology, self._by, self._codec = config, bus, topology, by, codec
        self._run = TappedRun.of(config)
        self._stream: StreamSource | None = None
        """The other run's stream, None until its broker is connected."""
        self._chain: list[ExperienceOperatorV1] = []
        self._total = config.buffer.total_steps
        self._state: dict[str, Any] = {}
        """The position from which the reader starts; empty for a fresh start."""
        self._last = LastBatch()
        self._run_id: str | None = None
        """Id of the other run, None until one of its messages has named it."""
        self._consumed = 0
        self._current: TrainBatch | None = None
        """The batch that :meth:`next` returned last, None after it was consumed."""
        self._is_checked = False
        self._changed = Notifier()
        self.has_company = False

    @property
    def changed(self) -> Notifier:
        """Notified when a batch may have arrived."""
        return self._changed

    @changed.setter
    def changed(self, notifier: Notifier) -> None:
        self._changed = notifier
        if self._stream is not None:
            self._stream.changed = notifier

    @property
    def bytes_since_save(self) -> int:
        """Bytes read since the last checkpoint was committed."""
        return 0 if self._stream is None else self._stream.bytes_since_save

    @bytes_since_save.setter
    def bytes_since_save(self, count: int) -> None:
        if self._stream is not None:
            self._stream.bytes_since_save = count

    @property
    def ended(self) -> int | None:
        """Number of batches of this run: ``buffer.total_steps``, or fewer if the other run ended earlier; None while
        unknown.
        """
        if self._stream is None or not (self._stream.has_caught_up and self._last.is_complete):
            return self._total
        total = self._consumed + len(self._stream.waiting)
        return total if self._total is None else min(total, self._total)

    @property
    def waiting(self) -> list[str]:
        """Tickets of the other run that have arrived and are not consumed."""
        return [] if self._stream is None else self._stream.waiting

    @property
    def unused(self) -> list[int]:
        """Numbers of batches that were repaired too late to be trained on."""
        return [] if self._stream is None else self._stream.unused

    def available(self) -> bool:
        """Return whether a batch has arrived."""
        return self._stream is not None and self._stream.available()

    async def next(self) -> TrainBatch:
        """Return the next batch, with this run's advantages.

        Raises:
            FatalError: The batch was tokenized with another tokenizer.
            RestartRequested: A chunk is in the blob store, and the store does not answer.
        """
        await self._changed.until(self.available)
        assert self._stream is not None
        if self._current is None:
            made = await self._stream.next()
            for batch in made.parts:
                await self._prepare(batch)
            made.metrics["tap/waiting"] = float(len(self._stream.waiting))
            self._current = made
        return self._current

    def consumed(self) -> None:
        """Advance past the batch that :meth:`next` returned last."""
        assert self._stream is not None
        self._stream.consumed()
        self._consumed, self._current = self._consumed + 1, None

    def state(self) -> dict[str, Any]:
        """Return the position on the other run's stream."""
        if self._stream is None:
            return self._state
        return {
            "tap": self._run.name,
            "run_id": self._stream.run_id,
            "batches": self._consumed,
            "last": self._last.state(),
            "stream": self._stream.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a ``state`` that :meth:`state` returned.

        Raises:
            FatalError: The position belongs to another run or to other data.
        """
        if state and state.get("tap") != self._run.name:
            was = f"run {state['tap']!r}" if state.get("tap") else "other data"
            raise FatalError(
                f"source.tap is {self._run.name!r}, and the checkpoint's position is in {was}: put the old source "
                "back, or start over with --fresh"
            )
        self._state = state
        if state:
            self._consumed, self._run_id = int(state["batches"]), state["run_id"]
            self._last = LastBatch.restored(state["last"])

    def run_begins(self, offset: int) -> None:
        """Do nothing: an offset of this run's stream does not apply to the other run's stream."""

    async def run(self) -> None:
        """Read the other run's stream until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            self._chain = [
                *create_operators(self._config.operator.operators),
                AdvantageOperator(self._config.algorithm),
            ]
            for operator in self._chain:
                stack.push_async_callback(operator.close)
                await operator.prepare()
            topology = Topology.on(self._run.name, self._run.broker)
            bus = await self._connected(topology)
            stack.push_async_callback(bus.close)
            if self._state:  # its run id may be None, if the other run had not begun when the state was saved
                position = self._state["stream"]
            else:
                offset, self._run_id = await self._start_position(bus, topology)
                log.info("tap_started", run=self._run.name, run_id=self._run_id, offset=offset)
                position = {"consumed": [], "offset": offset, "batches": 0}
            bus.run_id = self._run_id
            stream = StreamSource(
                bus,
                topology,
                self._by,
                open_store(self._run.broker, self._run.name),
                in_batch_order=False,
                tapped=TapRules(
                    self._own_bus, self._own_topology, self._on_batch_ready, self._on_run_end, self._on_cut
                ),
            )
            stream.changed = self._changed
            stream.restore(position)
            self._stream = stream
            await stream.run()

    async def _connected(self, topology: Topology) -> Bus:
        """Return a bus connected to the other run's broker.

        A private broker may end at any moment, which removes its address file; the connection is then retried.

        Raises:
            AddressError: The address of the broker cannot be used.
            BusUnavailable: The broker does not answer.
        """
        while True:
            await self._wait_for_broker()
            try:
                bus = self._create_bus(self._run.broker, topology, f"{self._by} of {self._own_topology.run}, tap")
                await bus.connect()
            except AddressError:
                if self._run.url_file is None or self._run.url_file.is_file():
                    raise
            else:
                return bus

    async def _wait_for_broker(self) -> None:
        """Wait until the other run's private broker has written its address file; return at once for other brokers."""
        file = self._run.url_file
        if file is not None and not file.is_file():
            log.warning("tap_waits", run=self._run.name, reason=f"its private broker does not run: there is no {file}")
            while not file.is_file():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(LOOK_SECONDS)

    async def _start_position(self, bus: Bus, topology: Topology) -> tuple[int, str | None]:
        """Return the first offset to read, and the id of the run that published the newest message with a run id; None
        if no message has a run id.
        """
        run_id, end = None, 0
        async for delivery in ReadyStream(bus, topology).up_to_now():
            run_id = delivery.run_id or run_id
            end = (delivery.offset or 0) + 1
        return (end if self._config.source.start == "now" else 0), run_id

    def _on_batch_ready(self, ready: BatchReady, _offset: int) -> bool:
        start = self._config.source.start
        if isinstance(ready.batch, int):
            self._last.batch(ready.batch)
        return not isinstance(start, int) or (isinstance(ready.batch, int) and ready.batch >= start)

    def _on_run_end(self, end: RunEnd) -> None:
        self._last.set_batch_count(end.batches)

    def _on_cut(self, cut: StreamCut) -> None:
        if cut.asked:
            log.warning("tap_lost_batches", run=self._run.name, asked=cut.asked, begins=cut.got, reason="retention")
        else:
            log.warning(
                "tap_started_late",
                run=self._run.name,
                begins=cut.got,
                reason="retention has deleted the earlier messages",
            )
        self._last.cut()

    async def _prepare(self, batch: TrainBatch) -> None:
        """Set this run's weight versions and advantages in a batch; an operator error makes the batch ``failed``."""
        if not batch.experiences:
            return
        received = batch.experiences
        self._check_tokens(received)
        groups = set(received.ids("tid"))
        rewards = [reward for reward in received.values("reward") if reward is not None]
        try:
            remaining, _ = await run_chain(
                self._chain, without_training_fields(received), timeout=self._config.operator.timeout
            )
        except OperatorError as error:
            batch.state, batch.reason = "failed", str(error)
            batch.experiences = ExperienceBatch.of([])
            return
        batch.experiences = ExperienceBatch.of(remaining)
        batch.filtered_groups = len(groups - set(batch.experiences.ids("tid")))
        batch.metrics = {
            "tap/batch": float(batch.batch),
            "tap/experiences": float(len(received)),
            "tap/left": float(len(remaining)),
            TAP_FILTERED.metric: float(batch.filtered_groups),
        }
        if rewards:
            batch.metrics["tap/reward"] = sum(rewards) / len(rewards)
        if not remaining:
            batch.state, batch.reason = "empty", "the operators and the algorithm of this run kept no experience"

    def _check_tokens(self, came: ExperienceBatch) -> None:
        """Compare the other run's tokens with this run's tokenizer: in each batch the largest token with the size of
        the vocabulary, and in the first batch also the answers' texts with the decoded tokens.

        Raises:
            FatalError: The tokens belong to another tokenizer.
        """
        largest = int(came.dense("tokens").max())
        if largest >= self._codec.size:
            raise FatalError(
                f"source.tap: run {self._run.name!r} has a token {largest}, and this run's model knows "
                f"{self._codec.size} tokens: the two have different tokenizers. Take a model with the same one"
            )
        if self._is_checked:
            return
        self._is_checked = True
        samples = [
            sample for sample in came[:COMPARED].to_list() if sample.response_text and sample.experience_type != "dpo"
        ]
        texts = self._codec.decode([sample.tokens[sample.prompt_length :].tolist() for sample in samples])
        pairs = [(sample.response_text or "", text) for sample, text in zip(samples, texts, strict=True)]
        mismatches = [pair for pair in pairs if pair[0] not in pair[1]]
        if len(mismatches) > len(pairs) / 2:  # a single text may differ, if it ends within a character
            answer, made = mismatches[0]
            raise FatalError(
                f"source.tap: run {self._run.name!r} answered {answer!r:.60}, and this run's tokenizer makes "
                f"{made!r:.60} of its tokens: the two have different tokenizers. Take a model with the same one"
            )


def without_training_fields(came: ExperienceBatch) -> ExperienceBatch:
    """Return experiences without the other run's advantages and returns, stamped with this run's first version."""
    nothing: Sequence[None] = [None] * len(came)
    versions = [None if rows is None else [(0, 0, 0)] for rows in came.values("versions")]
    return came.replace(advantages=nothing, returns=nothing, versions=versions)

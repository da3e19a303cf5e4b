"""Every broker name in the system, as data (protocol.md sections 1 and 2)."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from trinity_mq.messages.base import BatchId

if TYPE_CHECKING:
    from trinity_mq.config import BrokerConfig, Config

BROKER_DELIVERY_LIMIT = 1_000_000
"""Never reached: the daemons limit deliveries by their count. -1 loses messages on 3.10; no limit means 20 on 4.x."""
BATCH_QUEUE_EXPIRES_MS = 7 * 24 * 3600 * 1000
STREAM_SEGMENT_BYTES = 64 * 1024 * 1024

REVIEW_MAX_BYTES = 256 * 1024 * 1024
"""Retention of the stream of human review: requests hold the texts of runs, bounded by the operator that asks."""

EXCHANGES = (
    "tasks",
    "experiences",
    "batches",
    "results",
    "ready",
    "sync",
    "control",
    "telemetry",
    "sessions",
    "review",
    "dead",
)

SUBMIT, BY_GATEWAY = "submit", "session"
"""Routing keys of submitted tasks: of submitters, and of the run's own gateway. A submitter's permissions allow the
first alone, so the second says that an agent of the run made the task."""

MARK = "mark"
"""Routing key of the marks by which readers find the present end of a stream. Nothing else travels with it."""

REPLY_QUEUES = ("amq.gen-", "amq_", "amq.rabbitmq.reply-to.")
"""Prefixes of reply queues whose name nobody can guess: named by the broker, by aio-pika, or direct reply-to."""
OTHERS_REPLIES = ("reward", "review")
"""Words behind ``replies.`` in names of queues of other users than submitters."""

RUN_NAME = re.compile(r"[a-z0-9-]{1,40}")

QueueKind = Literal["quorum", "stream", "exclusive"]
Overflow = Literal["reject-publish", "drop-head"]

DROPPED = "dropped.dead"
"""Routing key, on the exchange ``control``, of dead letters that the broker drops since ``dead`` is full."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A routing pattern of a topic exchange."""

    exchange: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue with all that its declaration says."""

    name: str
    kind: QueueKind = "quorum"
    bindings: tuple[Binding, ...] = ()
    dead_letter_exchange: str | None = None
    single_active_consumer: bool = False
    expires_ms: int | None = None
    dead_letter_routing_key: str | None = None
    """Routing key of messages that the broker moves to the dead letter exchange; None: their own."""
    max_length_bytes: int | None = None
    """Retention of a stream; bound of a work queue."""
    overflow: Overflow | None = None
    """Answer of the broker to a message for a full work queue: refuse it, or drop the oldest message."""
    consumer_timeout: float | None = None
    """Seconds for which a consumer may hold a message, from RabbitMQ 3.12 on; None: the broker's own."""
    redeclare: bool = True
    """False: a reconnect or a consume must not bring a deleted queue back."""

    @property
    def comes_back(self) -> bool:
        """Its consumers declare it again when it was deleted, and continue. A stream would begin anew at offset 0, and
        its readers continue at theirs.
        """
        return self.redeclare and self.kind != "stream"

    @property
    def arguments(self) -> Mapping[str, str | int | bool]:
        """The declaration's ``x-`` arguments."""
        if self.kind == "exclusive":
            return {}
        found = {
            "x-queue-type": self.kind,
            "x-delivery-limit": BROKER_DELIVERY_LIMIT if self.kind == "quorum" else None,
            "x-stream-max-segment-size-bytes": STREAM_SEGMENT_BYTES if self.kind == "stream" else None,
            "x-dead-letter-exchange": self.dead_letter_exchange,
            "x-single-active-consumer": self.single_active_consumer or None,
            "x-expires": self.expires_ms,
            "x-dead-letter-routing-key": self.dead_letter_routing_key,
            "x-max-length-bytes": self.max_length_bytes,
            "x-overflow": self.overflow,
            "x-consumer-timeout": None if self.consumer_timeout is None else round(self.consumer_timeout * 1000),
        }
        return {name: value for name, value in found.items() if value is not None}


def batch_key(batch: BatchId) -> str:
    """Return the routing-key form of a batch id: dot-separated words, other characters percent-encoded, reversible.

    >>> batch_key(17), batch_key("3/gsm8k")
    ('17', '3.gsm8k')
    """
    return ".".join(
        urllib.parse.quote(word, safe="").replace(".", "%2E").replace("*", "%2A").replace("#", "%23")
        for word in str(batch).split("/")
    )


@dataclass(frozen=True, slots=True)
class Topology:
    """All names of one run.

    Raises:
        ValueError: The run's name does not fit broker names.
    """

    run: str
    ready_max_bytes: int = 2 * 1024**3
    results_max_bytes: int = 512 * 1024**2
    sessions_max_bytes: int = 2 * 1024**3
    consumer_timeout: float | None = None
    """Seconds for which agents may hold messages of work queues and batch queues."""
    reply_queues: tuple[str, ...] = ()
    """Further prefixes of queues to which submitters may have their outcomes sent."""
    submitted_max_bytes: int = 1024**3
    dead_max_bytes: int = 512 * 1024**2
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise ValueError(
                f"run name {self.run!r} must be 1 to 40 of a-z, 0-9 and '-': it becomes part of every queue's name"
            )
        object.__setattr__(self, "prefix", f"tmq.{self.run}.")

    @classmethod
    def of(cls, config: Config) -> Topology:
        """Return the names of the run that ``config`` configures."""
        return replace(cls.on(config.name, config.broker), reply_queues=config.outsiders.reply_queues)

    @classmethod
    def on(cls, run: str, broker: BrokerConfig) -> Topology:
        """Return the names of a run on a broker that is used as ``broker`` says."""
        return cls(
            run,
            broker.ready_max_bytes,
            broker.results_max_bytes,
            broker.sessions_max_bytes,
            broker.consumer_timeout,
            submitted_max_bytes=broker.submitted_max_bytes,
            dead_max_bytes=broker.dead_max_bytes,
        )

    def exchange(self, name: str) -> str:
        """Return the broker name of one of :data:`EXCHANGES`."""
        return self.prefix + name

    @property
    def exchanges(self) -> tuple[str, ...]:
        """All exchanges, each a durable topic exchange."""
        return tuple(self.exchange(name) for name in EXCHANGES)

    def _work(self, name: str, exchange: str, *patterns: str) -> Queue:
        return Queue(
            name=self.prefix + name,
            bindings=tuple(Binding(self.exchange(exchange), pattern) for pattern in patterns),
            dead_letter_exchange=self.exchange("dead"),
            consumer_timeout=self.consumer_timeout,
        )

    @property
    def submitted(self) -> Queue:
        """Tasks from outside. A full queue takes no more: the submitter's publish is not confirmed."""
        queue = self._work("submitted", "tasks", SUBMIT, BY_GATEWAY)
        return replace(queue, max_length_bytes=self.submitted_max_bytes, overflow="reject-publish")

    @property
    def tasks_train(self) -> Queue:
        """Slices of training batches."""
        return self._work("tasks.train", "tasks", "train.#")

    @property
    def tasks_eval(self) -> Queue:
        """Slices of evaluations."""
        return self._work("tasks.eval", "tasks", "eval.#")

    def task_queue(self, lane: Literal["train", "eval"]) -> Queue:
        """Return the queue of a lane's slices."""
        return self.tasks_train if lane == "train" else self.tasks_eval

    def is_reply_queue(self, name: str) -> bool:
        """Return whether the outcome of a submitted task may be sent to the queue ``name``: a reply queue of this run,
        a queue with a random name, or one of ``outsiders.reply_queues``; never another queue of a run.
        """
        own = f"{self.prefix}replies."
        if name.startswith(own):
            return name.removeprefix(own).partition(".")[0] not in OTHERS_REPLIES
        return name.startswith((*REPLY_QUEUES, *self.reply_queues)) and not name.startswith("tmq.")

    @property
    def closed(self) -> Queue:
        """Manifests, the operators' work queue."""
        return self._work("closed", "batches", "closed")

    def _stream(self, name: str, max_bytes: int) -> Queue:
        bindings = (Binding(self.exchange(name), "#"),)
        return Queue(name=self.prefix + name, kind="stream", bindings=bindings, max_length_bytes=max_bytes)

    @property
    def results(self) -> Queue:
        """Stream of task results, the trainer's progress and the explorer's marks."""
        return self._stream("results", self.results_max_bytes)

    @property
    def ready(self) -> Queue:
        """Stream of processed batches."""
        return self._stream("ready", self.ready_max_bytes)

    @property
    def sessions(self) -> Queue:
        """Stream of the events of sessions; declared by gateways."""
        return self._stream("sessions", self.sessions_max_bytes)

    @property
    def review(self) -> Queue:
        """Stream of human review: requests, verdicts and what counted; declared by operators that ask."""
        return self._stream("review", REVIEW_MAX_BYTES)

    @property
    def dead(self) -> Queue:
        """Dead letters: rejected and abandoned messages with the reason. A full queue drops the oldest ones, which the
        explorer counts.
        """
        return Queue(
            name=self.prefix + "dead",
            bindings=(Binding(self.exchange("dead"), "#"),),
            max_length_bytes=self.dead_max_bytes,
            overflow="drop-head",
            dead_letter_exchange=self.exchange("control"),
            dead_letter_routing_key=DROPPED,
        )

    @property
    def durable(self) -> tuple[Queue, ...]:
        """The queues that exist for the whole run."""
        return (self.submitted, self.tasks_train, self.tasks_eval, self.closed, self.results, self.ready, self.dead)

    def batch_queue(self, batch: BatchId, ticket: str) -> Queue:
        """The experiences of one ticket."""
        return Queue(
            name=f"{self.prefix}batch.{ticket}",
            bindings=(Binding(self.exchange("experiences"), self.batch_routing_key(batch, ticket)),),
            dead_letter_exchange=self.exchange("dead"),
            single_active_consumer=True,
            expires_ms=BATCH_QUEUE_EXPIRES_MS,
            consumer_timeout=self.consumer_timeout,
            redeclare=False,
        )

    @staticmethod
    def batch_routing_key(batch: BatchId, ticket: str) -> str:
        """Return the routing key that the experiences of a ticket are published with."""
        return f"{batch_key(batch)}.{ticket}"

    def listener(self, agent: str, incarnation: str, exchange: str, *patterns: str) -> Queue:
        """An exclusive queue of one process on sync, control or telemetry; ``incarnation`` keeps a lingering old one
        out of the way.
        """
        return Queue(
            name=f"{self.prefix}{exchange}.{agent}.{incarnation}",
            kind="exclusive",
            bindings=tuple(Binding(self.exchange(exchange), pattern) for pattern in patterns),
        )

    def lock(self, name: str) -> str:
        """The exclusive queue that makes one scheduling explorer, one trainer a run. Its full name is left as it is."""
        return name if name.startswith(self.prefix) else f"{self.prefix}lock.{name}"

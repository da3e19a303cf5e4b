"""All broker names of the system, as data (docs/protocol.md, Keys and Names)."""

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
"""Delivery limit that is never reached, because the daemons limit deliveries by their own count. On 3.10, -1 loses
messages; on 4.x, no limit means 20.
"""
BATCH_QUEUE_EXPIRES_MS = 7 * 24 * 3600 * 1000
STREAM_SEGMENT_BYTES = 64 * 1024 * 1024

REVIEW_MAX_BYTES = 256 * 1024 * 1024
"""Retention in bytes of the stream of human review. Requests contain the texts of runs, bounded by the requesting
operator.
"""

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
"""Routing keys of submitted tasks: from submitters, and from the run's own gateway. A submitter's permissions allow
only the first key, so the second key proves that an agent of the run made the task.
"""

MARK = "mark"
"""Routing key of the marks by which readers find the current end of a stream. No other message uses it."""

REPLY_QUEUES = ("amq.gen-", "amq_", "amq.rabbitmq.reply-to.")
"""Prefixes of reply queues with unguessable names: named by the broker, named by aio-pika, or direct reply-to."""
OTHERS_REPLIES = ("reward", "review")
"""Words after ``replies.`` in the names of queues that belong to users other than submitters."""

RUN_NAME = re.compile(r"[a-z0-9-]{1,40}")

QueueKind = Literal["quorum", "stream", "exclusive"]
Overflow = Literal["reject-publish", "drop-head"]

DROPPED = "dropped.dead"
"""Routing key on the exchange ``control`` for dead letters that the broker drops because ``dead`` is full."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A routing pattern on a topic exchange."""

    exchange: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue with all arguments of its declaration."""

    name: str
    kind: QueueKind = "quorum"
    bindings: tuple[Binding, ...] = ()
    dead_letter_exchange: str | None = None
    single_active_consumer: bool = False
    expires_ms: int | None = None
    dead_letter_routing_key: str | None = None
    """Routing key of messages that the broker moves to the dead-letter exchange. None: they keep their own key."""
    max_length_bytes: int | None = None
    """Maximum bytes: retention of a stream, or capacity of a work queue."""
    overflow: Overflow | None = None
    """Behaviour of a full work queue: refuse the new message, or drop the oldest message."""
    consumer_timeout: float | None = None
    """Seconds that a consumer may hold a message, from RabbitMQ 3.12 on. None: the broker's default."""
    redeclare: bool = True
    """False: a reconnect or a consume must not declare the queue again after its deletion."""

    @property
    def comes_back(self) -> bool:
        """True if its consumers declare the queue again after a deletion, and continue. A stream is not declared again:
        it would restart at offset 0, while its readers continue at their own offsets.
        """
        return self.redeclare and self.kind != "stream"

    @property
    def arguments(self) -> Mapping[str, str | int | bool]:
        """``x-`` arguments of the declaration."""
        if self.kind == "exclusive":
            return {}
        arguments = {
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
        return {name: value for name, value in arguments.items() if value is not None}


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
    """All broker names of a run.

    Raises:
        ValueError: The name of the run is not valid in broker names.
    """

    run: str
    ready_max_bytes: int = 2 * 1024**3
    results_max_bytes: int = 512 * 1024**2
    sessions_max_bytes: int = 2 * 1024**3
    consumer_timeout: float | None = None
    """Seconds that agents may hold messages of work queues and batch queues. None: the broker's default."""
    reply_queues: tuple[str, ...] = ()
    """Additional prefixes of queues to which the outcomes of submitted tasks may be sent."""
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
        """Return the names for the run that ``config`` configures."""
        return replace(cls.on(config.name, config.broker), reply_queues=config.outsiders.reply_queues)

    @classmethod
    def on(cls, run: str, broker: BrokerConfig) -> Topology:
        """Return the names for a run on a broker with the settings ``broker``."""
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
        """All exchanges of the run. Each is a durable topic exchange."""
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
        """Queue of submitted tasks, from outside programs and from the run's gateways. A full queue accepts no more
        tasks: the submitter's publish is not confirmed.
        """
        queue = self._work("submitted", "tasks", SUBMIT, BY_GATEWAY)
        return replace(queue, max_length_bytes=self.submitted_max_bytes, overflow="reject-publish")

    @property
    def tasks_train(self) -> Queue:
        """Queue of the slices of training batches."""
        return self._work("tasks.train", "tasks", "train.#")

    @property
    def tasks_eval(self) -> Queue:
        """Queue of the slices of evaluations."""
        return self._work("tasks.eval", "tasks", "eval.#")

    def task_queue(self, lane: Literal["train", "eval"]) -> Queue:
        """Return the queue for the slices of a lane."""
        return self.tasks_train if lane == "train" else self.tasks_eval

    def is_reply_queue(self, name: str) -> bool:
        """Return whether the outcome of a submitted task may be sent to the queue ``name``. It must be a reply queue of
        this run, a queue with a random name, or match ``outsiders.reply_queues``. Other queues of a run are never
        allowed.
        """
        own_prefix = f"{self.prefix}replies."
        if name.startswith(own_prefix):
            return name.removeprefix(own_prefix).partition(".")[0] not in OTHERS_REPLIES
        return name.startswith((*REPLY_QUEUES, *self.reply_queues)) and not name.startswith("tmq.")

    @property
    def closed(self) -> Queue:
        """Work queue of the operators: manifests of closed batches."""
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
        """Stream of session events, declared by gateways."""
        return self._stream("sessions", self.sessions_max_bytes)

    @property
    def review(self) -> Queue:
        """Stream of human review: requests, verdicts and accepted outcomes. Declared by operators that request
        reviews.
        """
        return self._stream("review", REVIEW_MAX_BYTES)

    @property
    def dead(self) -> Queue:
        """Queue of dead letters: rejected and abandoned messages with their reasons. A full queue drops the oldest
        messages, which the explorer counts.
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
        """Queues and streams of every run, which each agent declares at its start. The streams ``sessions`` and
        ``review`` exist only in runs that use them.
        """
        return (self.submitted, self.tasks_train, self.tasks_eval, self.closed, self.results, self.ready, self.dead)

    def batch_queue(self, batch: BatchId, ticket: str) -> Queue:
        """Return the queue for the experiences of a ticket."""
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
        """Return the routing key for publishing the experiences of a ticket."""
        return f"{batch_key(batch)}.{ticket}"

    def listener(self, agent: str, incarnation: str, exchange: str, *patterns: str) -> Queue:
        """Return the exclusive queue of a single process, bound to an exchange by ``patterns``. Without patterns it is
        not bound, and ``exchange`` is only a word in its name, such as ``replies``. ``incarnation`` keeps the name
        distinct from a lingering older queue.
        """
        return Queue(
            name=f"{self.prefix}{exchange}.{agent}.{incarnation}",
            kind="exclusive",
            bindings=tuple(Binding(self.exchange(exchange), pattern) for pattern in patterns),
        )

    def lock(self, name: str) -> str:
        """Return the name of the exclusive queue that is the lock ``name`` of the run. The run has a lock for its
        scheduling explorer, its trainer, its acting gateway and each further host of engines; a second process with the
        same task waits for the lock. A full name is returned unchanged.
        """
        return name if name.startswith(self.prefix) else f"{self.prefix}lock.{name}"

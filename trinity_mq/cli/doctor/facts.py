"""What the doctor finds out, and the findings it makes of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trinity_mq.bus.topology import Topology
from trinity_mq.config import Config
from trinity_mq.config.run import CONSUMER_TIMEOUT

Verdict = Literal["ok", "warning", "problem", "not looked at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at, or could not be."""

    subject: str
    verdict: Verdict
    seen: str
    """not looked at: why."""
    wanted: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy of the broker's virtual host."""

    name: str
    pattern: str
    apply_to: str
    priority: int
    definition: Mapping[str, Any]
    operator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Where a node of the broker keeps its data."""

    node: str
    free: int
    limit: int


@dataclass(slots=True, kw_only=True)
class Facts:
    """What is known of a broker; None where nobody told, and then :attr:`unseen` says why."""

    version: str | None = None
    product: str = "RabbitMQ"
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    user: str = "guest"
    vhost: str = "/"
    blocked: bool | None = None
    consumer_timeout_ms: int | None = None
    """0: there is no limit."""
    max_message_bytes: int | None = None
    alarms: list[str] | None = None
    disks: list[Disk] | None = None
    policies: list[Policy] | None = None
    permissions: tuple[str, str, str] | None = None
    """The patterns of configure, write and read."""
    feature_flags: Mapping[str, bool] | None = None
    clock: tuple[float, float] | None = None
    """Seconds that the broker's clock is ahead of ours, and how far off that may be."""
    queues: dict[str, tuple[int, int] | None] | None = None
    """All queues of the run: messages and consumers where they were told."""
    tried: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    unseen: dict[str, list[str]] = field(default_factory=dict)
    """Why a fact is None, in the words of those who were asked."""

    def missing(self, why: str, *names: str) -> None:
        """Note why facts stay unknown."""
        for name in names:
            self.unseen.setdefault(name, []).append(why)

    def why(self, name: str) -> str:
        """Return why a fact is unknown."""
        return "; ".join(dict.fromkeys(self.unseen.get(name, ()))) or "nobody tells it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run asks of its broker."""

    topology: Topology | None
    hold_seconds: float
    """The longest that an agent holds a delivery."""
    exact: bool
    """The needs are those of a configuration, not the defaults."""
    max_message_bytes: int
    delivery_limit: int
    kept_bytes: int
    """What the run's streams may grow to."""
    folder_finished: bool | None = None
    """The run's folder says that it is over; None: there is no such folder here."""

    @classmethod
    def of(cls, config: Config | None, run: str | None) -> Needs:
        """Return the needs of a configuration, else of the defaults. Raises ValueError for an impossible name."""
        from trinity_mq.config import BrokerConfig

        broker = config.broker if config is not None else BrokerConfig()
        hold, finished = CONSUMER_TIMEOUT, None
        if config is not None:
            run = config.name
            hold = max(config.explorer.slice_timeout, config.explorer.operator_deadline, config.operator.timeout)
            finished = (config.path / "finished").exists() if config.path.exists() else None
        return cls(
            topology=Topology(run, broker.ready_max_bytes, broker.results_max_bytes) if run is not None else None,
            hold_seconds=hold,
            exact=config is not None,
            max_message_bytes=broker.max_message_bytes,
            delivery_limit=broker.delivery_limit,
            kept_bytes=broker.ready_max_bytes + broker.results_max_bytes,
            folder_finished=finished,
        )


def size(count: float) -> str:
    """Return bytes in words.

    >>> size(1536 * 1024)
    '1.5 MiB'
    """
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    unit = units[0]
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 or count == int(count) else f"{count:.1f} {unit}"

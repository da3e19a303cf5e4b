"""Facts about a broker and this machine, and the needs of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity_mq.bus.topology import Topology
from trinity_mq.config import BrokerConfig, Config
from trinity_mq.config.run import CONSUMER_TIMEOUT


class Facts(dict[str, Any]):
    """Answers by question; the questions are listed in :mod:`trinity_mq.cli.doctor.sources`.

    A question that no source answers is not a key, and :meth:`why` returns the reasons.
    """

    def __init__(self, **answers: Any) -> None:
        super().__init__(answers)
        self._reasons: dict[str, list[str]] = {}

    def missing(self, why: str, *questions: str) -> None:
        """Note why questions have no answer."""
        for question in questions:
            self._reasons.setdefault(question, []).append(why)

    def why(self, question: str) -> str:
        """Return why a question has no answer."""
        return "; ".join(dict.fromkeys(self._reasons.get(question, ()))) or "no source reports it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of a run on its broker and on this machine."""

    topology: Topology | None
    hold_seconds: float
    """The longest that an agent holds a delivery."""
    exact: bool
    """The needs are those of a configuration, not the defaults."""
    max_message_bytes: int
    delivery_limit: int
    stream_bytes: int
    """Upper bound of the run's streams."""
    engine: str | None = None
    folder_finished: bool | None = None
    """The run's folder is marked as finished; None: there is no such folder here."""

    @classmethod
    def of(cls, config: Config | None, run: str | None) -> Needs:
        """Return the needs of a configuration, else of the defaults. Raises ValueError for an impossible name."""
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
            stream_bytes=broker.ready_max_bytes + broker.results_max_bytes,
            engine=config.explorer.rollout_model.engine if config is not None else None,
            folder_finished=finished,
        )

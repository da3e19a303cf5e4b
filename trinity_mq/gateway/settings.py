"""Settings of the gateway's routes, taken from a run's configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_mq.config import Config
from trinity_mq.config.modes.gateway import GatewayConfig
from trinity_mq.messages import SessionReplay
from trinity_mq.rewards.outsiders import replay_refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Settings of :class:`trinity_mq.gateway.app.GatewayApp`."""

    gateway: GatewayConfig
    model_name: str
    """The model's name in ``/v1/models``."""
    sampling: Mapping[str, Any]
    """Sampling parameters of sessions that are trained on."""
    max_response_tokens: int | None = None
    """Limit of an answer whose request gives none; None: the engine's own."""
    compares_runs: bool = False
    """The algorithm compares sessions with each other, so that each needs a group."""
    group_size: int = 1
    """Sessions of a group that says none."""
    algorithm_type: str = ""
    replay_refusal: Callable[[SessionReplay], str | None] = lambda replay: "this gateway takes no replays"
    """Returns the reason why a replay is refused; None: it is allowed."""

    @classmethod
    def of(cls, config: Config) -> AppSettings:
        """Return the settings of a run."""
        rollout = config.explorer.rollout_model
        return cls(
            gateway=config.gateway,
            model_name=config.model.model_path or f"{config.name}-tiny",
            sampling={"temperature": rollout.temperature, "top_p": rollout.top_p},
            max_response_tokens=config.model.max_response_tokens,
            compares_runs=config.algorithm.estimator.compares_runs,
            group_size=config.gateway.group_size or config.algorithm.repeat_times,
            algorithm_type=config.algorithm.algorithm_type,
            replay_refusal=functools.partial(replay_refusal, config),
        )

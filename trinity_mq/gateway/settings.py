"""Settings of the gateway's routes, derived from the configuration of a run."""

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
    """Name of the model in ``/v1/models``."""
    sampling: Mapping[str, Any]
    """Sampling parameters of sessions that are recorded for training. Its switches of the chat template are the
    defaults of all sessions.
    """
    max_response_tokens: int | None = None
    """Maximum tokens of an answer if the request sets no limit. None: the limit of the engine applies."""
    compares_runs: bool = False
    """True if the algorithm compares sessions with each other. Each session that is opened for training then needs a
    group.
    """
    group_size: int = 1
    """Default number of sessions per group."""
    algorithm_type: str = ""
    replay_refusal: Callable[[SessionReplay], str | None] = lambda replay: "this gateway accepts no replays"
    """Returns the reason why a replay is refused, or None if it is allowed."""

    @classmethod
    def of(cls, config: Config) -> AppSettings:
        """Return the settings for the configuration of a run."""
        rollout = config.explorer.rollout_model
        return cls(
            gateway=config.gateway,
            model_name=config.model.model_path or f"{config.name}-tiny",
            sampling={"temperature": rollout.temperature, "top_p": rollout.top_p, **rollout.ending},
            max_response_tokens=config.model.max_response_tokens,
            compares_runs=config.algorithm.estimator.compares_runs,
            group_size=config.gateway.group_size or config.algorithm.repeat_times,
            algorithm_type=config.algorithm.algorithm_type,
            replay_refusal=functools.partial(replay_refusal, config),
        )

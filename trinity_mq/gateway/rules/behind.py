"""Decides which new sessions are recorded while training is behind. Answers never wait for it."""

from __future__ import annotations

import random

from trinity_mq.config.modes.gateway import GatewayConfig


def recorded_share(waiting: int, kept_bytes: int, config: GatewayConfig) -> float:
    """Return the share of new sessions that are recorded, from 0 to 1: all of them up to ``max_waiting`` sessions that
    wait to be trained on, a quarter where twice as many wait, a ninth at three times; none once the answers that are
    kept take ``max_kept_bytes``.
    """
    if kept_bytes >= config.max_kept_bytes:
        return 0.0
    if waiting < config.max_waiting:
        return 1.0
    return (config.max_waiting / waiting) ** 2


def is_recorded(share: float, draw: random.Random) -> bool:
    """Return whether a new session is recorded."""
    return share >= 1.0 or draw.random() < share

"""Decides which new sessions are recorded while training is behind. Answers to calls never wait for training."""

from __future__ import annotations

import random

from trinity_mq.config.modes.gateway import GatewayConfig


def recorded_share(waiting: int, kept_bytes: int, config: GatewayConfig) -> float:
    """Return the share of new sessions to record, from 0 to 1. The share is 1 while fewer than ``max_waiting`` sessions
    wait to be trained on. It is a quarter at twice as many waiting sessions and a ninth at three times as many. It is 0
    once the stored answers take ``max_kept_bytes``.
    """
    if kept_bytes >= config.max_kept_bytes:
        return 0.0
    if waiting < config.max_waiting:
        return 1.0
    return (config.max_waiting / waiting) ** 2


def is_recorded(share: float, draw: random.Random) -> bool:
    """Return whether a new session is recorded, by a random draw if ``share`` is below 1."""
    return share >= 1.0 or draw.random() < share

"""Modes of a run. ``trinity_mq.roles`` has the agents of each mode."""

from __future__ import annotations

from typing import Literal

Mode = Literal["both", "train", "explore", "bench", "serve"]
"""``explore``: the trainer writes the experiences instead of training on them, and sends the weights to engines.
``bench``: the trainer sends the weights of one checkpoint after another to engines. ``serve``: gateways answer; runners
turn ended sessions into experiences."""
TRAINING_MODES = frozenset[Mode]({"both", "train", "serve"})
"""Modes that produce a trained model."""

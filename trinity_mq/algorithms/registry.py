"""The type of loss functions."""

from __future__ import annotations

from collections.abc import Callable

from trinity_mq.algorithms.losses import LossTerms

LossFunction = Callable[..., LossTerms]
"""Takes logprobs, old logprobs and advantages, each float32 ``[tokens]``, and the AlgorithmConfig; returns sums over
tokens. Further parameters are custom fields by their destination, ``[tokens, ...]`` each."""

"""The registry and the configuration name the same algorithms."""

from __future__ import annotations

from typing import get_args

from trinity_mq.algorithms.registry import ALGORITHMS
from trinity_mq.config import AlgorithmConfig


def test_every_configurable_algorithm_is_registered_and_no_other() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["algorithm_type"].annotation)) == set(ALGORITHMS)

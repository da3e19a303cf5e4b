"""The registry and the configuration name the same algorithms."""

from __future__ import annotations

from typing import get_args

import pytest

from trinity_mq.algorithms.registry import ALGORITHMS
from trinity_mq.config import AlgorithmConfig


def test_every_configurable_algorithm_is_registered_and_no_other() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["algorithm_type"].annotation)) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_entry_is_filed_under_its_name_and_coherent(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name
    assert algorithm.where == "trainer" or not algorithm.needs, "an operator has no other models"

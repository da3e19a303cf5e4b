"""Fixtures of all tests. Those that need a real broker are in broker_fixtures.py."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import extended

# Hypothesis measures real time, which a busy machine stretches; each test has a time limit of its own.
settings.register_profile("any_machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


@pytest.fixture(autouse=True)
def _nothing_left_in_the_environment() -> Iterator[None]:
    """A broker's address that a test leaves behind would lead those after it to a broker that is gone."""
    before = {name: value for name, value in os.environ.items() if name.startswith("TRINITY_MQ_")}
    yield
    after = {name: value for name, value in os.environ.items() if name.startswith("TRINITY_MQ_")}
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before, "a test changed the environment of those after it"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape half surrogate pairs in what a test printed: a worker of xdist cannot send them and ends."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what is marked ``extended``; leave out what is marked ``gpu`` where there is no CUDA device."""
    extended.note(config, items)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]

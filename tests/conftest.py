"""Fixtures of all tests. Those that need a real broker are in broker_fixtures.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from structlog.testing import capture_logs

from tests import extended
from trinity_mq.runtime import plugins

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub

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


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The log lines of a test, which are not printed: rendering a traceback for the console takes a second."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture
def on_sync(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """Return a function that has a hook called with the descriptor before each ``os.fsync``, which fails with it."""
    sync = os.fsync

    def install(hook: Callable[[int], object]) -> None:
        def hooked(descriptor: int) -> None:
            hook(descriptor)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", hooked)

    return install


@pytest.fixture
def fresh_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the interpreter without the folders of plugins that a test adds, and without modules of its folder."""
    path = list(sys.path)
    monkeypatch.setattr(plugins, "_added", {})
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


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

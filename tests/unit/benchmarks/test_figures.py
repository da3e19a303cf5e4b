"""What the benchmarks and the soak make of what they have seen, and the length of the path of a task."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.bench_demo import Look, Measured, processor_seconds, seen, table, verdicts
from benchmarks.bench_observability import tokens_a_second
from benchmarks.bench_overlap import measured
from benchmarks.path_of_a_task import counts, functions_on_path
from benchmarks.trend import LEAST_POINTS, trend


def test_targets_of_the_demo_are_judged_by_medians_and_only_with_who_was_measured() -> None:
    usual = {"cpu": 0.3, "first": 5.0, "memory": 900.0, "accuracy": 0.9}
    ours = {"rollout": 50.0, "train": 90.0}
    runs = [Measured("trinity-mq", seed, rate=rate, **usual, **ours) for seed, rate in enumerate((4.0, 6.0, 8.0))]
    runs.append(Measured("trl", 0, rate=5.0, **usual))
    values = seen(runs)
    assert values["steps/s of TRL's"] == pytest.approx(1.2)
    assert "steps/s of the bare loop's" not in values
    met = {line.split(":")[0] for line, is_met in verdicts(values) if is_met}
    assert met == {"steps/s of TRL's", "first step, s", "memory, MiB"}
    assert "| trl | 5.00 | 5.00 | 0.300 |  |  | 5.0 | 900 | 0.900 to 0.900 |" in table(runs)
    looks = [Look(10.0, {"runner": 1.0}, 0.0), Look(20.0, {"runner": 3.0, "engine": 2.0}, 0.0)]
    assert processor_seconds(looks, 15.0) == {"runner": 2.0, "engine": 1.0}, "shared out evenly between two looks"


def test_tokens_of_the_steps_after_the_first_ones_count() -> None:
    lines = [{"trainer/step": n, "time": 10.0 + 2 * n, "data/trained_tokens": 100.0 * n} for n in (1, 2, 3, 4, 5, 6)]
    lines.append({"time": 90.0, "time/sync": 1.0})
    assert tokens_a_second(lines) == pytest.approx((300 + 400 + 500 + 600) / 8)


def line(role: str, step: int, end: float, **values: float) -> dict[str, object]:
    return {"agent": f"{role}-0", "role": role, "step": step, "time": end} | values


def train(step: int, end: float, seconds: float, waited: float) -> dict[str, object]:
    values = {"trainer/step": float(step), "time/batch": seconds, "time/wait_data": waited}
    return line("trainer", step, end, **values)


def test_batches_that_overlap_each_other_count_once_and_only_within_the_time_measured() -> None:
    lines = [train(1, 10.0, 1.0, 5.0), train(2, 12.0, 2.0, 0.0), train(3, 14.0, 2.0, 0.5)]
    lines += [line("trainer", step, end, **{"time/sync": 0.2}) for step, end in ((2, 12.2), (3, 13.9))]
    lines.append(line("explorer", 2, 11.0, **{"time/explore": 3.0}))  # from 8, two seconds too early
    lines.append(line("explorer", 3, 12.0, **{"time/explore": 1.5}))  # from 10.5, while batch 2 is open
    lines.append(line("explorer", 4, 15.0, **{"time/explore": 2.0}))  # from 13 to beyond the last step
    overlap = measured(lines)
    assert (overlap.seconds, overlap.train, overlap.sync) == pytest.approx((4.0, 2.0, 0.2))
    assert overlap.runners_idle == pytest.approx(0.25), "from 12 to 13 of 10 to 14"
    assert overlap.trainer_idle == pytest.approx(0.125), "what the first step waited for is before the time measured"
    lines.append(line("explorer", 3, 12.5, **{"time/explore": 0.5}))
    assert measured(lines, 2).seconds == pytest.approx(2.0), "a warm-up of two steps is left out"


@pytest.mark.parametrize(("growth", "noise", "flat"), [(0, 1, True), (2, 3, True), (20, 3, False), (-20, 3, True)])
def test_growth_is_told_from_noise(growth: float, noise: float, flat: bool) -> None:
    chance = random.Random(7)
    points = [(5.0 * n, 300 + growth * n / 600 + chance.gauss(0, noise)) for n in range(600)]
    points = [(at, value + (400 if n % 50 == 0 else 0)) for n, (at, value) in enumerate(points)]  # outliers
    line = trend(points)
    assert line is not None
    assert line.is_flat is flat
    assert line.growth == pytest.approx(growth, abs=noise)
    assert line.noise == pytest.approx(2 * noise, rel=0.5)
    assert line.an_hour == pytest.approx(line.growth * 3600 / line.seconds)
    assert trend(points[: LEAST_POINTS - 1]) is None, "too few say nothing"


RATCHET = {"functions": 229, "files": 71, "packages": 25}
"""Maximum figures of ``python benchmarks/path_of_a_task.py``. Lower them when the path gets shorter."""
STATIONS = (
    "agents/trinity_agents/runner/slice_executor.py:SliceExecutor.execute",
    "trinity_mq/dispatch/dispatcher.py:Dispatcher.open",
    "trinity_mq/models/wrapper.py:ModelWrapper.chat_async",
    "agents/trinity_agents/operator/chain_run.py:ChainRun.process",
    "trinity_mq/training/learner.py:TorchLearner.step",
)
"""Functions that the trace must see: at each agent, at the model and at the learner."""


def test_the_path_of_a_task_is_at_most_as_long_as_recorded() -> None:
    functions = functions_on_path()
    assert functions.issuperset(STATIONS), sorted(functions)
    figures = dict(zip(RATCHET, counts(functions), strict=True))
    assert all(figures[name] <= limit for name, limit in RATCHET.items()), (figures, sorted(functions))


ROOT = Path(__file__).parents[3]
FORKED = """
import os, setproctitle, sys
setproctitle.setproctitle(" ".join(sys.argv[1:]))
os.write(1, b"up\\n")
sys.stdin.read()
"""
SUPERVISOR = """
import subprocess, sys
words = sys.argv[2:]
started = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1], *words, "--id", name], stdin=sys.stdin, stdout=sys.stdout)
    for name in ("trainer-0", "runner-0")
]
for one in started:
    one.wait()
"""


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    """Return the module; as a script it imports what lies beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("benchmarks.soak")


async def test_agents_whose_command_line_is_one_text_are_found(soak: ModuleType, tmp_path: Path) -> None:
    """The soak asks for nothing but the supervisor's process, and for the pids of agents that it does not know."""
    words = ("python", "-m", "trinity_mq.cli.main", "agent", str(tmp_path / "config.yaml"))
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUPERVISOR, FORKED, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    run: Any = SimpleNamespace(process=supervisor, pid=lambda agent: None)
    try:
        for _ in range(2):
            assert await supervisor.stdout.readline() == b"up\n"
        found = soak.processes_of(run, tmp_path)
        assert set(found) == {"supervisor", "engine", "trainer-0", "runner-0"}
        assert len({found["trainer-0"], found["runner-0"], supervisor.pid}) == 3
        assert set(soak.processes_of(run, tmp_path / "other")) == {"supervisor", "engine"}, "agents of another run"
    finally:
        supervisor.stdin.close()
        await supervisor.wait()


def test_memory_is_that_of_anonymous_pages_and_a_process_without_samples_is_said(soak: ModuleType) -> None:
    rollup = "556-7ff ---p [rollup]\nRss: 194609 kB\n"
    assert soak.anonymous_memory(f"{rollup}Pss_Anon: 1024 kB\nAnonymous:   2048 kB\n") == 2.0
    with pytest.raises(ValueError, match=r"Linux 4\.14"):
        soak.anonymous_memory(rollup)
    watch = soak.Watch("run")
    watch.note_memory({"this": os.getpid(), "gone": 2**22 + 1, "not known": None})
    assert set(watch.samples) == {"memory/this"}
    assert 1.0 < watch.samples["memory/this"][0][1] < psutil.Process().memory_info().rss / 2**20
    for _ in range(20):
        watch.note("memory/supervisor", 50.0)
    said = "the memory of engine was sampled 0 times, that of the supervisor 20 times"
    assert soak.unwatched(watch, ["engine", "supervisor"]) == [said]

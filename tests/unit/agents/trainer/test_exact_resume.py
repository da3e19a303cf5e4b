"""A trainer that is killed and started again does what one that was left alone does, bit for bit: real processes, a
real learner, a recorded stream.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.trainer.replay import Kill, record, started
from trinity_agents.trainer.audit import Auditor
from trinity_agents.trainer.history import last_progress, last_saved, lineage
from trinity_mq.config.agents import SupervisorConfig
from trinity_mq.training.checkpoints.checkpoint import find_checkpoints, verify
from trinity_mq.training.checkpoints.state import read_parts

BATCHES = 30
SETTINGS = ("trainer.save_interval=5", "trainer.max_checkpoints_to_keep=9", "algorithm.optimizer.lr=1e-3")
TIMES = ("time/", "perf/", "trainer/generation", "trainer/idle_frac")
LIMIT = 50.0

pytestmark = pytest.mark.timeout(180)

LIVES = [
    Kill("open", r"\.partial-progress-000005.*\.distcp"),  # the first checkpoint is being written
    Kill("os.rename", r"\.partial-progress-000010"),  # all is written, and nothing committed
    Kill("shutil.rmtree", r"\.retired-progress-000015"),  # committed, and nobody knows it yet
]
"""Each dies of another checkpoint. One that died of the same might do so within the same batch, and a batch within
which two lives died is skipped.
"""
POINTS = [
    ("os.mkdir", r"\.partial-progress-{}-\w+$"),
    ("open", r"\.partial-progress-{}.*/learner\.json"),
    ("open", r"\.partial-progress-{}.*\.distcp"),
    ("open", r"\.partial-progress-{}.*/\.metadata"),
    ("open", r"\.partial-progress-{}.*/model/config\.json"),
    ("open", r"\.partial-progress-{}.*/trainer\.json"),
    ("os.rename", r"\.partial-progress-{}-\w+$"),
    ("shutil.rmtree", r"\.retired-progress-{}"),
    ("shutil.rmtree", r"/progress-{}$"),
]
"""In the order in which a checkpoint passes them; the last is its removal by the next one."""
BY_DEFAULT = {"epochs, mini-batches and batches in a step"}
"""The case with parts of a step; the others carry numbers, or a model of their own."""
CASES: dict[str, tuple[str, ...]] = {
    "a critic": ("algorithm.algorithm_type=ppo", "algorithm.kl=null", "algorithm.critic.warmup_steps=2"),
    "a moving reference": (
        'algorithm.kl={"kind": "k2", "coef": 0.1}',
        'algorithm.reference={"update": "ema", "every_steps": 1, "decay": 0.5}',
    ),
    "baselines of roles": ("algorithm.algorithm_type=rae",),
    "a KL in the rewards that follows a target": (
        "algorithm.algorithm_type=reinforceplusplus",
        "algorithm.kl=null",
        'algorithm.reward_kl={"coef": 0.1, "target": 0.01, "horizon": 24}',
    ),
    "epochs, mini-batches and batches in a step": (
        "algorithm.epochs=2",
        "algorithm.mini_batches=2",
        "trainer.batches_per_step=2",
        "synchronizer.sync_interval=2",
        "trainer.max_tokens_per_micro_batch=40",
    ),
}


def trained(folder: Path, file: Path, settings: Sequence[str], batches: int) -> Path:
    """Train in a process until it ends by itself."""
    process = started(folder, file, settings, batches)
    process.join(LIMIT)
    assert process.exitcode == 0, f"exit code {process.exitcode}"
    return folder


def killed(folder: Path, file: Path, settings: Sequence[str], kill: Kill) -> None:
    """Train in a process that kills itself."""
    process = started(folder, file, settings, 100, kill)
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL, f"exit code {process.exitcode}, wanted a kill at {kill}"


def killed_from_outside(folder: Path, file: Path, settings: Sequence[str], when: Callable[[], bool]) -> None:
    """Train in a process that is killed once ``when`` holds, whatever it does then."""
    process = started(folder, file, settings, 100)
    wait_for(process, when)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL


def wait_for(process: BaseProcess, when: Callable[[], bool]) -> None:
    """Return once ``when`` holds, which another process brings about."""
    ends = time.monotonic() + LIMIT
    while not when():
        assert time.monotonic() < ends
        assert process.is_alive()
        time.sleep(0.005)


def final(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the generation of the newest checkpoint, and all else that is in it, tensors as bytes."""
    newest = find_checkpoints(folder / "checkpoints")[0][0]
    parts = read_parts(newest.path, {})
    found: dict[str, Any] = {"weights": newest.weights, **newest.state.model_dump(exclude={"generation"})}
    for name, part in parts.items():
        found[name] = part.facts
        for tensor, content in part.tensors.items():
            found[f"{name}.{tensor}"] = (content.dtype, content.shape, content.numpy().tobytes())
    return newest.state.generation, found


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Return all metrics by batch but those that measure time; of a batch that was trained twice, both are there."""
    found: dict[int, dict[str, float]] = {}
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        values = {name: value for name, value in line.items() if "/" in name and not name.startswith(TIMES)}
        if "actor/optimizer_steps" in values:
            known = found.setdefault(line["step"], values)
            assert known == values, f"batch {line['step']} was trained again with another result"
    return found


def assert_same(one: Path, other: Path, batches: int) -> None:
    (_, wanted), (generation, found) = final(one), final(other)
    different = [name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)]
    assert different == []
    assert any(name.startswith("optimizer.") for name in wanted)
    assert metrics(one) == metrics(other)
    straight, again = (lineage(folder / "history", n, batches) for folder, n in ((one, 1), (other, generation)))
    assert straight == again
    uids = [uid for entry in again for uid in entry["uids"]]
    assert len(uids) == len(set(uids)) == batches * 4


def audited(folder: Path) -> str:
    auditor = Auditor(folder, find_checkpoints(folder / "checkpoints")[0][0])
    auditor.check_folder()
    return "; ".join(one.text for one in auditor.checks if one.result != "holds")


def test_killed_at_the_worst_moments_it_does_the_same_to_the_bit(tmp_path: Path) -> None:
    record(tmp_path / "recorded", tmp_path / "ready", BATCHES, SETTINGS)
    straight = trained(tmp_path / "straight", tmp_path / "ready", SETTINGS, BATCHES)
    assert len(metrics(straight)) == BATCHES

    folder = tmp_path / "killed"
    for kill in LIVES:
        killed(folder, tmp_path / "ready", SETTINGS, kill)
    history = folder / "history" / "4.jsonl"
    seen = ('{"saved":20}', '"progress":22')
    killed_from_outside(
        folder,
        tmp_path / "ready",
        SETTINGS,
        lambda: history.exists() and all(one in history.read_text() for one in seen),
    )
    trained(folder, tmp_path / "ready", SETTINGS, BATCHES)
    begun = [(folder / "history" / f"{n}.jsonl").read_text().splitlines()[0] for n in range(1, 6)]
    origins = [json.loads(line)["resumed_from"] for line in begun]
    *first, last = [one and one["progress"] for one in origins]
    assert first == [None, None, 5, 15]
    assert last in {20, 25}, "the kill may come a little late"
    assert_same(straight, folder, BATCHES)
    assert audited(folder) == ""


@pytest.mark.extended
def test_killed_at_each_point_of_a_checkpoint_it_goes_on_from_the_last_one_committed(tmp_path: Path) -> None:
    """Each life dies of the second checkpoint that it writes: it is also in the midst of a batch, and what kills two
    lives in the same batch is skipped.
    """
    batches = 2 * len(POINTS) + 2
    settings = ("trainer.save_interval=1", "trainer.max_checkpoints_to_keep=1", "algorithm.optimizer.lr=1e-3")
    record(tmp_path / "recorded", tmp_path / "ready", batches, settings)
    straight = trained(tmp_path / "straight", tmp_path / "ready", settings, batches)
    folder = tmp_path / "killed"
    for number, (event, path) in enumerate(POINTS, 1):
        killed(folder, tmp_path / "ready", settings, Kill(event, path.format(f"{2 * number:06d}")))
        whole, damaged = find_checkpoints(folder / "checkpoints")
        dying = 2 * number
        newest = {"retired": [dying, dying - 1], "/progress-{}$": [dying + 1, dying]}
        wanted = next((found for name, found in newest.items() if name in path), [dying - 1])
        assert [one.state.progress for one in whole] == wanted
        assert damaged == []
        for one in whole:
            verify(one)
    trained(folder, tmp_path / "ready", settings, batches)
    assert_same(straight, folder, batches)
    assert audited(folder) == ""


@pytest.mark.parametrize(
    "interval",
    [
        pytest.param(1, id="while a checkpoint is written"),
        pytest.param(100, id="long before one is due", marks=pytest.mark.extended),
    ],
)
def test_asked_to_end_it_saves_within_its_grace(tmp_path: Path, interval: int) -> None:
    settings = (*SETTINGS, f"trainer.save_interval={interval}")
    record(tmp_path / "recorded", tmp_path / "ready", 12, settings)
    straight = trained(tmp_path / "straight", tmp_path / "ready", settings, 12)
    folder = tmp_path / "ended"
    history = folder / "history" / "1.jsonl"
    process = started(folder, tmp_path / "ready", settings, 100)
    wait_for(process, lambda: history.exists() and '"progress":4' in history.read_text())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(SupervisorConfig().grace)
    assert process.exitcode == 0
    saved, last = last_saved(folder / "history"), last_progress(folder / "history")
    assert saved == last >= 4, "all that was trained is in the checkpoint"
    trained(folder, tmp_path / "ready", settings, 12)
    assert_same(straight, folder, 12)


@pytest.mark.parametrize(
    "case", [case if case in BY_DEFAULT else pytest.param(case, marks=pytest.mark.extended) for case in CASES]
)
def test_all_that_goes_on_from_step_to_step_does(tmp_path: Path, case: str) -> None:
    settings = (*SETTINGS, *CASES[case])
    record(tmp_path / "recorded", tmp_path / "ready", 8, settings)
    settings = (*settings, "trainer.save_interval=4")
    straight = trained(tmp_path / "straight", tmp_path / "ready", settings, 8)
    folder = tmp_path / "killed"
    killed(folder, tmp_path / "ready", settings, Kill("shutil.rmtree", r"\.retired-progress-000004"))
    trained(folder, tmp_path / "ready", settings, 8)
    assert_same(straight, folder, 8)
    assert len(metrics(straight)) == (4 if "batches" in case else 8)

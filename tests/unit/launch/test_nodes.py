"""A run on several machines: the processes of each, and the SLURM script. tests/e2e/test_nodes.py runs them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.cli.main import argument_parser
from trinity_mq.config import Config, load_config
from trinity_mq.errors import CommandError
from trinity_mq.launch.nodes import NodeLayout, node_processes, run_node
from trinity_mq.runtime.errors import EXIT_RESTART
from trinity_mq.runtime.process import mark_run_over

ROOT = Path(__file__).parents[3]
TARGET = ("run.yaml", "name=x", "seed=3")
LAYOUT = NodeLayout(trainers=("a", "b"), engines=("c", "d"))


def config(**more: Any) -> Config:
    return load_config({"name": "x", "model": {"tiny": {}}, "trainer": {"nproc": 8}, "run_dir": "/nonexistent", **more})


def commands(host: str, layout: NodeLayout = LAYOUT) -> dict[str, list[str]]:
    """The words of each process after the Python interpreter."""
    return {spec.name: list(spec.argv[1:]) for spec in node_processes(config(), TARGET, layout, host)}


def test_each_host_starts_its_part() -> None:
    assert {host: list(commands(host)) for host in "abcd"} == {
        "a": ["trainer-0-node0"],
        "b": ["trainer-0-node1"],
        "c": ["explorer-0", "operator-0", "runner-0", "runner-1"],
        "d": ["engines-d"],
    }
    [trainer] = commands("b").values()
    rendezvous = ["--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=a", "--master-port=29400"]
    assert trainer[:9] == ["-m", "trinity_mq.launch.torchrun", "/nonexistent", *rendezvous, "--max-restarts=0"]
    told = argument_parser().parse_args(trainer[11:])
    assert (told.command, told.id, told.target) == ("trainer", "trainer-0", "run.yaml")
    assert told.overrides == ["name=x", "seed=3", "synchronizer.host=a"]
    explorer = argument_parser().parse_args(commands("c")["explorer-0"][2:])
    assert (explorer.engines_only, explorer.overrides[-1]) == (False, "explorer.rollout_model.host=c")
    engines = argument_parser().parse_args(commands("d")["engines-d"][2:])
    assert (engines.engines_only, engines.id, engines.overrides[-1]) == (
        True,
        "engines-d",
        "explorer.rollout_model.host=d",
    )


def test_one_trainer_host_needs_no_torchrun_and_a_host_may_have_both_parts() -> None:
    found = commands("a", NodeLayout(trainers=("a",), engines=("b", "a")))
    assert list(found) == ["trainer-0", "engines-a"]
    assert found["trainer-0"][:3] == ["-m", "trinity_mq.cli.main", "trainer"]
    assert list(commands("b", NodeLayout(trainers=("b",)))) == ["trainer-0"], "engines are started in another way"


@pytest.mark.parametrize(
    ("layout", "host", "broker", "words"),
    [
        (LAYOUT, "e", {"url": "amqp://b/"}, "this host is 'e', and the run has the hosts a, b, c, d"),
        (NodeLayout(trainers=("a", "a")), "a", {"url": "amqp://b/"}, "--trainers names 'a' twice"),
        (NodeLayout(trainers=("a",), engines=("n-1", "n_1")), "a", {"url": "amqp://b/"}, "both be called engines-n-1"),
        (LAYOUT, "a", {}, "TRINITY_MQ_BROKER_URL on each machine"),
    ],
)
def test_what_cannot_work_is_refused(
    layout: NodeLayout, host: str, broker: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRINITY_MQ_BROKER_URL", "TRINITY_MQ_BROKER_URL_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CommandError, match=words):
        asyncio.run(run_node(config(broker=broker), TARGET, layout, host, print))


ENDS = "import os, sys, time; {}"


@pytest.mark.parametrize(
    ("code", "is_over", "status"),
    [("sys.exit(0)", True, 0), ("sys.exit(0)", False, EXIT_RESTART), ("sys.exit(3)", True, 1)],
)
def test_ranks_that_rank_0_ended_before_the_end_of_the_run_are_started_again(
    tmp_path: Path, code: str, is_over: bool, status: int
) -> None:
    """Torchrun calls a rank that ends with 0 a success. Its machine would wait for ever."""
    (tmp_path / "rank.py").write_text(ENDS.format(code))
    if is_over:
        mark_run_over(tmp_path)
    options = ["--nnodes=1", "--nproc-per-node=1", "--master-port=0", "--max-restarts=0", "-m", "rank"]
    run = "from trinity_mq.launch import torchrun; torchrun.MARK_SECONDS = 0.2; raise SystemExit(torchrun.main())"
    done = subprocess.run(
        [sys.executable, "-c", run, str(tmp_path), *options],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr


SRUN = """#!/usr/bin/env bash
shift
for SLURMD_NODENAME in n1 n2 n3 n4; do export SLURMD_NODENAME; "$@"; done
"""


def slurm(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with programs of SLURM that start every task here."""
    programs = {"scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\nn4\\n'\n", "srun": SRUN}
    programs["venv/bin/trinity-mq"] = '#!/bin/sh\necho "$@"\n'
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    script = ROOT / "deploy" / "slurm" / "trinity-mq.sbatch"
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "VENV": str(folder / "venv"),
        "SLURM_JOB_NODELIST": "n[1-4]",
    }
    return subprocess.run(
        [script, "run.yaml", "seed=3"], env=environment | env, capture_output=True, text=True, check=False
    )


def test_the_slurm_script_gives_each_machine_its_part(tmp_path: Path) -> None:
    done = slurm(tmp_path, TRINITY_MQ_BROKER_URL="amqp://broker/")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    for line, host in zip(lines, ("n1", "n2", "n3", "n4"), strict=True):
        told = argument_parser().parse_args(line)
        assert (told.trainers, told.engines, told.host) == ("n1,n2", "n3,n4", host)
        assert (told.target, told.overrides) == ("run.yaml", ["seed=3"])
    assert "TRINITY_MQ_BROKER_URL_FILE" in slurm(tmp_path).stderr
    assert "raise --nodes" in slurm(tmp_path, TRINITY_MQ_BROKER_URL="amqp://broker/", TRAINERS="4").stderr

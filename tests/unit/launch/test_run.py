"""``trinity-mq run`` as a process, on a real broker, with stand-ins for the agents."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_mq.bus import Topology, create_bus
from trinity_mq.config import BrokerConfig, load_config
from trinity_mq.messages import TaskBody, TaskSlice
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.targets.run_folder import RunFolder

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[3]
STAND_IN = '''
"""An agent that does nothing but what its script says."""
import asyncio, os, signal, sys
from trinity_mq.bus import Envelope, Topology, create_bus
from trinity_mq.messages import Heartbeat, encode
from trinity_mq.runtime.process import die_with_parent
from trinity_mq.telemetry import MetricsWriter


OTHERS = ("runner-0", "runner-1", "operator-0", "trainer-0")


def main(config, agent_id):
    return asyncio.run(live(config, agent_id, ROLE))


async def live(config, agent_id, role):
    script = config.path / f"{agent_id}.script"
    if script.exists():
        print(f"{agent_id} goes by its script", file=sys.stderr)
        code = int(script.read_text())
        if code != 78:
            script.unlink()
        return code
    asked = asyncio.Event()
    deaf = (config.path / "deaf").exists()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, (lambda: None) if deaf else asked.set)
    topology = Topology(config.name)
    bus = create_bus(config.broker, topology, agent_id)
    await bus.connect()
    await bus.declare(*topology.durable)

    async def beat(seq, state):
        detail = {"total_batches": 3, "progress": 0, "committed": [1, 0]}
        if (steps := config.path / "steps").exists():
            detail |= {"generation": 1, "step": int(steps.read_text())}
        own = {"role": role, "id": agent_id, "incarnation": str(os.getpid()), "lease": 10.0}
        body = encode(Heartbeat(seq=seq, state=state, detail=detail, **own))
        await bus.publish(topology.exchange("telemetry"), f"beat.{role}.{agent_id}", Envelope(body=body, kind="beat"))

    assert os.environ["OMP_NUM_THREADS"] == "1"
    die_with_parent(int(os.environ["TRINITY_MQ_PARENT"]))
    print("up", os.getpid(), flush=True)
    (config.path / f"{agent_id}.up").touch()
    over = config.path / "over"  # stands for the explorer's last heartbeat, by which real agents end
    if role == "explorer" and not (config.path / "go-slow").exists():
        # not before the others are up: they import for seconds where the machine is busy
        while not all((config.path / f"{other}.up").exists() for other in OTHERS):
            await asyncio.sleep(0.05)
        metrics = MetricsWriter(config.path, role, agent_id, tensorboard=False)
        for step in range(4):
            metrics.write(step, {"rollout/reward/mean": step / 3})
        metrics.write(0, {"eval/held_out/accuracy/mean@1": 0.0})
        metrics.write(3, {"eval/held_out/accuracy/mean@1": 0.75})
        metrics.close()
        await beat(1, "finished")
        over.touch()
    else:
        seq = 0
        while not (asked.is_set() or over.exists()):
            seq += 1
            await beat(seq, "working")
            await asyncio.wait([asyncio.ensure_future(asked.wait())], timeout=0.3)
        await beat(seq + 1, "gone")
    await bus.close()
    return 0
'''
ROLES = ("explorer", "runner", "operator", "trainer")
AGENTS = ("explorer-0", "runner-0", "runner-1", "operator-0", "trainer-0")


class Bench:
    """A folder with a configuration and stand-ins, and the command to run them."""

    def __init__(self, folder: Path, run: str, url: str) -> None:
        self.folder, self.url = folder, url
        self.config = folder / "c.yaml"
        self.config.write_text(
            f"name: {run}\nrun_dir: {folder}/run\nmodel: {{tiny: {{}}}}\nbuffer: {{total_steps: 3}}\n"
            "supervisor: {max_restarts: 2}\n"
        )
        package = folder / "stand-ins" / "trinity_agents"
        package.mkdir(parents=True)
        # what has no stand-in is found behind them
        own_path = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
        (package / "__init__.py").write_text(own_path)
        for role in ROLES:
            (package / role).mkdir()
            (package / role / "__init__.py").write_text(own_path)
            (package / role / "agent.py").write_text(f"ROLE = {role!r}\n{STAND_IN}")
        # the fork server of each run would import them for seconds
        self.unavailable = [package.parent / "torch.py", package.parent / "transformers.py"]
        for file in self.unavailable:
            file.write_text("raise ImportError('the stand-ins do not need it')\n")
        self.run_dir = folder / "run"
        self.run_dir.mkdir()

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        path = f"{self.folder / 'stand-ins'}:{ROOT}:{ROOT / 'agents'}"
        return subprocess.Popen(
            [sys.executable, "-m", "trinity_mq.cli.main", *(words or ("run", str(self.config)))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "TRINITY_MQ_BROKER_URL": self.url, **variables},
        )

    def finish(self, *words: str, **variables: str) -> tuple[int, str, str]:
        with self.start(*words, **variables) as process:
            out, err = process.communicate(timeout=50)
            return process.returncode, out, err


@pytest.fixture
def bench(tmp_path: Path, unique_run: str, broker_url: str) -> Bench:
    return Bench(tmp_path, unique_run, broker_url)


def read_until(process: subprocess.Popen[str], found: Callable[[str], bool]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found(line):
            return line
    pytest.fail(f"the command ended first: {process.stderr.read() if process.stderr else ''}")


def test_to_the_end_and_once_more(bench: Bench) -> None:
    code, out, err = bench.finish()
    assert (code, err) == (0, "")
    assert "evaluation at step 3: held_out accuracy 0.750" in out
    assert "accuracy    0.000 -> 0.750" in out
    for agent in AGENTS:
        assert "up" in (bench.run_dir / "logs" / f"{agent}.out").read_text()
    assert not (bench.run_dir / "broker.url").exists()

    code, out, err = bench.finish()
    assert (code, err) == (0, "")
    assert "accuracy    0.000 -> 0.750" in out
    assert "this run has finished" in out
    assert (bench.run_dir / "logs" / "trainer-0.out").read_text().count("up") == 1


def test_fresh_begins_anew_beside_the_old_folder_and_without_what_is_on_the_broker(bench: Bench) -> None:
    bench.finish()
    topology = Topology(load_config(bench.config).name)
    old = topology.batch_queue(1, "old")

    async def leave_something() -> None:
        bus = create_bus(BrokerConfig(url=bench.url), topology, "test")
        await bus.connect()
        await bus.declare(old)
        left = envelope(TaskSlice(batch=1, ticket="old", task_id=0, task=TaskBody()))
        assert await bus.publish(topology.exchange("tasks"), "train.1", left)
        await bus.close()

    async def depths() -> list[int | None]:
        bus = create_bus(BrokerConfig(url=bench.url), topology, "test")
        await bus.connect()
        found = [await bus.depth(name) for name in (old.name, topology.tasks_train.name)]
        await bus.close()
        return found

    asyncio.run(leave_something())
    code, out, err = bench.finish("run", str(bench.config), "--fresh", "seed=1")
    assert (code, err) == (0, "")
    assert f"the earlier run is in {bench.run_dir}.1" in out
    assert "evaluation at step 3: held_out accuracy 0.750" in out
    for folder in (bench.run_dir, bench.run_dir.with_name("run.1")):
        assert (folder / "logs" / "trainer-0.out").read_text().count("up") == 1
    assert asyncio.run(depths()) == [None, 0]


def test_ctrl_c_drains_and_the_same_command_resumes(bench: Bench) -> None:
    (bench.run_dir / "go-slow").touch()
    with bench.start() as process:
        read_until(process, lambda line: "agents 5/5" in line)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (130, "")
    assert "draining; interrupt again to kill at once" in out
    assert f"resume with the same command: trinity-mq run {bench.config}" in out

    (bench.run_dir / "go-slow").unlink()
    code, out, err = bench.finish("run", str(bench.config), "explorer.eval_interval=7")
    assert code == 0
    assert err == "warning: changed since the last start: explorer.eval_interval: 100 -> 7\n"
    assert "accuracy    0.000 -> 0.750" in out


def test_a_second_ctrl_c_kills_at_once(bench: Bench) -> None:
    (bench.run_dir / "go-slow").touch()
    (bench.run_dir / "deaf").touch()
    with bench.start("run", str(bench.config), "supervisor.grace=3600") as process:
        read_until(process, lambda line: "agents 5/5" in line)
        process.send_signal(signal.SIGINT)
        read_until(process, lambda line: "draining" in line)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (130, "")
    assert "killed at once" in out


def test_a_broker_that_is_not_there_or_refuses_the_password(bench: Bench) -> None:
    name, _, address = bench.url.rpartition("@")
    elsewhere = "amqp://u:secret@127.0.0.1:1/"
    for url in (elsewhere, f"{name.rpartition(':')[0]}:secret@{address}"):
        code, out, err = bench.finish("run", str(bench.config), "broker.connect_timeout=0.5", TRINITY_MQ_BROKER_URL=url)
        assert code == 2
        assert len(err.splitlines()) == 1
        assert err.startswith("trinity-mq run: ")
        assert "secret" not in out + err
    words = ("run", str(bench.config), "broker.connect_timeout=3600")
    with bench.start(*words, TRINITY_MQ_BROKER_URL=elsewhere) as process:
        read_until(process, lambda line: "on the given broker" in line)
        read_until(process, lambda line: "waits for the broker, 1 of 3600 s: no connection to" in line)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    assert (process.returncode, err.splitlines()[1:]) == (130, [])
    assert err.startswith("warning: changed since the last start: broker.connect_timeout")
    assert "resume with the same command" in out


def test_what_fails_for_good_ends_the_run_and_says_why(bench: Bench) -> None:
    (bench.run_dir / "go-slow").touch()
    (bench.run_dir / "trainer-0.script").write_text("78")
    code, out, err = bench.finish()
    assert code == 4
    assert err.startswith("trainer-0 failed permanently (exit code 78): a restart does not help; see ")
    assert "  trainer-0 goes by its script" in err
    failed = out.index("trainer-0 failed permanently (exit code 78): a restart does not help\n")
    assert "  trainer-0 goes by its script" in out[failed:]
    assert "trained nothing (exit code 4); fix the cause, then start over: " in out


def test_what_can_be_known_before_the_start_is_said_then_and_leaves_no_trace(bench: Bench) -> None:
    wrong = [
        "model.tiny=null",
        "model.model_path=/no/such/model",
        "buffer.taskset={storage_type: queue, workflow_args: {x: 1}}",
    ]
    for file in bench.unavailable:
        file.unlink()  # the check of a workflow's arguments imports it
    code, out, err = bench.finish("run", str(bench.config), *wrong)
    assert (code, out) == (2, "")
    arguments, model = err.splitlines()
    assert arguments == "trinity-mq run: taskset 'train': workflow_args.x does not exist; there are greedy_baseline"
    assert model.startswith("model.model_path /no/such/model: no such folder; give a Hugging Face folder or a hub id")
    taskset = "{storage_type: queue, workflow: program_workflow, workflow_args: {command: [/nowhere/agent]}}"
    code, _, err = bench.finish("run", str(bench.config), f"buffer.taskset={taskset}")
    assert code == 0, "another model than at the start that was refused"
    assert err.startswith("taskset 'train': warning: there is no program '/nowhere/agent' on this machine; install it")


def test_while_it_runs_its_status_is_shown_a_second_run_is_refused_and_sigterm_is_143(bench: Bench) -> None:
    (bench.run_dir / "go-slow").touch()
    with bench.start() as process:
        read_until(process, lambda line: "agents 5/5" in line)
        assert RunFolder(load_config(bench.config)).saved_broker_url() == bench.url
        code, out, err = bench.finish("status", str(bench.config), "--seconds", "1.5", TRINITY_MQ_BROKER_URL="")
        assert code == 0
        assert err == (
            f"next: trinity-mq why {bench.config}: what does the run wait for? After its end: report, inspect, audit\n"
        )
        assert [agent for agent in AGENTS if agent not in out] == []
        code, _, err = bench.finish("status", "nobody-here", "--broker", bench.url, "--seconds", "0.1")
        assert (code, err) == (1, "no agent of run 'nobody-here' sent a heartbeat within 0.1 s\n")
        code, out, err = bench.finish("dead", "list", str(bench.config), TRINITY_MQ_BROKER_URL="")
        assert (code, err) == (0, "")
        assert "has no dead letters" in out
        code, _, err = bench.finish()
        assert code == 2
        assert f"is in use by process {process.pid}" in err
        process.terminate()
        process.communicate(timeout=50)
    assert process.returncode == 143

"""The host with real engine processes; weights come from a receiver that makes them from a seed."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load

from tests.unit.sync.weights import manifest_of
from trinity_mq.config import Config
from trinity_mq.engines.host.admin_client import EngineAdmin
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.engines.host.process import EngineProcess
from trinity_mq.engines.host.ready_file import ReadyFile, ready_descriptor
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.engines.torch.weights import named_weights
from trinity_mq.models import EngineFailed, EngineLost, ModelError, ModelWrapper
from trinity_mq.runtime.event_loop import run_on_fast_loop

HostOf = Callable[..., EngineHost]

ENGINE = """
import torch
from trinity_agents.engine import agent as engine

async def receive(spec):
    generator = torch.Generator().manual_seed(spec["seed"])
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, _, shape in spec["manifest"]}

engine.run(receive)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    return [sys.executable, str(script)]


@pytest.fixture
async def host_of(tmp_path: Path) -> AsyncIterator[Callable[..., EngineHost]]:
    hosts: list[EngineHost] = []

    def make(config: Config, command: list[str], **options: Any) -> EngineHost:
        hosts.append(EngineHost(config, tmp_path, "e0", command=command, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        await host.detach()
        if (ready := ReadyFile.read(host.ready_file)) is not None and ready.lives():
            os.kill(ready.pid, signal.SIGKILL)


TEXTS = {"id": "e0", "token": "", "name": "", "model_path": "", "fingerprint": "", "digest": ""}


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def living_children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


async def until(host: EngineHost, holds: Callable[[], bool], seconds: float = 40.0) -> None:
    changed = asyncio.Event()
    host.on_change = changed.set
    async with asyncio.timeout(seconds):
        while not holds():
            changed.clear()
            await changed.wait()


async def sync(host: EngineHost, generator: TextGenerator, seed: int, version: tuple[int, int]) -> dict[str, Any]:
    await host.pause()
    manifest = manifest_of(named_weights(generator.model).items())
    canary = await host.receive({"seed": seed, "manifest": manifest, "canary": {"tokens": [3, 4, 5]}})
    await host.commit(version, seed)
    return canary


async def test_an_engines_life(
    config: Config, host_of: HostOf, tmp_path: Path, command: list[str], shared_generator: TextGenerator
) -> None:
    host = host_of(config, command)
    assert not host.snapshot.alive
    await host.start()
    assert (host.snapshot.alive, host.snapshot.state, host.snapshot.version) == (True, "empty", None)
    ready = ReadyFile.read(host.ready_file)
    assert ready is not None
    assert host.ready_file.stat().st_mode & 0o777 == 0o600
    assert os.getsid(ready.pid) == ready.pid != os.getsid(0), "a session of its own"
    assert host.snapshot.fingerprint == shared_generator.codec.fingerprint()
    pid = ready.pid
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(host.keep())
        canary = await sync(host, shared_generator, 1, (1, 0))
        assert len(canary["logprobs"]) == 2
        assert (host.snapshot.state, host.snapshot.version, host.snapshot.progress) == ("current", (1, 0), 1)
        model = ModelWrapper(host.snapshot.model())
        assert len(await model.chat_async([{"role": "user", "content": "+372="}], n=3)) == 3
        await model.aclose()
        data = load(await host.weight("model.norm.weight"))
        assert data["model.norm.weight"].shape == (64,)
        # killed at its worst: noticed at once, started again, empty
        os.kill(pid, signal.SIGKILL)
        await until(host, lambda: not host.snapshot.alive, 2.0)
        with pytest.raises(EngineLost):
            await host.pause()
        await until(host, lambda: host.snapshot.alive)
        await until(host, lambda: host.snapshot.restarts == 1, 2.0)
        assert (host.snapshot.state, host.snapshot.version) == ("empty", None)
        await sync(host, shared_generator, 2, (1, 1))
        keeping.cancel()
    await host.pause()
    await host.detach()  # as one that was killed in the middle of a sync
    ready = ReadyFile.read(host.ready_file)
    assert ready is not None
    assert ready.lives()
    assert ready.pid != pid
    # its successor adopts it with the weights it has, and has it serve: that sync is over for both
    successor = host_of(config, ["/bin/false"])
    await successor.start()
    assert (successor.snapshot.version, successor.snapshot.state) == ((1, 1), "current")
    assert successor.snapshot.detail().url == ready.url
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(successor.keep())
        await asyncio.sleep(0)
        await successor.stop()
        await keeping
    assert not ready.lives()
    assert not successor.ready_file.exists()
    assert not successor.snapshot.alive


async def test_one_built_from_other_settings_is_replaced_and_a_lease_ends_it(
    config: Config, host_of: HostOf, tmp_path: Path, command: list[str]
) -> None:
    host = host_of(config, command)
    await host.start()
    await host.detach()
    old = ReadyFile.read(host.ready_file)
    assert old is not None
    rollout = config.explorer.rollout_model.model_copy(update={"max_batch_sequences": 7})
    explorer = config.explorer.model_copy(update={"rollout_model": rollout})
    other = host_of(config.model_copy(update={"explorer": explorer}), command)
    await other.start()
    new = ReadyFile.read(host.ready_file)
    assert new is not None
    assert new.pid != old.pid
    assert not old.lives()
    async with aiohttp.ClientSession() as session:
        await EngineAdmin(session, new.url, new.token).post("lease", {"seconds": 0.2})
    assert await asyncio.to_thread(psutil.Process(new.pid).wait, 20) == 0
    assert "lease ran out" in (tmp_path / "logs" / "e0.jsonl").read_text()


async def test_sigterm_ends_an_engine_with_code_0(config: Config, host_of: HostOf, command: list[str]) -> None:
    host = host_of(config, command)
    await host.start()
    ready = ReadyFile.read(host.ready_file)
    assert ready is not None
    os.kill(ready.pid, signal.SIGTERM)
    assert await asyncio.to_thread(psutil.Process(ready.pid).wait, 20) == 0


async def test_a_model_that_cannot_be_had_ends_the_host(
    config: Config, host_of: HostOf, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    model = config.model.model_copy(update={"tiny": None, "model_path": str(tmp_path / "empty")})
    host = host_of(config.model_copy(update={"model": model}), command)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        await host.start()


@pytest.mark.parametrize(
    ("program", "says"),
    [("print('boom'); raise SystemExit(3)", r"ended before it was ready \(exit code 3\); its last output:\nboom"),
     ("print('torch.OutOfMemoryError: CUDA out of memory.'); raise SystemExit(1)",
      r"\(exit code 1\): the GPU has too little free memory; lower .*gpu_memory_utilization"),
     ("print('ValueError: Free memory is less than desired GPU memory utilization (0.9)'); raise SystemExit(1)",
      r"\(exit code 1\): other processes, such as the trainer, use the GPU; lower"),
     ("print('slow', flush=True); import time; time.sleep(60)", r"not ready within 2 s; its last output:\nslow")],
)  # fmt: skip
async def test_an_engine_that_does_not_start_is_quoted(
    config: Config, host_of: HostOf, program: str, says: str
) -> None:
    host = host_of(config, [sys.executable, "-c", program], start_timeout=2.0)
    before = living_children()
    with pytest.raises(EngineFailed, match=says):
        await host.start()
    assert living_children() <= before
    with pytest.raises(EngineFailed, match="cannot be started"):
        await host_of(config, ["/no/such/program"]).start()


async def test_an_engine_that_keeps_dying_is_given_up(config: Config, host_of: HostOf, tmp_path: Path) -> None:
    supervisor = config.supervisor.model_copy(update={"max_restarts": 2})
    program = f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise SystemExit('no memory')"
    host = host_of(config.model_copy(update={"supervisor": supervisor}), [sys.executable, "-c", program])
    for path in (host.ready_file, host.output):
        path.parent.mkdir()
    with pytest.raises(EngineFailed, match="no memory"):
        await host.keep()
    assert (tmp_path / "starts").read_text() == "xxx"


async def test_an_engine_that_answers_no_renewal_for_a_whole_lease_is_killed(
    config: Config, host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = config.explorer.rollout_model.model_copy(update={"lease": 0.4})
    explorer = config.explorer.model_copy(update={"rollout_model": rollout})
    host = host_of(config.model_copy(update={"explorer": explorer}), ["/bin/false"])
    frozen = sleeper()
    started = psutil.Process(frozen.pid).create_time()
    ready = ReadyFile(**TEXTS, pid=frozen.pid, create_time=started, url="http://127.0.0.1:9")
    async with aiohttp.ClientSession() as session:
        monkeypatch.setattr(host, "_session", session)
        monkeypatch.setattr(host, "_process", EngineProcess(ready, frozen))
        await asyncio.wait_for(host._run_until_death(), 10)
    assert frozen.returncode == -signal.SIGKILL
    assert not host.snapshot.alive


async def test_the_config_and_the_environment_of_an_engine_hold_no_broker_password(
    config: Config, host_of: HostOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = config.broker.model_copy(update={"url": "amqp://me:secret@localhost"})
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", str(broker.url))
    program = "import os; print(dict(os.environ))"
    host = host_of(config.model_copy(update={"broker": broker}), [sys.executable, "-c", program])
    with pytest.raises(EngineFailed, match="HOME") as caught:
        await host.start()
    assert "secret@" not in str(caught.value)
    settings = tmp_path / "engines" / "e0.config.json"
    assert "secret" not in settings.read_text()
    assert settings.stat().st_mode & 0o777 == 0o600


def test_a_ready_file_of_another_process_does_not_live(tmp_path: Path) -> None:
    mine = psutil.Process()
    fields: Any = {**TEXTS, "pid": mine.pid, "url": ""}
    assert ReadyFile(**fields, create_time=mine.create_time()).lives()
    assert not ReadyFile(**fields, create_time=mine.create_time() - 60).lives()
    ReadyFile(**fields, create_time=1.0).write(tmp_path / "ready")
    assert ReadyFile.read(tmp_path / "ready") == ReadyFile(**fields, create_time=1.0)
    (tmp_path / "ready").write_text("{}")
    assert ReadyFile.read(tmp_path / "ready") is None
    assert ReadyFile.read(tmp_path / "none") is None


def test_the_end_of_the_pipe_is_seen_although_the_engine_has_started_a_process() -> None:
    """vLLM is one; uvloop starts processes with all that may be inherited."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)  # as the host passes it

    async def start_and_announce() -> bool:
        child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        os.close(writer)
        is_seen = bool(select.select([reader], [], [], 0.0)[0])
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()
        return is_seen

    assert ready_descriptor(str(writer)) == writer
    try:
        assert run_on_fast_loop(start_and_announce())
    finally:
        os.close(reader)


def test_importing_models_and_the_host_costs_no_torch() -> None:
    program = (
        "import sys, trinity_mq.models as m\n"
        "m.EngineHost, m.InferenceModel, m.ensure_model_folder, m.EngineLost, m.EngineClients\n"
        "assert not {'torch', 'transformers', 'openai'} & set(sys.modules), 'heavy'\n"
        "for name in m.__all__: getattr(m, name)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert torch is not None


LEAVES = """
import os, signal, subprocess, sys
from trinity_mq.engines.host.process import EngineProcess

quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
children = [subprocess.Popen(["sleep", "60"], **quiet) for _ in range(2)]
for child in children:
    EngineProcess(None, child).detach()
os.kill(children[1].pid, signal.SIGKILL)  # by somebody else: nobody here has waited for it
print(children[0].pid)
"""


def test_an_engine_that_is_left_alone_lives_on_and_no_forgotten_child_is_complained_about() -> None:
    done = subprocess.run([sys.executable, "-X", "dev", "-c", LEAVES], capture_output=True, text=True, check=False)
    os.kill(int(done.stdout), signal.SIGKILL)  # it lives
    assert (done.returncode, done.stderr) == (0, "")

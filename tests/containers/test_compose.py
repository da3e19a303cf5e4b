"""``docker compose up`` for real: an agent outside, faults and preempted runners; they cost time and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.containers.broker_container import engine_version
from tests.containers.compose_stack import AGENTS, CANNOT, ComposeStack, StackError, output_of, prepared, say
from tests.serve_clients import Agents, until_settled
from trinity_agents.trainer.history import lineage
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import Config, load_config
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.observability.report.text import make_report

ROOT = Path(__file__).parents[2]
PATIENCE = 900.0
"""Seconds: with other tests beside it a small machine takes minutes to load torch in six containers."""


def test_every_agent_is_given_the_same_right_settings_and_no_secret_is_in_the_file() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert set(services) == {"password", "broker", "gateway", *AGENTS}
    for name in ("gateway", *AGENTS):
        assert services[name]["restart"] == "on-failure", "an agent whose work is over ends with 0 and stays so"
        assert not {"PASSWORD", "PASS"} & {word for key in services[name]["environment"] for word in key.split("_")}
    assert "RABBITMQ_DEFAULT_PASS" not in services["broker"]["environment"]

    def configured(name: str, example: str, *more: str) -> Config:
        command = re.sub(r"\$\{(\w+):-http\S+\}\}", "x", str(services[name]["command"]))
        words = command.split(f"examples/{example}.yaml}} ")[1].split()
        settings = [word for word in words if re.match(r"[\w.]+=", word)]
        return load_config(ROOT / "examples" / f"{example}.yaml", [*more, *settings])

    configs = [configured(name, "smoke") for name in AGENTS]
    assert configs == [configs[0]] * len(AGENTS)
    assert (configs[0].explorer.rollout_model.host, configs[0].synchronizer.host) == ("explorer", "trainer")
    gateway = configured("gateway", "serve", "mode=serve")
    assert gateway.explorer.rollout_model.host == "explorer"
    assert gateway.gateway.key_file is not None
    ports = services["gateway"]["ports"]
    assert ports == ["127.0.0.1:${TRINITY_MQ_GATEWAY_PORT:-8710}:8710"], "its key travels in clear"


@pytest.fixture
async def environment() -> dict[str, str]:
    """Engine, compose and images, as the environment that names them."""
    if engine_version() is None:
        pytest.skip('no Docker engine answers: eval "$(scripts/docker-engine start)"')
    try:
        return await prepared()
    except StackError as error:
        if error.code != CANNOT:
            raise
        pytest.skip(f"docker compose cannot run here: {str(error).splitlines()[-1]}")


@pytest.mark.compose
@pytest.mark.e2e
@pytest.mark.timeout(1800)
async def test_an_agent_outside_trains_through_the_gateway(environment: dict[str, str]) -> None:
    [port] = free_ports(1)
    settings = ("mode=serve", "gateway.batch_wait=1", "buffer.batch_size=32", "explorer.eval_on_startup=false")
    environment |= {"COMPOSE_PROFILES": "serve", "TRINITY_MQ_GATEWAY_PORT": str(port)}
    async with ComposeStack(environment, settings, "serve") as stack, aiohttp.ClientSession() as http:
        await stack.up()
        url = f"http://{await stack.port('gateway', 8710)}"
        key = await stack.read("gateway", "/run/trinity-mq/gateway-key")
        agents = Agents(url, http)
        async with asyncio.timeout(PATIENCE):
            assert (await agents.send("GET", "/health"))[0] == 200
            assert (await agents.send("POST", "/sessions", {}))[0] == 401, "only who has the key may open sessions"
        http.headers["Authorization"] = f"Bearer {key}"
        client = ROOT / "examples" / "agents" / "openai_python.py"
        say(await output_of(sys.executable, client, "--url", url, "--key", key, "--sessions", "160"))
        assert (await until_settled(agents, 160, PATIENCE))["states"] == {"trained": 160}


@pytest.mark.compose
@pytest.mark.chaos
@pytest.mark.e2e
@pytest.mark.timeout(3000)
async def test_the_chaos_command_finds_containers_by_their_labels(environment: dict[str, str], tmp_path: Path) -> None:
    """``trinity-mq chaos --compose``: containers are killed, paused, taken off their networks and restarted, and the
    run that goes on is judged by its streams. ``KILLS=50 SEED=8`` does more, or others.
    """
    [port] = free_ports(1)  # of a restarted container Docker gives a port that nobody chose anew
    kills, seed = os.environ.get("KILLS", "12"), os.environ.get("SEED", "7")
    settings = ("buffer.total_steps=100000", "trainer.save_interval=10", "explorer.eval_interval=1000")
    environment |= {"TRINITY_MQ_AMQP_PORT": str(port)}
    async with ComposeStack(environment, settings) as stack:
        await stack.up(runner=2)
        await stack.until_progress(1, PATIENCE)
        inside = await stack.read("explorer", "/run/trinity-mq/broker-url")
        command = ("-m", "trinity_mq.cli.main", "chaos", str(ROOT / "examples" / "smoke.yaml"), *settings)
        words = ("--compose", stack.project, "--kills", kills, "--seed", seed, "--timeout", "300")
        outside = inside.replace("@broker:5672", f"@127.0.0.1:{port}")  # with a password, which no command line shows
        within = {**environment, URL_VARIABLE: outside}
        said = await output_of(sys.executable, *command, *words, env=within, cwd=tmp_path)
        say(said)
        assert f"{kills} faults in" in said


SLOW_TOOL = """
import asyncio, random
from trinity_mq.workflows.builtin.simple import AsyncSimpleWorkflow

class SlowTool(AsyncSimpleWorkflow):
    '''An answer, and a tool that takes a while to look at it.'''

    async def _dual_body(self):
        found = await super()._dual_body()
        await asyncio.sleep(random.uniform(1.0, 10.0))
        return found
"""
"""An episode that mostly waits, as those with tools do; a third of those under way outlast a drain of 4 seconds."""
TASKS = 32
FLEET, SHARE = 6, 0.3
"""Runners, and the share of them that is taken away at a time."""
SPOT = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "components" / "spot" / "nodes.yaml").read_text())
NOTICE: int = SPOT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
"""Seconds from SIGTERM to SIGKILL."""
PHASES: tuple[tuple[float | None, int], ...] = ((None, 3), (None, 12), (60.0, 24), (None, 8))
"""Seconds from one time that runners are taken away to the next, None for never, and for how many batches."""


@pytest.mark.compose
@pytest.mark.chaos
@pytest.mark.e2e
@pytest.mark.timeout(3000)
async def test_preempted_runners_cost_time_and_no_work(environment: dict[str, str], tmp_path: Path) -> None:
    """Of six runners two are told to go again and again, and new ones come: what they have finished counts, the rest is
    done by others, and nothing has failed.
    """
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples)
    (examples / "slow_tool.py").write_text(SLOW_TOOL)
    total = sum(batches for _, batches in PHASES)
    settings = (
        f"buffer.total_steps={total}", f"buffer.batch_size={TASKS}", "algorithm.repeat_times=4",
        "plugin_dirs=[examples]", "buffer.taskset.workflow=slow_tool.SlowTool",
        "explorer.eval_interval=1000", "explorer.eval_on_startup=false",
        "runner.concurrency=4", "runner.drain_timeout=4", "trainer.save_interval=1000",
    )  # fmt: skip
    environment = {**environment, "TRINITY_MQ_EXAMPLES": str(examples)}
    chance, codes = random.Random(7), list[int]()
    async with ComposeStack(environment, settings) as stack:
        await stack.up(runner=FLEET)

        async def preempt(every: float, over: asyncio.Event) -> None:
            while not over.is_set():
                began = time.monotonic()
                at_work = await stack.healthy("runner")  # one that still starts holds nothing
                victims = chance.sample(at_work, min(len(at_work), math.ceil(SHARE * FLEET)))
                codes.extend(await asyncio.gather(*(stack.preempt(one, NOTICE) for one in victims)))
                await stack.up("runner", runner=FLEET)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every - (time.monotonic() - began)):
                        await over.wait()

        done = 0
        for every, batches in PHASES:
            done += batches
            over = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                if every is not None:
                    group.create_task(preempt(every, over))
                await stack.until_progress(done, PATIENCE)
                over.set()
        await stack.ended(PATIENCE)
        folder, metrics = await stack.fetch(), await stack.metrics()
        say(f"{len(codes)} runners were preempted, exit codes {sorted(set(codes))}")
        assert len(codes) >= 2 * 3
        assert set(codes) == {0}, "each ends in good order within its notice"
        history = lineage(folder / "history", 1, total)
        assert [(entry["batch"], entry["outcome"]) for entry in history] == [(n + 1, "trained") for n in range(total)]
        uids = [uid for entry in history for uid in entry["uids"]]
        assert len(uids) == len(set(uids)) == total * TASKS * 4
        report = make_report("smoke", folder)
        assert " nothing" in next(line for line in report.splitlines() if line.strip().startswith("lost")), report
        counted = Counter[str]()
        for line in metrics:
            counted.update(
                {key: value for key, value in line.items() if key.startswith(("rollout/slices/", "rollout/failures/"))}
            )
        say(f"slices: {dict(+counted)}")
        assert set(+counted) == {"rollout/slices/finished", "rollout/slices/given_back"}
        assert counted["rollout/slices/finished"] == total * TASKS

"""Explorer, Scheduler and RunnerWrapper made as documented, from a configuration alone: they own their connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from trinity_mq import Explorer, RunnerWrapper, Scheduler, Task, TaskWrapper
from trinity_mq.bus import Topology, create_bus
from trinity_mq.config import Config, load_config
from trinity_mq.models.errors import EngineRefused
from trinity_mq.testing.fakes import FakeRunner

pytestmark = pytest.mark.broker


@pytest.fixture
def config(broker_url: str, topology: Topology, tmp_path: Path) -> Config:
    tiny = {"characters": "0123456789+=", "hidden_size": 16, "num_hidden_layers": 1}
    settings: dict[str, Any] = {
        "name": topology.run,
        "run_dir": str(tmp_path),
        "model": {"tiny": tiny, "max_model_len": 32, "max_prompt_tokens": 16, "max_response_tokens": 4},
        "buffer": {"total_steps": 1, "taskset": {"storage_type": "synthetic", "path": "ops3"}},
        "broker": {"url": broker_url},
        "monitor": {"tensorboard": False},
    }
    return load_config(settings)


@asynccontextmanager
async def runner(config: Config, topology: Topology, name: str) -> AsyncIterator[None]:
    """A runner of the test kit on a connection of its own."""
    bus = create_bus(config.broker, topology, name)
    await bus.connect()
    await bus.declare(*topology.durable)
    working = asyncio.ensure_future(FakeRunner(bus, topology, lambda: (1, 0), name=name).run())
    try:
        yield
    finally:
        working.cancel()
        await asyncio.wait([working])
        await bus.close()


async def test_a_scheduler_from_its_configuration(config: Config, topology: Topology) -> None:
    scheduler = Scheduler(config, [], None)
    async with runner(config, topology, "runner-0"):
        for batch in (1, 2):
            await scheduler.start()
            scheduler.schedule([Task(repeat_times=2, raw_task={"n": 0})], batch)
            statuses, experiences = await scheduler.get_results(batch)
            assert ([one.ok for one in statuses], len(experiences)) == ([True], 2)
            await scheduler.stop()
            assert scheduler.bus.trouble == "the bus is closed"


async def test_runner_wrappers_from_their_configuration(config: Config, topology: Topology) -> None:
    wrapper = RunnerWrapper(0, None, [], config)  # type: ignore[arg-type]  # no model here
    async with runner(config, topology, "runner-3"):
        wrapped = [TaskWrapper(Task(raw_task={"n": n}), 1) for n in range(3)]
        for status, experiences, runner_id in await asyncio.gather(*map(wrapper.run_with_retry, wrapped)):
            assert (status.ok, len(experiences), runner_id) == (True, 1, 3)
        wrapper.restart_runner()
        await wrapper.close()
    with pytest.raises(RuntimeError, match="no running event loop"):
        await asyncio.to_thread(wrapper.restart_runner)


async def test_an_explorer_from_its_configuration(config: Config) -> None:
    explorer = Explorer(config)
    exploring = asyncio.ensure_future(explorer.explore())
    await until(lambda: explorer.state == "holding", 40)
    assert explorer.waits_for == "an engine to take the weights"
    with pytest.raises(EngineRefused, match="no committed weights"):  # there is no trainer that could send some
        await explorer.get_weight("model.norm.weight")
    explorer.drain()
    assert await exploring == explorer.id
    assert explorer.bus.trouble == "the bus is closed"

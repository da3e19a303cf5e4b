"""vLLM's processes live and die with the engine they belong to."""

from __future__ import annotations

import asyncio
import contextlib

import psutil
import pytest
import torch

from trinity_mq.engines.host.admin_client import ReceiveFailed
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.engines.host.ready_file import ReadyFile

from .conftest import CANARY, Engine, new_weights, reference


async def test_weights_that_do_not_fit_end_vllm_and_its_engine_and_the_host_begins_anew(aborting: Engine) -> None:
    """What went in half-way cannot be repaired: vLLM would try the same tensors again at the next sync."""
    host, again = aborting.host, asyncio.Event()
    good, bad = (new_weights(aborting.started.folder, seed) for seed in (81, 82))
    bad.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    await aborting.sync(good, (7, 1))
    family = processes(host)
    assert len(family) >= 3  # the engine, vLLM's server, its core
    await host.pause()
    with pytest.raises(BaseExceptionGroup) as failed:
        await aborting.receive(bad, (7, 2))
    [refused] = failed.value.exceptions
    assert isinstance(refused, ReceiveFailed)
    assert refused.touched
    assert await ended(family) == []
    host.on_change = lambda: again.set() if host.snapshot.alive else None
    keeping = asyncio.create_task(host.keep())
    try:
        await again.wait()
        assert host.snapshot.state == "empty"
        canary = torch.tensor(await aborting.sync(good, (7, 3)))
        torch.testing.assert_close(canary, reference(good, CANARY[:1], CANARY[1:]), atol=1e-4, rtol=0)
    finally:
        keeping.cancel()


async def test_an_engine_that_is_killed_leaves_no_process_of_vllm_behind(aborting: Engine) -> None:
    family = processes(aborting.host)
    family[0].kill()
    assert await ended(family) == []


def processes(host: EngineHost) -> list[psutil.Process]:
    ready = ReadyFile.read(host.ready_file)
    assert ready is not None
    engine = psutil.Process(ready.pid)
    return [engine, *engine.children(recursive=True)]


async def ended(family: list[psutil.Process]) -> list[psutil.Process]:
    """Return who still lives after a while; a zombie of ours does not."""
    _, living = await asyncio.to_thread(psutil.wait_procs, family, 20.0)
    left = []
    for one in living:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                left.append(one)
    return left

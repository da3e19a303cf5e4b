"""What the host may do to an engine, over HTTP, with real weights."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load

from tests.waiting import until
from trinity_mq.engines.card import CardLock
from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.engines.host.admin_client import EngineAdmin, ReceiveFailed
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.engines.torch.weights import named_weights
from trinity_mq.models.errors import EngineLost, EngineRefused

AdminOf = Callable[[EngineServer], EngineAdmin]
CANARY = [3, 4, 5, 6]


class Sender:
    """Stands in for the channel: hands out tensors, or does what a broken channel does."""

    def __init__(self, generator: TextGenerator) -> None:
        self.tensors = {
            name: torch.randn_like(tensor) * 0.05 for name, tensor in named_weights(generator.model).items()
        }
        self.error: Exception | None = None
        self.stuck = False
        self.specs: list[dict[str, Any]] = []
        self.entered = asyncio.Event()

    async def __call__(self, spec: dict[str, Any]) -> dict[str, torch.Tensor]:
        self.specs.append(spec)
        self.entered.set()
        if self.stuck:
            await asyncio.Event().wait()
        if self.error:
            raise self.error
        return self.tensors


SPEC = {"epoch": 1, "canary": {"tokens": CANARY}}


@pytest.fixture
def sender(generator: TextGenerator) -> Sender:
    return Sender(generator)


@pytest.fixture
async def server(serving: Any, generator: TextGenerator, sender: Sender) -> AsyncIterator[EngineServer]:
    """An engine with weights of version 1.7."""
    async with serving(generator, sender) as server:
        yield server


@pytest.fixture
def admin(server: EngineServer, admin_of: AdminOf) -> EngineAdmin:
    return admin_of(server)


async def test_weights_are_received_while_paused_and_committed_as_the_version_that_they_came_as(
    serving: Any, generator: TextGenerator, admin_of: AdminOf, plain_logprobs: Any
) -> None:
    sender = Sender(generator)
    async with serving(generator, sender, version=None) as server:
        admin = admin_of(server)
        assert (await admin.state())["state"] == "empty"
        with pytest.raises(EngineRefused, match="not paused"):
            await admin.post("receive", {"spec": SPEC})
        with pytest.raises(EngineRefused, match="no weights were received"):
            await admin.post("commit", {"version": [1, 0]})
        await admin.post("pause", {"timeout": 5})
        answer = await admin.post("receive", {"spec": SPEC})
        assert sender.specs == [SPEC]
        assert answer["state"]["phase"] == "dirty"
        wanted = plain_logprobs(generator, CANARY[:1], CANARY[1:], 1.0)
        assert torch.allclose(torch.tensor(answer["canary"]["logprobs"]), wanted, atol=1e-5, rtol=0)
        assert torch.equal(named_weights(generator.model)["lm_head.weight"], sender.tensors["lm_head.weight"])
        state = (await admin.post("commit", {"version": [1, 0], "progress": 4}))["state"]
        assert (state["state"], state["version"], state["progress"]) == ("current", [1, 0], 4)
        assert (await admin.post("commit", {"version": [1, 0], "progress": 5}))["state"]["progress"] == 5
        with pytest.raises(EngineRefused, match=r"holds \(1, 0\)"):
            await admin.post("commit", {"version": [1, 1]})
        data = await admin.weight("lm_head.weight")
        assert torch.equal(load(data)["lm_head.weight"], sender.tensors["lm_head.weight"])
        with pytest.raises(EngineRefused, match="no weight 'x'"):
            await admin.weight("x")
        await admin.post("pause", {"timeout": 5})
        await admin.post("receive", {"spec": {**SPEC, "version": [2, 2]}})
        with pytest.raises(EngineRefused, match=r"received weights belong to \(2, 2\)"):
            await admin.post("commit", {"version": [2, 0]})
        assert (await admin.post("commit", {"version": [2, 2]}))["state"]["version"] == [2, 2]


async def test_held_requests_go_on_with_the_new_weights(
    serving: Any, generator: TextGenerator, admin_of: AdminOf
) -> None:
    async with serving(generator, Sender(generator)) as server, aiohttp.ClientSession() as session:
        admin = admin_of(server)
        await admin.post("pause", {"lease": 0.3})
        body = {"prompt": "+1=", "return_token_ids": True}
        asked = asyncio.create_task(session.post(f"{server.url}/v1/completions", json=body))
        await until(lambda: server.batcher.load > 0)
        await admin.post("receive", {"spec": SPEC})
        await asyncio.sleep(0.4)  # longer than the lease of the pause: a slower engine delays the commit
        assert not asked.done()
        await admin.post("commit", {"version": [1, 8], "progress": 1})
        async with await asked as response:
            assert (await response.json())["choices"][0]["weight_versions"] == [[0, 1, 8]]


async def test_a_failed_transfer_leaves_the_old_weights(admin: EngineAdmin, sender: Sender) -> None:
    await admin.post("pause", {})
    sender.error = RuntimeError("peer 2 is gone")
    with pytest.raises(ReceiveFailed, match="RuntimeError: peer 2 is gone") as caught:
        await admin.post("receive", {"spec": SPEC})
    assert (caught.value.status, caught.value.touched) == (500, False)
    sender.error = None
    sender.tensors.pop("lm_head.weight")
    with pytest.raises(ReceiveFailed, match="weights are missing") as caught:
        await admin.post("receive", {"spec": SPEC})
    assert not caught.value.touched
    state = (await admin.post("resume", {}))["state"]
    assert (state["state"], state["version"]) == ("current", [1, 7])


async def test_a_transfer_that_fails_half_way_is_dirty(admin: EngineAdmin, sender: Sender) -> None:
    await admin.post("pause", {})
    whole = sender.tensors["lm_head.weight"]
    sender.tensors["lm_head.weight"] = whole.to("meta")  # has the right shape, and no data to copy
    with pytest.raises(ReceiveFailed, match="Cannot copy out of meta tensor") as caught:
        await admin.post("receive", {"spec": SPEC})
    assert caught.value.touched
    sender.tensors["lm_head.weight"] = whole
    with pytest.raises(EngineRefused, match="is dirty"):
        await admin.post("commit", {"version": [1, 8]})
    assert (await admin.post("resume", {}))["state"]["state"] == "dirty"
    await admin.post("pause", {})
    await admin.post("receive", {"spec": SPEC})
    state = (await admin.post("resume", {}))["state"]
    assert (state["state"], state["version"]) == ("dirty", None), "applied and not committed"
    await admin.post("pause", {})
    await admin.post("receive", {"spec": SPEC})
    assert (await admin.post("commit", {"version": [1, 9]}))["state"]["version"] == [1, 9]


async def test_resume_cuts_a_stuck_transfer_off(admin: EngineAdmin, sender: Sender) -> None:
    sender.stuck = True
    await admin.post("pause", {})
    receiving = asyncio.create_task(admin.post("receive", {"spec": SPEC}))
    await sender.entered.wait()
    with pytest.raises(EngineRefused, match="in progress"):
        await admin.post("receive", {"spec": SPEC})
    state = (await admin.post("resume", {}))["state"]
    assert (state["state"], state["version"]) == ("current", [1, 7])
    with pytest.raises(ReceiveFailed, match="aborted") as caught:
        await receiving
    assert not caught.value.touched


async def test_a_transfer_has_a_deadline(admin: EngineAdmin, sender: Sender) -> None:
    sender.stuck = True
    await admin.post("pause", {})
    with pytest.raises(ReceiveFailed, match="it timed out"):
        await admin.post("receive", {"spec": SPEC, "timeout": 0.05})
    assert (await admin.post("resume", {}))["state"]["version"] == [1, 7]


async def test_a_host_that_hangs_up_ends_its_transfer(server: EngineServer, admin: EngineAdmin, sender: Sender) -> None:
    sender.stuck = True
    await admin.post("pause", {"lease": 0.2})
    receiving = asyncio.create_task(admin.post("receive", {"spec": SPEC}))
    await sender.entered.wait()
    await asyncio.sleep(0.3)
    assert server.state.paused, "the lease stands still while weights arrive"
    receiving.cancel()
    await asyncio.wait({receiving})
    async with asyncio.timeout(5):
        await server.state.running.wait()  # the pause's lease runs out once nothing is under way
    assert (await admin.state())["version"] == [1, 7]


async def test_a_pause_that_comes_too_late_is_taken_back(
    server: EngineServer, admin: EngineAdmin, generator: TextGenerator
) -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    generate = generator.generate

    def slow(requests: list[GenerationRequest], listener: Any = None) -> Any:
        loop.call_soon_threadsafe(started.set)
        time.sleep(0.3)
        return generate(requests, listener)

    generator.generate = slow  # type: ignore[method-assign, assignment]
    asked = asyncio.create_task(server.batcher.generate([GenerationRequest([3], 2)], None))
    await started.wait()
    with pytest.raises(EngineRefused, match="did not end within") as caught:
        await admin.post("pause", {"timeout": 0.05})
    assert caught.value.status == 504
    assert not server.state.paused
    await admin.post("pause", {"timeout": 5})
    assert asked.done() or await asked
    await admin.post("resume", {})


async def test_admin_routes_want_the_token_and_sound_bodies(
    serving: Any, shared_generator: TextGenerator, admin_of: AdminOf
) -> None:
    async with serving(shared_generator) as server, aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for method, path in (("GET", "state"), ("POST", "shutdown"), ("POST", "pause"), ("GET", "weight")):
                async with session.request(method, f"{server.url}/admin/{path}", headers=headers) as response:
                    assert response.status == 401
        assert not server.state.paused
        admin = admin_of(server)
        with pytest.raises(EngineRefused, match="seconds: Input should be greater than 0"):
            await admin.post("lease", {"seconds": 0})
        with pytest.raises(EngineRefused, match="version"):
            await admin.post("commit", {"version": [1]})


async def test_the_server_ends_when_its_lease_does(
    serving: Any, shared_generator: TextGenerator, admin_of: AdminOf
) -> None:
    async with serving(shared_generator, lease=0.5) as server:
        admin = admin_of(server)
        await admin.post("lease", {"seconds": 0.1})
        await until(lambda: server.state.draining)
    with pytest.raises(EngineLost):
        await admin.state()


async def test_shutdown_refuses_new_requests_and_ends(
    serving: Any, shared_generator: TextGenerator, admin_of: AdminOf
) -> None:
    async with serving(shared_generator) as server:
        admin = admin_of(server)
        assert (await admin.post("shutdown", {}))["state"]["state"] == "draining"
        refusal = server.state.problem(None)
        assert refusal is not None
        assert (refusal.status, refusal.code) == (503, "engine_stopping")


class Shared:
    """An engine on a card that a trainer may take: the server, its admin client, and the trainer's lock."""

    def __init__(self, server: EngineServer, admin: EngineAdmin, folder: Path) -> None:
        self.server, self.admin, self.lock = server, admin, CardLock(folder)

    async def sleep(self, level: int = 1, **more: float) -> None:
        await self.admin.post("sleep", {"level": level, **more})


@pytest.fixture
async def shared(
    serving: Any, generator: TextGenerator, sender: Sender, admin_of: AdminOf, tmp_path: Path
) -> AsyncIterator[Shared]:
    card = CardLock(tmp_path)
    assert card.try_take(shared=True)
    async with serving(generator, sender, card=card) as server:
        yield Shared(server, admin_of(server), tmp_path)
    card.release()


def memory_of(generator: TextGenerator) -> int:
    tensors = (*generator.model.parameters(), *generator.model.buffers())
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


async def test_a_sleeping_engine_frees_the_card_holds_requests_and_serves_the_same_weights_when_awake(
    shared: Shared, generator: TextGenerator
) -> None:
    before = {name: tensor.clone() for name, tensor in generator.model.state_dict().items()}
    assert not shared.lock.try_take(shared=False)
    await shared.sleep()
    assert memory_of(generator) == 0
    assert shared.lock.try_take(shared=False)
    state = await shared.admin.state()
    assert (state["state"], state["version"]) == ("asleep", [1, 7])
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "+1=", "return_token_ids": True}
        asked = asyncio.create_task(session.post(f"{shared.server.url}/v1/completions", json=body))
        await until(lambda: shared.server.batcher.load > 0)
        await shared.admin.post("wake", {})
        assert not asked.done(), "it waits for the trainer"
        shared.lock.release()
        async with await asked as response:
            assert (await response.json())["choices"][0]["weight_versions"] == [[0, 1, 7]]
    assert all(torch.equal(tensor, before[name]) for name, tensor in generator.model.state_dict().items())
    assert not shared.lock.try_take(shared=False)


async def test_weights_wake_an_engine_that_discarded_its_own(
    shared: Shared, generator: TextGenerator, sender: Sender
) -> None:
    await shared.sleep(2)
    assert memory_of(generator) == 0
    assert shared.lock.try_take(shared=False)
    await shared.sleep(2)  # renews the lease
    shared.lock.release()
    await shared.admin.post("pause", {})
    answer = await shared.admin.post("receive", {"spec": {**SPEC, "version": [1, 8]}})
    assert len(answer["canary"]["logprobs"]) == len(CANARY) - 1
    state = (await shared.admin.post("commit", {"version": [1, 8]}))["state"]
    assert (state["state"], state["version"]) == ("current", [1, 8])
    assert torch.equal(named_weights(generator.model)["lm_head.weight"], sender.tensors["lm_head.weight"])


async def test_an_engine_whose_trainer_is_gone_wakes_by_itself_without_the_weights_that_it_discarded(
    shared: Shared,
) -> None:
    await shared.sleep(2, lease=0.2)
    await until(lambda: shared.server.state.label == "dirty")
    assert shared.server.state.version is None
    await shared.sleep(1, lease=0.2)
    await until(lambda: shared.server.state.label == "dirty")


async def test_a_failed_transfer_to_a_sleeping_engine_leaves_it_awake_with_its_weights(
    shared: Shared, sender: Sender
) -> None:
    await shared.sleep()
    sender.error = RuntimeError("peer 2 is gone")
    await shared.admin.post("pause", {})
    with pytest.raises(ReceiveFailed, match="peer 2 is gone") as caught:
        await shared.admin.post("receive", {"spec": SPEC})
    assert not caught.value.touched
    await shared.admin.post("resume", {})
    await until(lambda: shared.server.state.label == "current")
    assert shared.server.state.version == (1, 7)


async def test_an_answer_under_way_ends_before_the_engine_sleeps(shared: Shared, generator: TextGenerator) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "+1=", "return_token_ids": True, "n": 64}
        asked = asyncio.create_task(session.post(f"{shared.server.url}/v1/completions", json=body))
        await until(lambda: shared.server.batcher.load > 0)
        while shared.server.state.label != "asleep":
            with contextlib.suppress(EngineRefused):
                await shared.sleep(timeout=0.01)
        await until(lambda: memory_of(generator) == 0)  # "asleep" begins before the memory is freed
        await shared.admin.post("wake", {})
        async with await asked as response:
            assert response.status == 200


async def test_an_engine_that_cannot_fill_its_cache_again_ends(
    shared: Shared, generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(generator, "wake_cache", fail)
    await shared.sleep(2)
    await shared.admin.post("pause", {})
    with pytest.raises(EngineRefused):
        await shared.admin.post("receive", {"spec": SPEC})
    assert not shared.server.state.receiving
    assert shared.server.state.label == "draining"


async def test_an_engine_with_a_card_of_its_own_does_not_sleep(admin: EngineAdmin) -> None:
    with pytest.raises(EngineRefused, match=r"set synchronizer\.colocated"):
        await admin.post("sleep", {})

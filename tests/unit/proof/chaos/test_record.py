"""What real agents leave on the streams is read and judged; a witness sees the same as it passes. Virtual time."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.agents.gateway.world import World
from tests.unit.agents.gateway.world import until as gateway_until
from tests.unit.agents.trainer.test_audit import BATCHES, SETTINGS
from tests.unit.gateway.serving import serving, serving_config
from tests.waiting import until as until_true
from trinity_agents.simulation import Simulation, killed, until
from trinity_mq.bus import BusUnavailable, Envelope
from trinity_mq.bus.memory.bus import MemoryBus
from trinity_mq.config import Config, load_config
from trinity_mq.experience import EID, Experience
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.messages import SessionEnd, TaskResult, Version
from trinity_mq.models import ensure_model_folder
from trinity_mq.proof.chaos.sessions.clients import Clients, clients_of
from trinity_mq.proof.chaos.sessions.stream import SessionRecord, read_sessions
from trinity_mq.proof.chaos.sessions.verdicts import answers_match_stream
from trinity_mq.proof.chaos.tokens import MOST_KEPT, WeightArchive, check_tokens
from trinity_mq.proof.chaos.witness import RunObserver, watch
from trinity_mq.proof.invariants import (
    Expected,
    InvariantVerdict,
    one_outcome,
    streams_decode,
    trained_once,
    versions_existed,
    versions_rise,
)
from trinity_mq.proof.record import Record, read_record
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually


def verdicts(record: Record, witness: RunObserver) -> Sequence[InvariantVerdict]:
    return (
        streams_decode(record),
        one_outcome(record, Expected()),
        trained_once(record),
        versions_rise(record, witness.commits, witness.committed, witness.served),
        versions_existed(record),
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulation, RunObserver]:
    """A run whose trainer was killed twice and went on from a checkpoint, and who watched it."""
    return watched(tmp_path_factory.mktemp("run"))


def watched(folder: Path) -> tuple[Simulation, RunObserver]:
    sim, witness = Simulation(folder, SETTINGS, batches=BATCHES), RunObserver()

    async def trainer() -> None:
        watching = asyncio.create_task(watch(await sim.client(), sim.topology, witness))
        for progress in (3, 5):
            life = asyncio.get_running_loop().create_task(sim.make_trainer().run())
            await until(lambda progress=progress: sim.trainer.loop.progress == progress)  # type: ignore[misc]
            assert await killed(life)
        await sim.make_trainer().run()
        watching.cancel()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    return sim, witness


def record_of(sim: Simulation) -> Record:
    async def read() -> Record:
        return await read_record(await sim.client(), sim.topology, None, {(3, 5)})

    return run_virtually(read(), limit=1000)


def test_every_invariant_holds_of_a_run_whose_trainer_was_killed(seen: tuple[Simulation, RunObserver]) -> None:
    sim, witness = seen
    record = record_of(sim)
    found = verdicts(record, witness)
    assert [verdict.result for verdict in found] == ["holds"] * 5, found
    assert len(record.deciding) == BATCHES
    assert {one.generation for one in record.progress} == {1, 2, 3}
    assert "over 3 starts of the trainer" in found[2].text
    assert all(one.versions for one in record.sets if one.uids), "their tokens name versions"
    assert all(len(kept) <= 32 for kept in record.samples.values())
    assert record.samples.keys() <= {(3, 5)}


def test_a_witness_sees_the_run_pass(seen: tuple[Simulation, RunObserver]) -> None:
    _, witness = seen
    assert witness.progress == BATCHES
    assert len(witness.steps) > BATCHES, "what was trained on again is a step too"
    assert witness.state.run_id
    assert witness.points.passed["batch_opened"] >= 2, "heartbeats tell of several at a time"
    for point in ("result_published", "batch_closed", "chunk_published", "batch_ready", "step_done"):
        assert witness.points.passed[point] >= BATCHES, point
    assert witness.points.passed["sync_commit"] >= 3
    assert witness.points.passed["agent_back"] == 2
    assert {row.beat.role for row in witness.state.agents(0.0)} >= {"explorer", "operator", "trainer"}
    assert [one.version for one in witness.committed] == sorted(one.version for one in witness.committed)


def test_a_late_result_and_foreign_messages_change_nothing_and_rubbish_is_told(tmp_path: Path) -> None:
    sim, witness = watched(tmp_path)
    record = record_of(sim)

    async def add() -> None:
        bus = await sim.client()
        bus.run_id = None
        exchange = sim.topology.exchange("results")
        late = record.results[0].model_copy(update={"attempt": "late", "outcome": "late", "runs": []})
        for number, result in enumerate((late, record.results[0])):
            await bus.publish(exchange, "1", envelope(result, message_id=f"again-{number}"))
        foreign = TaskResult(batch=1, ticket=record.results[0].ticket, task_id=99, attempt="f", outcome="finished")
        await bus.publish(exchange, "1", envelope(foreign, headers={"run_id": "another"}))
        await bus.publish(exchange, "1", Envelope(body=b"rubbish", kind="task_result"))

    run_virtually(add(), limit=100)
    bus_id = witness.state.run_id

    async def read() -> Record:
        bus = await sim.client()
        bus.run_id = bus_id
        return await read_record(bus, sim.topology)

    again = run_virtually(read(), limit=1000)
    assert len(again.results) == len(record.results) + 2
    assert [verdict.result for verdict in verdicts(again, witness)] == ["violated", *["holds"] * 4]
    assert len(again.undecodable) == 1


def test_ledger_answers_and_decisions_are_those_of_the_gateways() -> None:
    async def story() -> None:
        world = World()
        async with world.running() as bus, world.gateway() as store:
            for name in ("a", "b"):
                await world.session(store, name)
                await store.report(SessionEnd(session=name, reward=0.5), f"end-{name}")
            await gateway_until(store, lambda: store.ledger.counts["trained"] == 2)
            await bus.publish(world.topology.exchange("sessions"), "event", Envelope(body=b"rubbish", kind="x"))
            record = await read_sessions(bus, world.topology)
            await gateway_until(store, lambda: bool(world.dead))
            await asyncio.sleep(60)
        assert {one.id: one.state for one in record.ledger} == {"a": "trained", "b": "trained"}
        assert {name: len(calls) for name, calls in record.calls.items()} == {"a": 1, "b": 1}
        assert sorted(one.sessions for one in record.decisions) == [["a"], ["b"]]
        assert record.begin == 0
        assert len(record.undecodable) == 1
        assert len(world.dead) == 1, "the rubbish alone: reading leaves nothing there that a gateway cannot read"

    run_virtually(story())


class LosingBus(MemoryBus):
    """A bus whose broker confirms what it then loses."""

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        return True


def test_a_stream_of_sessions_that_is_not_read_in_time_is_an_error_of_the_broker() -> None:
    async def story() -> None:
        world = World()
        bus = world.bus(LosingBus)
        await bus.connect()
        with pytest.raises(BusUnavailable, match="was not read within 120 s"):
            await read_sessions(bus, world.topology)
        await bus.close()

    run_virtually(story())


KEY = "a key of sixteen letters"


async def test_what_clients_note_agrees_with_what_the_gateway_keeps(tmp_path: Path) -> None:
    """They ask one gateway, and another one that is not there."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    config = serving_config(gateway={"key_file": str(tmp_path / "keys"), "num_gateways": 2})
    async with serving(lambda _: "3", config=config, admin=KEY) as gateway:
        clients = Clients(config, seed=1, at_once=16)
        clients.urls = [f"http://127.0.0.1:{free_ports(1)[0]}", gateway.url]
        working = asyncio.create_task(clients.work())
        await until_true(lambda: len(clients.traffic.sessions) > 32, 60)
        await clients.finish(working, 2.0)
        record = SessionRecord(ledger=gateway.store.ledger)
        for session in record.ledger:
            record.calls[session.id] |= session.calls
    traffic, counts = clients.traffic, clients.traffic.counts
    verdict: InvariantVerdict = answers_match_stream(traffic, record)
    assert verdict.result == "holds", verdict
    assert counts["sessions"] > 32
    assert counts["recorded"] > counts["repeated"] > 0, "the other gateway is not there"
    assert traffic.failures["ClientConnectorError"] > 0
    assert any(told.must_train for told in traffic.sessions)
    assert {told.discarded for told in traffic.sessions} == {True, False}
    assert any(told.group for told in traffic.sessions)
    assert traffic.failures["TimeoutError"] > 0, "some give up at once"
    assert not traffic.settled, "nobody trains here"


def test_who_serves_nobody_has_no_clients() -> None:
    said: list[str] = []
    for config, at_once in ((serving_config(), 0), (serving_config(gateway={"port": 0}), 8)):
        assert clients_of(config, 1, at_once, said.append) is None
    assert said == ["gateway.port is 0: the clients cannot know a random port; set a fixed port for traffic"]


OLD, NEW = (1, 3), (1, 4)


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config({"name": "tokens", "model": {"tiny": {"initializer_range": 0.5}}})


@pytest.fixture(scope="module")
def weights(config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    """Two versions of one model."""
    folders = {version: tmp_path_factory.mktemp("model") / "folder" for version in (OLD, NEW)}
    return {version: ensure_model_folder(config.model, folder, version[1]) for version, folder in folders.items()}


def sampled(folder: Path, number: int, temperature: float = 0.7) -> Experience:
    """Return an experience whose logprobs are those of a model."""
    tokens = torch.tensor([3, 4, 5, 3, 2 + number % 3, 4])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens[None]).logits[0, 2:-1]
    logprobs = torch.log_softmax(logits / temperature, -1).gather(1, tokens[3:, None])[:, 0]
    return Experience(
        eid=EID(1, number), tokens=tokens, prompt_length=3, logprobs=logprobs, temperature=temperature, reward=0.0
    )


def test_tokens_of_the_weights_they_name_fit_and_those_of_others_are_found(
    config: Config, weights: dict[Version, Path]
) -> None:
    samples = {version: [sampled(folder, n) for n in range(3)] for version, folder in weights.items()}
    verdict = check_tokens(config, weights, samples)
    assert verdict.result == "holds", verdict
    assert "6 experiences of 2 versions" in verdict.text
    assert "of another version's weights 6 would be told" in verdict.text
    wrong = sampled(weights[OLD], 1)
    verdict = check_tokens(config, weights, {OLD: samples[OLD][:1], NEW: [samples[NEW][0], wrong]})
    assert verdict.result == "violated"
    [line] = verdict.evidence
    assert wrong.eid.uid in line
    assert "names version 1.4" in line


def test_what_cannot_be_told_apart_is_not_called_proven(config: Config, weights: dict[Version, Path]) -> None:
    samples = {OLD: [sampled(weights[OLD], 0)]}
    alike = check_tokens(config, {OLD: weights[OLD], NEW: weights[OLD]}, samples)
    assert alike.result == "not checked"
    assert "would also fit the weights of another version" in alike.text
    assert check_tokens(config, weights, {}).result == "not checked"
    assert check_tokens(config, {}, samples).result == "not checked"


def checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint as far as it is looked at."""
    path = folder / f"progress-{step:06}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "config.json").write_text("{}")
    (path / "model" / "model.safetensors").write_text(f"weights of {step}")
    state = {"generation": 1, "step": step, "progress": step, "source": {}}
    (path / "trainer.json").write_text(json.dumps({"state": state, "files": {"model/config.json": 2}}))
    return path


def test_weights_are_kept_as_links_when_their_checkpoint_is_deleted(tmp_path: Path) -> None:
    kept = WeightArchive(tmp_path / "checkpoints", tmp_path / "kept")
    kept.look()  # there is no folder yet
    for step in range(1, 13):
        path = checkpoint(tmp_path / "checkpoints", step)
        kept.look()
        held = path / "model" / "model.safetensors"
        assert os.path.samefile(held, kept.folders[1, step] / "model.safetensors"), "it takes no room"
        held.unlink()
        (path / "trainer.json").unlink()
    assert len(kept.folders) == MOST_KEPT
    assert {(1, 1), (1, 2), (1, 11), (1, 12)} <= kept.folders.keys(), "the first and the newest"
    for (_, step), folder in kept.folders.items():
        assert (folder / "model.safetensors").read_text() == f"weights of {step}"
    assert len(list((tmp_path / "kept").iterdir())) == MOST_KEPT
    kept.clear()
    assert not (tmp_path / "kept").exists()

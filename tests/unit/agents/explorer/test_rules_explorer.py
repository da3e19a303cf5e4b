"""The explorer's sentences of docs/protocol.md, each with a test that fails without it (tests/RULES.md)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.explorer.test_explorer import REPLIES, check_history, has_slices, restarted, sent_by
from tests.unit.agents.watched import WatchedSimulation
from tests.unit.agents.world import Over, beside, failure
from trinity_agents.explorer import loop as exploration
from trinity_agents.simulation import killed, until
from trinity_mq.bus import Binding, Queue
from trinity_mq.messages import BatchClosed, BatchReady, Progress, SubmissionOutcome, TaskSlice
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop


def open_tickets(sim: WatchedSimulation) -> list[Any]:
    explorer = sim.explorer.exploration if sim.explorers else None
    return [one for one in explorer.state.tickets.values() if one.lane == "train"] if explorer is not None else []


def is_open(sim: WatchedSimulation) -> Callable[[], bool]:
    """Whether the slices of a batch are published."""
    return lambda: any(ticket.published for ticket in open_tickets(sim))


# -- open


def test_open_is_save_then_queue_then_slices_then_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is deleted later, and an evaluation has none, no manifest, and is never ready."""
    sim = WatchedSimulation(tmp_path, batches=2, runner_seconds=lambda task_slice: 5.0)
    sim.watch_saves(monkeypatch)
    run_virtually(sim.run(), limit=300)
    check_history(sim, 2)
    trained = sim.tickets("batch_closed")
    assert len(trained) == len(sim.where("publish", "batch_closed")) == 2, "once each, unless somebody dies"
    for ticket in trained:
        unpublished = sim.saves(ticket, lambda state: not state.published)
        published = sim.saves(ticket, lambda state: state.published)
        (declared,) = sim.where("declare", f"batch.{ticket}")
        sent, confirmed = sim.where("publish", "task_slice", ticket), sim.where("confirmed", "task_slice", ticket)
        assert len(sent) == len(confirmed) == 2
        assert unpublished[0] < declared < sent[0]
        assert confirmed[-1] < published[0]
        assert sim.acts[published[0]].time - sim.acts[confirmed[-1]].time < 1.0, "at once, not with the first outcome"
        (unbound,), (deleted,) = (sim.where(what, f"batch.{ticket}") for what in ("unbind", "delete"))
        assert sim.acts[deleted].time - sim.acts[unbound].time >= 1.0
    lanes = {task_slice.ticket: task_slice.lane for task_slice in sim.published(TaskSlice)}
    assert sorted(lanes.values()) == ["eval", "eval", "train", "train"]
    declarations = {act.subject for act in sim.acts if act.what == "declare" and act.subject.startswith("batch.")}
    assert declarations == {f"batch.{ticket}" for ticket in trained}
    for kind in (BatchClosed, BatchReady, Progress):
        assert {message.ticket for message in sim.published(kind)} == set(trained)


async def test_a_submission_is_acknowledged_once_saved_and_long_before_its_batch_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = WatchedSimulation(tmp_path, batches=1, taskset=None, runner_seconds=lambda task_slice: 60.0)
    sim.watch_saves(monkeypatch)
    async with beside(sim.run()):
        await until(lambda: bool(sim.explorers) and sim.explorer.state == "idle")
        await sim.submit(1)
    (acked,) = sim.where("acked", "submitted")
    saved = [place for place in sim.where("saved") if "s1" in sim.acts[place].subject.split(",")]
    (closed,) = sim.where("publish", "batch_closed")
    assert saved[0] < acked < closed
    assert sim.acts[closed].time - sim.acts[acked].time > 50.0


# -- close


def test_close_is_save_then_unbind_then_manifest_then_answers_then_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = WatchedSimulation(tmp_path, batches=1, taskset=None)
    sim.watch_saves(monkeypatch)

    async def scene() -> None:
        await (await sim.client()).declare(REPLIES)
        await sim.submit(1, reply_to=REPLIES.name)

    run_virtually(sim.run(beside=scene), limit=300)
    (ticket,) = sim.tickets("batch_closed")
    fixed = sim.saves(ticket, lambda one: one.manifest is not None)
    (unbound,) = sim.where("unbind", f"batch.{ticket}")
    (sent,), (confirmed,) = (sim.where(what, "batch_closed", ticket) for what in ("publish", "confirmed"))
    (answered,), (told,) = (sim.where(what, "submission_outcome", ticket) for what in ("publish", "confirmed"))
    without = [place for place in sim.where("saved") if place > fixed[0] and ticket not in sim.acts[place].state]
    assert fixed[0] < unbound < sent < confirmed < answered < told < without[0]
    mail = sim.acts[answered].mail
    assert mail is not None
    assert (mail.correlation_id, sim.acts[sent].mail.message_id) == ("c1", f"closed-{ticket}")  # type: ignore[union-attr]
    (outcome,) = asyncio.run(sim.replies())
    assert isinstance(outcome, SubmissionOutcome)


@pytest.mark.parametrize("at", ["unbind", "batch_closed"])
def test_a_ticket_with_a_manifest_is_never_declared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Killed behind the saved manifest, and kept waiting by the daily round: neither brings the queue back."""
    monkeypatch.setattr(exploration, "KEEP_QUEUES_INTERVAL", 5.0)
    sim = WatchedSimulation(tmp_path, batches=2, runner_seconds=lambda task_slice: 3.0)
    sim.watch_saves(monkeypatch)
    sim.holds = lambda who, mail: 30.0 if mail.kind == "batch_closed" and who == "explorer-0" else 0.0

    async def fixed() -> None:
        if at == "unbind":
            await until(lambda: any(t.manifest is not None for a in sim.acts for t in a.state.values()), 0.0001)
        else:
            await until(lambda: bool(sim.where("publish", "batch_closed")))
            await asyncio.sleep(20.0)

    run_virtually(sim.run(explorer=restarted(sim, fixed)), limit=1000)
    check_history(sim, 2)
    for ticket in sim.tickets("batch_closed"):
        first = sim.saves(ticket, lambda one: one.manifest is not None)[0]
        assert not [place for place in sim.where("declare", f"batch.{ticket}") if place > first]


def test_open_queues_are_declared_again_at_start_and_every_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing does not refresh their expiry."""
    assert exploration.KEEP_QUEUES_INTERVAL <= 24 * 3600
    monkeypatch.setattr(exploration, "KEEP_QUEUES_INTERVAL", 5.0)
    sim = WatchedSimulation(tmp_path, batches=1, runner_seconds=lambda task_slice: 40.0)
    run_virtually(sim.run(explorer=restarted(sim, is_open(sim), then=2.0)), limit=500)
    (ticket,) = sim.tickets("batch_closed")
    declared = [sim.acts[place] for place in sim.where("declare", f"batch.{ticket}")]
    second = [act.time for act in declared if act.who == "explorer-0'"]
    assert [act.who for act in declared[:2]] == ["explorer-0", "explorer-0'"]
    mark, *_ = sim.where("confirmed", "mark", who="explorer-0'")
    assert second[0] - sim.acts[mark].time < 1.0
    assert len(second) >= 6
    assert second[1] - second[0] <= 5.1
    assert {round(later - before) for before, later in itertools.pairwise(second[1:])} == {5}


async def test_a_queue_that_was_deleted_is_not_brought_back_by_a_reconnect(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=1, runner_seconds=lambda task_slice: 5.0)
    seen: list[str] = []
    async with beside(sim.run()):
        await until(is_open(sim))
        name = sim.topology.batch_queue(1, open_tickets(sim)[0].ticket).name
        await (await sim.client()).delete(name)
        sim.broker.drop(sim.explorer.bus, delay=1.0)  # type: ignore[arg-type]
        await asyncio.sleep(2.0)
        seen.extend(queue for queue in sim.broker.queues if queue == name)
    assert seen == []
    assert sim.trainer.loop.progress == 1


# -- restart


async def test_a_restarted_explorer_decides_nothing_and_lets_no_time_pass_before_its_mark(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=2, runner_seconds=lambda task_slice: 8.0)
    sim.holds = lambda who, mail: 20.0 if mail.kind == "mark" and who == "explorer-0'" else 0.0
    left: list[float] = []

    async def published() -> None:
        await until(is_open(sim))
        await asyncio.sleep(1.5)
        left.append(open_tickets(sim)[0].time_left)

    async with beside(sim.run(explorer=restarted(sim, published))):
        await until(lambda: len(sim.explorers) == 2 and sim.explorer.exploration is not None)
        await until(lambda: bool(open_tickets(sim)))
        known = open_tickets(sim)[0].time_left
        await until(lambda: bool(sim.where("publish", "mark", who="explorer-0'")))
        await asyncio.sleep(19.0)
        left.extend([known, open_tickets(sim)[0].time_left])
    check_history(sim, 2)
    assert left[1] == left[2], "time passes only once it has caught up"
    (mark,) = sim.where("confirmed", "mark", who="explorer-0'")
    sent = [act.subject for act in sim.acts[:mark] if act.who == "explorer-0'" and act.what == "publish"]
    declared = [act.subject for act in sim.acts[:mark] if act.who == "explorer-0'" and act.subject.startswith("batch.")]
    assert sent == ["mark"]
    assert declared == []


def test_a_restarted_explorer_reads_results_from_where_it_stood(tmp_path: Path) -> None:
    """Outcomes that came while nobody lived are taken in; those taken in before are not asked for again."""
    sim = WatchedSimulation(tmp_path, batches=3, runner_seconds=lambda task_slice: 2.0)
    run_virtually(sim.run(explorer=restarted(sim, has_slices(sim, 2), pause=30.0)), limit=500)
    check_history(sim, 3)
    slices = [(one.ticket, one.task_id, one.run_base) for one in sim.published(TaskSlice)]
    assert len(slices) == len(set(slices))
    assert sim.state().results_offset > 0  # type: ignore[operator]


# -- exclusion


def test_an_explorer_that_lost_its_lock_stops_acting_and_writes_no_state(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=60, runner_seconds=lambda each: 100.0 if each.lane == "train" else 0.1)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_task(sim.make_explorer("explorer-0").run())
        await until(is_open(sim))
        await asyncio.sleep(1.0)
        before = sim.explorers[0].exploration
        assert before is not None
        sim.broker.drop(sim.explorers[0].bus, delay=30.0)  # type: ignore[arg-type]
        second = loop.create_task(sim.make_explorer("explorer-1").run())
        dropped = loop.time()
        await asyncio.sleep(25.0)
        with pytest.raises(RestartRequested):
            await before.save()
        assert sim.state().incarnations == 2
        await asyncio.wait([first])
        assert loop.time() - dropped == pytest.approx(30.0, abs=0.1), "at once, not when it is to save something"
        back = len(sim.acts)
        with pytest.raises(ExceptionGroup) as caught:
            first.result()
        assert caught.value.subgroup(RestartRequested) is not None
        await asyncio.sleep(150.0)
        assert [act for act in sim.acts[back:] if act.who == "explorer-0"] == []
        assert sent_by(sim, "explorer-1")
        await killed(second)
        raise Over

    failure(sim.run(explorer=scene), Over, limit=500)


# -- evaluation


# -- what passes twice


async def test_every_message_may_come_twice(tmp_path: Path) -> None:
    """A publish whose confirm was lost is repeated under its id; every reader drops repeats by it."""
    sim = WatchedSimulation(tmp_path, batches=4)
    sim.times_published = 2
    async with beside(sim.run()):
        await (await sim.client()).declare(REPLIES)
        await asyncio.sleep(0.5)
        await sim.submit(1, reply_to=REPLIES.name)
    check_history(sim, 4)
    assert sorted(set(sim.evaluated_steps())) == [0, 2, 4]
    assert sim.learners[0].steps == [1, 2, 3, 4]
    given = [each.task.raw_task for each in sim.published(TaskSlice) if each.lane == "train"]
    assert sum("s" in task for task in given) == 2, "one submission, its slice twice"


def test_message_ids_are_derived_so_that_repeats_are_known(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=2)

    sim.holds = lambda who, mail: 5.0 if mail.kind == "batch_closed" and who == "explorer-0" else 0.0
    run_virtually(sim.run(explorer=restarted(sim, lambda: bool(sim.where("publish", "batch_closed")))), limit=300)
    mails = [act.mail for act in sim.acts if act.what == "publish"]
    closed = [mail for mail in mails if mail is not None and mail.kind == "batch_closed"]
    assert {mail.message_id for mail in closed} == {f"closed-{mail.headers['ticket']}" for mail in closed}
    assert len(closed) == 3, "one was repeated by the second life"
    slices = [mail for mail in mails if mail is not None and mail.kind == "task_slice"]
    assert len({mail.message_id for mail in slices}) == len(slices) == len(sim.published(TaskSlice))
    assert all(mail.message_id.startswith(str(mail.headers["ticket"])) for mail in slices)
    chunks = [mail for mail in mails if mail is not None and mail.kind == "experience_chunk"]
    assert chunks
    for mail in chunks:
        assert mail.message_id == "-".join(str(mail.headers[name]) for name in ("ticket", "op", "n"))


# -- mandatory is a hint only


async def test_a_tap_that_takes_everything_changes_nothing(tmp_path: Path) -> None:
    """With it nothing is ever unroutable: what comes after its batch was closed is lost on the tap, and not missed."""
    sim = WatchedSimulation(
        tmp_path,
        (
            "explorer.batch_timeout=30",
            "explorer.max_timeout=10",
            "explorer.max_consecutive_empty=100",
            "explorer.unfinished=drop",
        ),
        batches=3,
        runner_seconds=lambda task_slice: 45.0 if task_slice.task.raw_task.get("n") == 1 else 0.1,
        step_seconds=20.0,
    )
    async with beside(sim.run()):
        bindings = tuple(Binding(exchange, "#") for exchange in sim.topology.exchanges)
        await (await sim.client()).declare(Queue(name="somebodys-tap", bindings=bindings))
    check_history(sim, 3)
    manifests = {one.batch: one for one in sim.published(BatchClosed)}
    assert manifests[1].outcomes == {"finished": 1, "cancelled": 1}
    assert [accepted.task_id for accepted in manifests[1].accepted] == [0]
    late = [one for one in sim.published(TaskSlice) if one.task.raw_task.get("n") == 1]
    assert len(late) == 1
    assert {one.outcome for one in sim.published(Progress)} == {"trained"}

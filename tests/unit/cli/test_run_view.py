from __future__ import annotations

from typing import Any

import pytest

from trinity_mq.cli.run.run_view import RunView
from trinity_mq.messages import Heartbeat, Mark, Metrics
from trinity_mq.runtime.supervisor import ProcessEvent


def beat(role: str, agent: str, seq: int = 1, **fields: Any) -> Heartbeat:
    fields = {"incarnation": "a", "lease": 10.0, "state": "working", **fields}
    return Heartbeat(role=role, id=agent, seq=seq, **fields)  # type: ignore[arg-type]


def trainer(progress: int, seq: int, committed: tuple[int, int] = (1, 0)) -> Heartbeat:
    return beat("trainer", "trainer-0", seq, detail={"progress": progress, "committed": committed})


def metrics(role: str, step: int, **values: float) -> Metrics:
    return Metrics(role=role, id=f"{role}-0", step=step, values=values)  # type: ignore[arg-type]


def test_nothing_is_known_at_first() -> None:
    view = RunView("r", None).view(0.0)
    assert (view.step, view.total, view.reward, view.version, view.seconds_left, view.agents) == (
        0,
        None,
        None,
        None,
        None,
        (),
    )


def test_steps_and_version_come_from_the_trainer_total_from_the_explorer() -> None:
    board = RunView("r", None)
    board.receive(beat("explorer", "explorer-0", detail={"total_batches": 300}), 0.0)
    board.receive(trainer(7, 1, (2, 6)), 1.0)
    view = board.view(1.0)
    assert (view.step, view.total, view.version) == (7, 300, "2.6")


def test_metrics_are_kept_until_newer_ones_come() -> None:
    board = RunView("r", 10)
    board.receive(metrics("explorer", 1, **{"rollout/reward/mean": 0.5, "rollout/tokens_per_second": 100.0}), 0.0)
    board.receive(metrics("trainer", 1, **{"sample/staleness/max": 1.0, "perf/tokens_per_second": 5.0}), 0.0)
    board.receive(metrics("explorer", 2, **{"rollout/reward/mean": 0.75}), 0.0)
    view = board.view(0.0)
    assert (view.reward, view.staleness, view.tokens_per_second) == (0.75, 1.0, 100.0)


def test_an_evaluation_is_news_once() -> None:
    board = RunView("r", 10)
    board.receive(metrics("explorer", 50, **{"eval/held_out/accuracy/mean@1": 0.25}), 0.0)
    assert board.view(0.0).results == {"held_out": (50, 0.25)}
    assert board.take_news() == ["evaluation at step 50: held_out accuracy 0.250"]
    board.receive(metrics("explorer", 50, **{"eval/held_out/accuracy/mean@1": 0.25}), 0.0)
    assert board.take_news() == []


def test_time_left_follows_the_recent_pace() -> None:
    board = RunView("r", 20)
    board.receive(trainer(0, 1), 0.0)
    assert board.view(0.0).seconds_left is None
    for step in range(1, 11):
        board.receive(trainer(step, step + 1), 2.0 * step)
    assert board.view(20.0).seconds_left == pytest.approx(10 * 2.0)
    assert board.view(21.0).seconds_left == pytest.approx(10 * 2.0 - 1)
    assert board.view(1000.0).seconds_left == 0.0


def test_time_left_starts_anew_when_the_trainer_goes_back() -> None:
    board = RunView("r", 20)
    for step in range(1, 11):
        board.receive(trainer(step, step), float(step))
    board.receive(beat("trainer", "trainer-0", 1, incarnation="b", detail={"progress": 5}), 30.0)
    assert board.view(30.0).step == 5
    assert board.view(30.0).seconds_left is None


def test_agents_are_alive_while_they_beat() -> None:
    board = RunView("r", 20)
    board.receive(beat("trainer", "trainer-0", state="working"), 0.0)
    board.receive(beat("runner", "runner-0", lease=5.0, state="idle", waits_for="a slice", waits_seconds=2.0), 0.0)
    board.receive(beat("explorer", "explorer-0", state="finished"), 0.0)
    rows = board.view(4.0).agents
    assert [(row.id, row.state, row.alive) for row in rows] == [
        ("explorer-0", "finished", False),
        ("runner-0", "idle", True),
        ("trainer-0", "working", True),
    ]
    assert (rows[1].waits_for, rows[1].waits_seconds) == ("a slice", 6.0)
    silent = board.view(5.0).agents[1]
    assert (silent.state, silent.alive) == ("silent", False)


def test_old_beats_of_the_same_process_are_ignored() -> None:
    board = RunView("r", 20)
    board.receive(beat("runner", "runner-0", 5, state="working"), 0.0)
    board.receive(beat("runner", "runner-0", 4, state="idle"), 1.0)
    assert board.view(1.0).agents[0].state == "working"
    board.receive(beat("runner", "runner-0", 1, incarnation="b", state="starting"), 2.0)
    assert board.view(2.0).agents[0].state == "starting"


def test_only_long_waits_are_worth_a_word() -> None:
    board = RunView("r", 20)
    board.receive(
        beat("explorer", "explorer-0", lease=60.0, state="holding", waits_for="a commit", waits_seconds=1.0), 0.0
    )
    assert board.view(5.0).waiting == ()
    assert [row.id for row in board.view(9.0).waiting] == ["explorer-0"]


def test_last_word() -> None:
    board = RunView("r", 20)
    assert board.final_state("explorer-0") is None
    board.receive(beat("explorer", "explorer-0", 1), 0.0)
    assert board.final_state("explorer-0") is None
    board.receive(beat("explorer", "explorer-0", 2, state="gone"), 0.0)
    assert board.final_state("explorer-0") == "gone"


def test_new_dead_letters_are_news() -> None:
    board = RunView("r", 20)
    board.set_depths({"dead": None, "closed": 1})
    board.set_depths({"dead": 2, "closed": 0})
    board.set_depths({"dead": 2, "closed": 0})
    assert board.take_news() == ["2 dead letters: see `trinity-mq dead list`"]
    assert board.view(0.0).depths == {"dead": 2, "closed": 0}


def test_process_events_that_matter_are_news() -> None:
    board = RunView("r", 20)
    for event in (
        ProcessEvent(name="runner-0", role="runner", what="started", pid=1),
        ProcessEvent(name="runner-0", role="runner", what="restarting", delay=0.5, restarts=2),
        ProcessEvent(name="runner-0", role="runner", what="killed", code=137),
        ProcessEvent(name="runner-0", role="runner", what="failed", code=78, reason="no"),
    ):
        board.add_event(event)
    assert board.take_news() == [
        "runner-0 died and starts again in 0.5 s (restart 2); see logs/runner-0.*",
        "runner-0 did not end in time and was killed",
        "runner-0 failed for good (exit code 78): no",
    ]


def test_other_messages_say_nothing() -> None:
    board = RunView("r", 20)
    before = board.view(0.0)
    board.receive(Mark(nonce="x"), 0.0)
    assert board.view(0.0) == before
    board.receive(beat("trainer", "trainer-0"), 0.0)
    assert (board.view(0.0).step, board.view(0.0).version) == (0, None)


GATE = {
    "version": [1, 7],
    "members": {
        "engine-1": {"version": None, "state": "pulling"},
        "engine-0": {"version": [1, 7], "state": "current", "given": [1, 2]},
    },
    "phases": {"wait": 0.1, "pause": 2.0, "transfer": 31.4, "apply": 5},
    "syncs": 8,
    "aborts": 0,
    "canary_failures": 1,
}


def test_members_and_the_last_syncs_phases_come_from_the_trainers_beat() -> None:
    board = RunView("r", 20)
    board.receive(beat("trainer", "trainer-0", detail={"progress": 7, "committed": [1, 7], "sync": GATE}), 0.0)
    view = board.view(0.0)
    assert [(row.id, row.version, row.state) for row in view.members] == [
        ("engine-0", "1.7", "current"),
        ("engine-1", None, "pulling"),
    ]
    assert view.sync is not None
    assert view.sync.version == "1.7"
    assert view.sync.phases == {"wait": 0.1, "pause": 2.0, "transfer": 31.4, "apply": 5.0}
    assert view.sync.counts == {"syncs": 8, "canary_failures": 1}


@pytest.mark.parametrize("detail", [{}, {"sync": None}, {"sync": {}}, {"sync": {"members": {}, "phases": {}}}])
def test_a_trainer_without_a_sync_has_no_row_for_it(detail: dict[str, Any]) -> None:
    board = RunView("r", 20)
    board.receive(beat("trainer", "trainer-0", detail=detail), 0.0)
    view = board.view(0.0)
    assert (view.members, view.sync) == ((), None)

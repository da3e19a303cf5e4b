from __future__ import annotations

from typing import Any

import pytest

from trinity_mq.messages import Heartbeat, Metrics
from trinity_mq.observability.report.figures import evaluations, format_duration
from trinity_mq.observability.run_state import RunState
from trinity_mq.runtime.processes.supervisor import ProcessEvent


def beat(role: str, agent: str, seq: int = 1, **fields: Any) -> Heartbeat:
    fields = {"incarnation": "a", "lease": 10.0, "state": "working", **fields}
    return Heartbeat(role=role, id=agent, seq=seq, **fields)  # type: ignore[arg-type]


def trainer(progress: int, seq: int, committed: tuple[int, int] = (1, 0)) -> Heartbeat:
    return beat("trainer", "trainer-0", seq, detail={"progress": progress, "committed": committed})


def metrics(role: str, step: int, **values: float) -> Metrics:
    return Metrics(role=role, id=f"{role}-0", step=step, values=values)  # type: ignore[arg-type]


def test_rates_of_an_earlier_start_are_forgotten_and_rewards_are_not() -> None:
    view = RunState("r", 10)
    values = {"rollout/reward/mean": 0.5, "perf/tokens_per_second": 100.0, "sample/staleness/max": 1.0}
    view.receive(metrics("trainer", 1, **values), 0.0)
    view.clear_momentary_metrics()
    assert view.metrics == {"rollout/reward/mean": 0.5}


def test_an_evaluation_is_news_once() -> None:
    view = RunState("r", 10)
    view.receive(metrics("explorer", 50, **{"eval/held_out/accuracy/mean@1": 0.25}), 0.0)
    assert view.results == {"held_out": (50, 0.25)}
    assert view.take_news() == ["evaluation at step 50: held_out accuracy 0.250"]
    view.receive(metrics("explorer", 50, **{"eval/held_out/accuracy/mean@1": 0.25}), 0.0)
    assert view.take_news() == []


def test_time_left_follows_the_recent_pace() -> None:
    view = RunState("r", 20)
    view.receive(trainer(0, 1), 0.0)
    assert view.seconds_left(0.0) is None
    for step in range(1, 11):
        view.receive(trainer(step, step + 1), 2.0 * step)
    assert view.seconds_left(20.0) == pytest.approx(10 * 2.0)
    assert view.seconds_left(21.0) == pytest.approx(10 * 2.0 - 1)
    assert view.seconds_left(1000.0) is None, "it is overdue: nobody knows"
    view.receive(trainer(20, 30), 1001.0)
    assert view.seconds_left(2000.0) == 0.0


def test_time_left_starts_anew_when_the_trainer_goes_back() -> None:
    view = RunState("r", 20)
    for step in range(1, 11):
        view.receive(trainer(step, step), float(step))
    view.receive(beat("trainer", "trainer-0", 1, incarnation="b", detail={"progress": 5}), 30.0)
    assert view.step == 5
    assert view.seconds_left(30.0) is None


def test_agents_are_alive_while_they_beat() -> None:
    view = RunState("r", 20)
    view.receive(beat("trainer", "trainer-0", state="working"), 0.0)
    view.receive(beat("runner", "runner-0", lease=5.0, state="idle", waits_for="a slice", waits_seconds=2.0), 0.0)
    view.receive(beat("explorer", "explorer-0", state="finished"), 0.0)
    rows = view.agents(4.0)
    assert [(row.id, row.state, row.alive) for row in rows] == [
        ("explorer-0", "finished", False),
        ("runner-0", "idle", True),
        ("trainer-0", "working", True),
    ]
    assert (rows[1].waits_for, rows[1].waits_seconds) == ("a slice", 6.0)
    silent = view.agents(5.0)[1]
    assert (silent.state, silent.alive) == ("silent", False)


def test_old_beats_of_the_same_process_are_ignored() -> None:
    view = RunState("r", 20)
    view.receive(beat("runner", "runner-0", 5, state="working"), 0.0)
    view.receive(beat("runner", "runner-0", 4, state="idle"), 1.0)
    assert view.agents(1.0)[0].state == "working"
    view.receive(beat("runner", "runner-0", 1, incarnation="b", state="starting"), 2.0)
    assert view.agents(2.0)[0].state == "starting"


def test_process_events_that_matter_are_news() -> None:
    view = RunState("r", 20)
    for event in (
        ProcessEvent(name="runner-0", role="runner", what="started", pid=1),
        ProcessEvent(name="runner-0", role="runner", what="restarting", delay=0.5, restarts=2, output="no disk"),
        ProcessEvent(name="runner-0", role="runner", what="killed", code=137),
        ProcessEvent(name="runner-0", role="runner", what="failed", code=78, reason="no"),
    ):
        view.add_event(event)
    assert view.take_news() == [
        "runner-0 died and restarts in 0.5 s (restart 2); see logs/runner-0.*\n  no disk",
        "runner-0 did not end in time and was killed",
        "runner-0 failed permanently (exit code 78): no",
    ]


def test_before_the_first_heartbeat_the_broker_alone_is_blamed() -> None:
    """Agents load for a while; a broker with an alarm lets no heartbeat through."""
    view = RunState("r", 20)
    view.broker_trouble = "memory alarm"
    view.diagnose_stall(1e6)
    view.began = 100.0
    view.diagnose_stall(129.0)
    view.broker_trouble = ""
    view.diagnose_stall(200.0)
    assert (view.finding, view.take_news()) == (None, [])
    view.broker_trouble = "memory alarm"
    for now in (131.0, 133.0):
        view.diagnose_stall(now)
    assert view.finding is not None
    [line] = view.take_news()
    assert line.startswith("no progress for 31 s: all agents wait for the broker: memory alarm; what to do: free")


def test_evaluations_take_accuracy_before_reward() -> None:
    values = {
        "eval/ops3/accuracy/mean@1": 0.5,
        "eval/ops3/reward/mean@1": 0.7,
        "eval/ops3/accuracy/std@1": 0.1,
        "eval/deep/set/reward/mean@4": 0.2,
        "eval/detailed/accuracy/mean@8/mean": 0.25,
        "eval/detailed/accuracy/mean@8/max": 1.0,
        "eval/other/time/mean@1": 3.0,
        "rollout/accuracy/mean": 0.9,
        "eval/text/accuracy/mean@1": "x",
    }
    assert evaluations(values) == {"ops3": 0.5, "deep/set": 0.2, "detailed": 0.25}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (65, "1 min 05 s"), (3600, "1 h 00 min"), (7265, "2 h 01 min"), (-3, "0 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def explorer(seq: int, **detail: Any) -> Heartbeat:
    return beat("explorer", "explorer-0", seq, detail=detail)


def test_each_batch_without_anything_to_train_on_is_news() -> None:
    view = RunState("r", 10)
    empty = {"reason": "no slice gave an experience: 4 failed", "limit": 3}
    view.receive(explorer(1, empty={**empty, "batch": 1, "in_a_row": 1}), 0.0)
    view.receive(explorer(2, empty={**empty, "batch": 1, "in_a_row": 1}), 0.0)
    assert view.take_news() == [
        "batch 1 had nothing to train on (1 in a row, the run ends at 3): no slice gave an experience: 4 failed"
    ]
    view.receive(explorer(3), 0.0)
    view.receive(explorer(4, empty={**empty, "batch": 1, "in_a_row": 1}), 0.0)
    assert len(view.take_news()) == 1


def test_the_reason_of_an_aborted_sync_is_news_once() -> None:
    view = RunState("r", 10)
    for seq, trouble in enumerate(["no GPU", "no GPU", "", "no GPU"], 1):
        view.receive(beat("trainer", "trainer-0", seq, detail={"sync": {"trouble": trouble}}), 0.0)
    assert view.take_news() == ["a weight sync was aborted, and will be retried: no GPU"] * 2


def test_progress_ends_a_standstill() -> None:
    state = RunState("r")
    state.trends.begin(10.0)
    assert state.receive(trainer(1, 1), 11.0)
    assert state.receive(trainer(2, 2), 13.0)
    assert state.receive(trainer(2, 3), 19.0)
    assert not state.receive(trainer(7, 2), 20.0), "older than the heartbeat before"
    state.receive(metrics("trainer", 2, **{"trainer/idle_frac": 0.5}), 20.0)
    seen = state.observation(21.0)
    assert (seen.still, seen.listened, state.trends.moves) == (8.0, 11.0, 1)
    assert seen.heartbeats["trainer-0"][1] == 2.0
    assert seen.metrics == {"trainer/idle_frac": 0.5}
    assert seen.busy == {}, "three samples are too few"


def test_metrics_of_stages_are_averaged_over_a_window() -> None:
    state = RunState("r")
    state.trends.begin(0.0)
    for number, value in enumerate((0.9, 0.1, 0.3)):
        state.receive(metrics("trainer", number, **{"trainer/idle_frac": value, "actor/entropy": 1.0}), 50.0 * number)
    assert state.observation(101.0).metrics == {"trainer/idle_frac": pytest.approx(0.2)}
    assert state.observation(5000.0).metrics, "the latest values where a step takes longer"


def test_busy_shares_are_measured_over_a_window() -> None:
    state = RunState("r")
    for number in range(100):
        running = {"running": 4 if number < 50 else 16, "slots": 16}
        doing = {"doing": "the train step on batch 1" if number % 2 else ""}
        waits_for = "a session" if number % 4 else None
        state.receive(beat("runner", "runner-0", number, detail=running), 2.0 * number)
        state.receive(beat("trainer", "trainer-0", number, detail=doing), 2.0 * number)
        state.receive(beat("gateway", "gateway-0", number, waits_for=waits_for), 2.0 * number)
    busy = state.observation(200.0).busy
    assert busy == pytest.approx({"runner": 1.0, "trainer": 0.5, "sync": 0.0, "gateway": 0.25}, abs=0.05)


def test_rates_are_increases_of_counters_and_a_restart_is_not_a_decrease() -> None:
    state = RunState("r")
    for second in range(11):
        done = 5 * second if second < 6 else 5 * (second - 6)
        state.receive(beat("runner", "runner-0", second + 1, detail={"done": done}), 1000.0 + second)
        state.receive(beat("runner", "runner-1", second + 1, detail={"done": 2 * second}), 1000.0 + second)
    assert state.trends.rate("slices", 1010.0) == pytest.approx(7.0)

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import ControlEvent, Heartbeat, Metrics
from trinity_mq.observability.display import LiveDisplay, PlainDisplay, format_status_line, open_display, render_table
from trinity_mq.observability.follow import MetricsTail, consume_messages
from trinity_mq.observability.report.figures import evaluations, format_duration
from trinity_mq.observability.run_state import RunState
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.processes.supervisor import ProcessEvent
from trinity_mq.telemetry import METRICS_FILE, MetricsWriter
from trinity_mq.testing.virtual_time import run_virtually


def beat(role: str, agent: str, seq: int = 1, **fields: Any) -> Heartbeat:
    fields = {"incarnation": "a", "lease": 10.0, "state": "working", **fields}
    return Heartbeat(role=role, id=agent, seq=seq, **fields)  # type: ignore[arg-type]


def trainer(progress: int, seq: int, committed: tuple[int, int] = (1, 0)) -> Heartbeat:
    return beat("trainer", "trainer-0", seq, detail={"progress": progress, "committed": committed})


def metrics(role: str, step: int, **values: float) -> Metrics:
    return Metrics(role=role, id=f"{role}-0", step=step, values=values)  # type: ignore[arg-type]


def test_evaluations_empty_batches_and_aborted_syncs_are_news_once() -> None:
    view = RunState("r", 10)
    view.receive(metrics("explorer", 50, **{"eval/held_out/accuracy/mean@1": 0.25}), 0.0)
    assert view.results == {"held_out": (50, 0.25)}
    assert view.take_news() == ["evaluation at step 50: held_out accuracy 0.250"]
    view.receive(metrics("explorer", 50, **{"eval/held_out/accuracy/mean@1": 0.25}), 0.0)
    assert view.take_news() == []
    empty = {"reason": "no slice gave an experience: 4 failed", "limit": 3, "batch": 1, "in_a_row": 1}
    news = "batch 1 had nothing to train on (1 in a row, the run ends at 3): no slice gave an experience: 4 failed"
    for seq, detail, wanted in ((1, {"empty": empty}, [news]), (2, {"empty": empty}, []), (3, {}, [])):
        view.receive(beat("explorer", "explorer-0", seq, detail=detail), 0.0)
        assert view.take_news() == wanted
    view.receive(beat("explorer", "explorer-0", 4, detail={"empty": empty}), 0.0)
    assert view.take_news() == [news], "a restarted explorer's"
    for seq, trouble in enumerate(["no GPU", "no GPU", "", "no GPU"], 1):
        view.receive(beat("trainer", "trainer-0", seq, detail={"sync": {"trouble": trouble}}), 0.0)
    assert view.take_news() == ["a weight sync was aborted, and will be retried: no GPU"] * 2


def test_rates_of_an_earlier_start_are_forgotten_and_rewards_are_not() -> None:
    view = RunState("r", 10)
    values = {"rollout/reward/mean": 0.5, "perf/tokens_per_second": 100.0, "sample/staleness/max": 1.0}
    view.receive(metrics("trainer", 1, **values), 0.0)
    view.clear_momentary_metrics()
    assert view.metrics == {"rollout/reward/mean": 0.5}


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
    view.receive(beat("trainer", "trainer-0", 1, incarnation="b", detail={"progress": 5}), 2001.0)
    assert (view.step, view.seconds_left(2001.0)) == (5, None), "the trainer went back"
    assert [format_duration(seconds) for seconds in (-3, 59.4, 7265)] == ["0 s", "59 s", "2 h 01 min"]


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
    for seq, incarnation, state in ((5, "a", "working"), (4, "a", "working"), (1, "b", "starting")):
        view.receive(beat("runner", "runner-1", seq, incarnation=incarnation, state="idle" if seq == 4 else state), 6.0)
        assert view.agents(6.0)[2].state == state, "older beats of the same process are ignored"


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


NOW = 100.0


def full(step: int = 120, **gate: Any) -> RunState:
    view = RunState("arithmetic", 300)
    detail = {"committed": (1, 119), "sync": {"version": (1, 119), **gate}}
    heard(view, "trainer-0", "trainer", state="finished", detail={**detail, "progress": step - 10}, at=NOW - 5.0)
    heard(view, "trainer-0", "trainer", 2, state="finished", detail={**detail, "progress": step}, at=NOW)
    heard(view, "explorer-0", "explorer", state="holding", waits_for="a commit", waits_seconds=75.0, at=NOW)
    heard(view, "runner-0", "runner", state="idle", lease=5.0, at=NOW - 11.0)
    values = {"rollout/reward/mean": 0.71, "rollout/tokens_per_second": 8123.4, "sample/staleness/max": 1.0}
    view.receive(Metrics(role="explorer", id="explorer-0", step=100, values=values), NOW)
    view.receive(Metrics(role="explorer", id="explorer-0", step=100, values={"eval/ops3/accuracy/mean@1": 0.894}), NOW)
    view.set_depths({"closed": 0, "tasks.train": 12, "dead": None})
    return view


def heard(
    view: RunState, agent: str, role: Any, seq: int = 1, *, at: float, lease: float = 60.0, **fields: Any
) -> None:
    view.receive(Heartbeat(role=role, id=agent, seq=seq, incarnation="a", lease=lease, **fields), at)


EMPTY = RunState("arithmetic", None)


def drawn(view: RunState) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render_table(view, NOW))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_releases_are_shown_where_there_are_several() -> None:
    view = full()
    assert "releases" not in drawn(view)
    heard(view, "operator-0", "operator", state="idle", release="0.2.0", at=NOW)
    assert "releases  0.1.0: explorer-0; 0.2.0: operator-0" in drawn(view)
    assert "cannot work in one run" not in drawn(view)
    heard(view, "operator-0", "operator", 2, state="idle", release="0.3.0", reads=(2, 2), writes=2, at=NOW)
    assert "They cannot work in one run: upgrade explorer-0 first" in " ".join(drawn(view).split())


def test_plain_line_says_it_all() -> None:
    assert format_status_line(full(), NOW) == (
        "step 120/300 | reward 0.710 | ops3 accuracy 0.894 (step 100) | tokens/s 8,123 | policy 1.119 | staleness 1 | "
        "left 1 min 30 s | queues closed 0 tasks.train 12 dead - | agents 1/3 | "
        "explorer-0 waits 1 min 15 s for a commit | runner-0 waits 11 s for a heartbeat"
    )


def test_the_last_line_is_of_the_end_and_shows_no_gauge_that_is_over() -> None:
    stream = io.StringIO()
    display, view = PlainDisplay(stream, clock=lambda: "12:00:00"), full(299)
    display.show(view, [], NOW)
    for agent, role in (("trainer-0", "trainer"), ("explorer-0", "explorer"), ("runner-0", "runner")):
        detail = {"progress": 300, "committed": (1, 300)} if role == "trainer" else {}
        heard(view, agent, role, 3, state="finished", detail=detail, at=NOW + 0.5)
    display.show(view, [], NOW + 0.5)
    display.close()
    assert stream.getvalue().splitlines()[-1] == (
        "12:00:00 step 300/300 | reward 0.710 | ops3 accuracy 0.894 (step 100) | policy 1.300 | agents 0/3"
    )


def test_plain_lines_come_while_steps_are_made_and_news_at_once() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock=lambda: "12:00:00")
    display.show(EMPTY, [], NOW)
    assert stream.getvalue() == ""  # nobody there yet
    display.show(full(), [], NOW + 1.0)
    display.show(full(), ["evaluation at step 100"], NOW + 2.0)
    display.show(full(), [], NOW + 7.0)  # no step since
    display.show(full(121), [], NOW + 7.0)
    display.show(full(121), [], NOW + 21.9)
    display.show(full(121), [], NOW + 22.1)
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "12:00:00 step 120/300",
        "12:00:00 evaluation at step 100",
        "12:00:00 step 121/300",
        "12:00:00 step 121/300",
    ]


def test_picture_shows_members_versions_and_the_last_syncs_phases() -> None:
    members = {"engine-1": {"state": "quarantined"}, "engine-0": {"version": (1, 119), "state": "current"}}
    phases = {"wait": 0.4, "pause": 2.0, "transfer": 31.4, "apply": 5.0, "resume": 1.0}
    text = drawn(full(members=members, phases=phases, syncs=8, canary_failures=1))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "engine-0 1.119 current" in rows
    assert "engine-1 - quarantined" in rows
    assert rows[-1] == (
        "last sync 1.119: wait 0 ms, pause 2 ms, transfer 31 ms, apply 5 ms, resume 1 ms (8 syncs, 1 canary failures)"
    )
    assert "last sync" not in drawn(full())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_or_not() -> None:
    assert isinstance(open_display(io.StringIO()), PlainDisplay)
    terminal = Terminal()
    display = open_display(terminal)
    assert isinstance(display, LiveDisplay)
    display.show(full(), ["[news] with brackets"], NOW)
    display.close()
    assert "[news] with brackets" in terminal.getvalue()
    assert "120/300" in terminal.getvalue()


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    class Left(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    display = PlainDisplay(Left())
    display.show(full(), ["news"], NOW)
    display.show(full(), ["more news"], NOW + 1.0)
    display.close()


def test_the_sessions_of_a_run_are_shown_and_where_it_answers() -> None:
    view = full()
    status = {"url": "http://127.0.0.1:8710", "open": 3, "parked": 2, "waiting": 40, "trained": 1200, "acting": True}
    heard(view, "gateway-1", "gateway", state="working", detail={"url": "http://127.0.0.1:8711"}, at=NOW)
    heard(view, "gateway-0", "gateway", state="working", detail={**status, "dropped": 1, "unrecorded": 2}, at=NOW)
    line = "sessions 3 open, 2 parked, 40 waiting, 1200 trained, 1 dropped, 2 not recorded"
    assert line in format_status_line(view, NOW)
    assert line in drawn(view)
    assert view.take_news()[-2:] == [
        "gateway-1 answers at http://127.0.0.1:8711: POST http://127.0.0.1:8711/sessions",
        "gateway-0 answers at http://127.0.0.1:8710: POST http://127.0.0.1:8710/sessions",
    ]
    heard(view, "gateway-0", "gateway", 2, state="working", detail=status, at=NOW)
    assert view.take_news() == [], "told once"


def test_the_reason_why_nothing_moves_is_shown_and_is_news_once() -> None:
    view = RunState("r", 10)
    slow = {"slices": [("t41", 7, 0, 5.0)], "usual_seconds": 1.0}

    def heartbeats(seq: int, at: float, **changed: Any) -> None:
        heard(view, "runner-0", "runner", seq, state="working", detail={**slow, **changed}, at=at)
        for role in ("explorer", "trainer", "operator"):
            heard(view, f"{role}-0", role, seq, state="idle", at=at)

    for seq, seconds in enumerate((0.0, 20.0, 31.0, 33.0), start=1):
        heartbeats(seq, NOW + seconds)
        view.diagnose_stall(NOW + seconds + 4.0)
    (news,) = view.take_news()
    assert news.startswith("no progress for 35 s: ")
    assert "task 7 (from run 0) runs on runner-0 for 9 s; the median is 1.0 s; what to do: look at its" in news
    assert view.finding is not None
    assert view.finding.culprit == "runner-0"
    assert "no progress for" in drawn(view)
    heartbeats(9, NOW + 40.0, done=5)
    view.diagnose_stall(NOW + 41.0)
    assert view.finding is None
    assert "nothing has moved" not in drawn(view)


def test_a_finding_without_a_culprit_is_news_after_another_one() -> None:
    view = RunState("r", 10)

    def beats(seq: int, at: float, *gateways: str, state: Any = "idle") -> None:
        heard(view, "explorer-0", "explorer", seq, state=state, waits_for="tasks to be submitted", at=at)
        heard(view, "trainer-0", "trainer", seq, state=state, at=at)
        for url in gateways:
            heard(view, "gateway-0", "gateway", seq, state=state, detail={"url": url}, at=at)
        view.diagnose_stall(at)

    beats(1, 0.0)
    beats(2, 40.0)
    beats(3, 50.0)
    beats(4, 60.0, "http://h:1")
    beats(5, 70.0, "http://h:1", state="gone")
    news = [line.partition(" s: ")[2].partition("; what")[0] for line in view.take_news() if " s: " in line]
    assert news == [
        "the run waits for tasks to be submitted",
        "the run waits for rewarded sessions at its gateway http://h:1",
        "no agent of the run has sent a heartbeat in 70 s but explorer-0, gateway-0, trainer-0, which ended",
    ]


def test_each_line_of_metrics_comes_once_also_of_a_run_that_was_begun_anew(tmp_path: Path) -> None:
    path, tail = tmp_path / METRICS_FILE, MetricsTail(tmp_path)
    assert tail.read() == []
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.5, "actor/grad_norm": float("nan")})
    writer.close()
    (first,) = tail.read()
    assert (first.role, first.id, first.step, first.values) == ("trainer", "trainer-0", 1, {"actor/pg_loss": 0.5})
    line = b'{"role": "trainer", "agent": "trainer-0", "step": %d}\n'
    with path.open("ab") as file:
        file.write(b'{"role": "tra\n[1]\n{"role": "nobody", "agent": "x", "step": 1}\n' + line % 2 + line[:20])
    assert [message.step for message in tail.read()] == [2], "neither torn lines nor one that is not whole yet"
    with path.open("ab") as file:
        file.write((line % 3)[20:])
    assert [message.step for message in tail.read()] == [3]
    path.unlink()
    path.write_bytes(line % 7)
    assert [message.step for message in tail.read()] == [7]
    path.rename(tmp_path / "aside")
    path.write_bytes(line % 8 + line % 9)
    assert [message.step for message in tail.read()] == [8, 9], "another file, although it is longer"


def test_a_connection_that_breaks_under_an_answer_ends_nothing() -> None:
    """The supervisor of a run listens so: what the broker delivered just before it died cannot be answered any more."""
    received: list[str] = []

    async def play() -> None:
        broker, topology = MemoryBroker(), Topology("follow")
        bus, other = (MemoryBus(broker, topology, config=BrokerConfig()) for _ in range(2))
        await bus.connect()
        await other.connect()

        def receive(message: object) -> None:
            assert isinstance(message, ControlEvent)
            received.append(message.target)
            if len(received) == 1:
                broker.drop(bus)

        queue = topology.listener("supervisor", "a", "control", "#")
        listening = asyncio.create_task(consume_messages(bus, queue, receive))
        while len(received) < 2:
            event = ControlEvent(verb="restart", target=f"runner-{len(received)}")
            await other.publish(topology.exchange("control"), "restart.x", envelope(event))
            await asyncio.sleep(1.0)
            assert not listening.done(), listening.exception()
        listening.cancel()

    run_virtually(play(), limit=60)
    assert received == ["runner-0", "runner-1"]

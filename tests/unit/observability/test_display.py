from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from trinity_mq.messages import Heartbeat, Metrics
from trinity_mq.observability.display import LiveDisplay, PlainDisplay, format_status_line, open_display, render_table
from trinity_mq.observability.run_state import RunState

NOW = 100.0


def full(step: int = 120, **gate: Any) -> RunState:
    view = RunState("arithmetic", 300)
    detail = {"committed": (1, 119), "sync": {"version": (1, 119), **gate}}
    beat(view, "trainer-0", "trainer", state="finished", detail={**detail, "progress": step - 10}, at=NOW - 5.0)
    beat(view, "trainer-0", "trainer", 2, state="finished", detail={**detail, "progress": step}, at=NOW)
    beat(view, "explorer-0", "explorer", state="holding", waits_for="a commit", waits_seconds=75.0, at=NOW)
    beat(view, "runner-0", "runner", state="idle", lease=5.0, at=NOW - 11.0)
    values = {"rollout/reward/mean": 0.71, "rollout/tokens_per_second": 8123.4, "sample/staleness/max": 1.0}
    view.receive(Metrics(role="explorer", id="explorer-0", step=100, values=values), NOW)
    view.receive(Metrics(role="explorer", id="explorer-0", step=100, values={"eval/ops3/accuracy/mean@1": 0.894}), NOW)
    view.set_depths({"closed": 0, "tasks.train": 12, "dead": None})
    return view


def beat(view: RunState, agent: str, role: Any, seq: int = 1, *, at: float, lease: float = 60.0, **fields: Any) -> None:
    view.receive(Heartbeat(role=role, id=agent, seq=seq, incarnation="a", lease=lease, **fields), at)


EMPTY = RunState("arithmetic", None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(view: RunState) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render_table(view, NOW))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_releases_are_shown_where_there_are_several() -> None:
    view = full()
    assert "releases" not in drawn(view)
    beat(view, "operator-0", "operator", state="idle", release="0.2.0", at=NOW)
    assert "releases  0.1.0: explorer-0; 0.2.0: operator-0" in drawn(view)
    assert "cannot work in one run" not in drawn(view)
    beat(view, "operator-0", "operator", 2, state="idle", release="0.3.0", reads=(2, 2), writes=2, at=NOW)
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
        beat(view, agent, role, 3, state="finished", detail=detail, at=NOW + 0.5)
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


def test_picture_shows_figures_queues_and_agents() -> None:
    text = drawn(full())
    for word in (
        "arithmetic",
        "120/300",
        "0.710",
        "0.894",
        "8,123",
        "1.119",
        "1 min 30 s",
        "tasks.train 12",
        "a commit",
    ):
        assert word in text
    assert "holding" in text
    assert drawn(EMPTY).startswith("arithmetic")


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
    beat(view, "gateway-1", "gateway", state="working", detail={"url": "http://127.0.0.1:8711"}, at=NOW)
    beat(view, "gateway-0", "gateway", state="working", detail={**status, "dropped": 1, "unrecorded": 2}, at=NOW)
    line = "sessions 3 open, 2 parked, 40 waiting, 1200 trained, 1 dropped, 2 not recorded"
    assert line in format_status_line(view, NOW)
    assert line in drawn(view)
    assert view.take_news()[-2:] == [
        "gateway-1 answers at http://127.0.0.1:8711: POST http://127.0.0.1:8711/sessions",
        "gateway-0 answers at http://127.0.0.1:8710: POST http://127.0.0.1:8710/sessions",
    ]
    beat(view, "gateway-0", "gateway", 2, state="working", detail=status, at=NOW)
    assert view.take_news() == [], "told once"


def test_the_reason_why_nothing_moves_is_shown_and_is_news_once() -> None:
    view = RunState("r", 10)
    slow = {"slices": [("t41", 7, 0, 5.0)], "usual_seconds": 1.0}

    def heartbeats(seq: int, at: float, **changed: Any) -> None:
        beat(view, "runner-0", "runner", seq, state="working", detail={**slow, **changed}, at=at)
        for role in ("explorer", "trainer", "operator"):
            beat(view, f"{role}-0", role, seq, state="idle", at=at)

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

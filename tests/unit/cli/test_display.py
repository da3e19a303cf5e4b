from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from trinity_mq.cli.run.display import LiveDisplay, PlainDisplay, open_display, picture, plain_line
from trinity_mq.cli.run.run_view import AgentRow, MemberRow, SyncRow, View

FULL = View(
    run="arithmetic",
    step=120,
    total=300,
    reward=0.71,
    results={"ops3": (100, 0.894)},
    tokens_per_second=8123.4,
    version="1.119",
    staleness=1.0,
    depths={"closed": 0, "tasks.train": 12, "dead": None},
    agents=(
        AgentRow("explorer-0", "explorer", "holding", "a commit", 75.0),
        AgentRow("runner-0", "runner", "silent", "a sign of life", 11.0),
    ),
    seconds_left=100.0,
)
EMPTY = View(run="arithmetic")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(view: View) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_plain_line_says_it_all() -> None:
    assert plain_line(FULL) == (
        "step 120/300 | reward 0.710 | ops3 accuracy 0.894 (step 100) | tokens/s 8,123 | policy 1.119 | staleness 1 | "
        "left 1 min 40 s | queues closed 0 tasks.train 12 dead - | agents 1/2 | "
        "explorer-0 waits 1 min 15 s for a commit | runner-0 waits 11 s for a sign of life"
    )


def test_plain_line_of_nothing() -> None:
    assert plain_line(EMPTY).startswith("step 0/? | reward - | tokens/s - | policy - | staleness - | left -")


def test_plain_lines_come_while_steps_are_made_and_news_at_once() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock=lambda: "12:00:00")
    display.show(EMPTY, [], 0.0)
    assert stream.getvalue() == ""  # nobody there yet
    display.show(FULL, [], 1.0)
    display.show(FULL, ["evaluation at step 100"], 2.0)
    display.show(FULL, [], 7.0)  # no step since
    display.show(View(run="r", step=121, agents=FULL.agents), [], 7.0)
    display.show(View(run="r", step=121, agents=FULL.agents), [], 21.9)
    display.show(View(run="r", step=121, agents=FULL.agents), [], 22.1)
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "12:00:00 step 120/300",
        "12:00:00 evaluation at step 100",
        "12:00:00 step 121/?",
        "12:00:00 step 121/?",
    ]


def test_picture_shows_figures_queues_and_agents() -> None:
    text = drawn(FULL)
    for word in (
        "arithmetic",
        "120/300",
        "0.710",
        "0.894",
        "8,123",
        "1.119",
        "1 min 40 s",
        "tasks.train 12",
        "a commit",
    ):
        assert word in text
    assert "holding" in text
    assert drawn(EMPTY).startswith("arithmetic")


def test_picture_shows_members_versions_and_the_last_syncs_phases() -> None:
    members = (MemberRow("engine-0", "1.119", "current"), MemberRow("engine-1", None, "quarantined"))
    phases = {"wait": 0.4, "pause": 2.0, "transfer": 31.4, "apply": 5.0, "resume": 1.0}
    text = drawn(replace(FULL, members=members, sync=SyncRow("1.119", phases, {"syncs": 8, "canary_failures": 1})))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "engine-0 1.119 current" in rows
    assert "engine-1 - quarantined" in rows
    assert rows[-1] == (
        "last sync 1.119: wait 0 ms, pause 2 ms, transfer 31 ms, apply 5 ms, resume 1 ms (8 syncs, 1 canary failures)"
    )
    assert "last sync" not in drawn(FULL)


def test_terminal_or_not() -> None:
    assert isinstance(open_display(io.StringIO()), PlainDisplay)
    terminal = Terminal()
    display = open_display(terminal)
    assert isinstance(display, LiveDisplay)
    display.show(FULL, ["[news] with brackets"], 0.0)
    display.close()
    assert "[news] with brackets" in terminal.getvalue()
    assert "120/300" in terminal.getvalue()


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    class Left(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    display = PlainDisplay(Left())
    display.show(FULL, ["news"], 0.0)
    display.show(FULL, ["more news"], 1.0)
    display.close()

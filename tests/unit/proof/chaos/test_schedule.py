from __future__ import annotations

import itertools
import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from trinity_mq.cli import chaos as command
from trinity_mq.cli.main import argument_parser, main
from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.injector import InjectedFault
from trinity_mq.proof.chaos.points import INSIDE, POINTS
from trinity_mq.proof.chaos.report import as_json, lines
from trinity_mq.proof.chaos.schedule import ENDS, KINDS, ROLES, ChaosSchedule, Fault, draw, load, save
from trinity_mq.proof.chaos.sessions.clients import ClientRequest, ClientSession, Traffic
from trinity_mq.proof.chaos.targets.base import Victim
from trinity_mq.proof.chaos.trial import TrialOutcome
from trinity_mq.proof.chaos.witness import RunObserver
from trinity_mq.proof.invariants import InvariantVerdict

EVERYTHING = {role: tuple(KINDS) for role in ROLES}


def test_a_seed_repeats_its_schedule_and_others_differ() -> None:
    first = draw(7, 100, EVERYTHING, 3.0)
    assert draw(7, 100, EVERYTHING, 3.0) == first
    assert draw(8, 100, EVERYTHING, 3.0).faults != first.faults
    assert draw(7, 40, EVERYTHING, 3.0).faults == first.faults[:40], "fewer faults are the first of more"


def test_the_schedule_of_a_seed_is_the_same_in_every_release() -> None:
    """Who reports a seed must get the same faults back; a change of drawing is a new format."""
    first = draw(7, 3, {role: kinds for role, kinds in EVERYTHING.items() if role != "gateway"}, 3.0).faults
    assert [(one.role, one.kind, one.point, one.wait) for one in first] == [
        ("engine", "kill", None, 2.285),
        ("runner", "kill", None, 2.673),
        ("operator", "kill", "agent_back", 0.0),
    ]


def test_every_role_kind_and_point_is_drawn() -> None:
    faults = draw(1, 2000, EVERYTHING, 3.0).faults
    assert {one.role for one in faults} == set(ROLES)
    assert {one.kind for one in faults} == set(KINDS)
    assert {one.point for one in faults} == {None, *POINTS}
    kinds = Counter(one.kind for one in faults)
    assert kinds["kill"] > kinds["freeze"] > kinds["restart"]
    waits = [one.wait for one in faults if one.point != "agent_back"]
    assert 2.8 < sum(waits) / len(waits) < 3.2
    for one in faults:
        assert one.point is None or one.role in POINTS[one.point].roles
        assert (one.seconds > 0) == (one.kind in {"freeze", "cut"})
        assert 0 <= one.pick <= 1
    assert any(one.seconds > 12 for one in faults), "some last longer than a lease"
    for before, one in itertools.pairwise(faults):
        if one.point == "agent_back":
            assert before.kind in ENDS, "somebody must have ended"
            assert before.role not in {"engine", "broker"}, "whose return no new process of an agent tells"
            assert (one.together, one.wait, one.occurrence) == (True, 0.0, 1)
    assert not faults[0].together
    assert any(one.together for one in faults)


def test_only_what_is_possible_is_drawn() -> None:
    faults = draw(3, 200, {"runner": ("kill",), "broker": ("cut", "restart"), "trainer": ()}, 1.0).faults
    assert {(one.role, one.kind) for one in faults} == {("runner", "kill"), ("broker", "cut"), ("broker", "restart")}
    with pytest.raises(ValueError, match="no fault is possible"):
        draw(3, 1, {"runner": ()}, 1.0)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    schedule = draw(7, 30, EVERYTHING, 3.0)
    save(schedule, tmp_path / "schedule.json")
    read = load(tmp_path / "schedule.json")
    assert list(read.faults) == list(schedule.faults)
    assert read.seed == 7
    text = (tmp_path / "schedule.json").read_text()
    assert len(text.splitlines()) == 32, "a line for each fault"
    assert json.loads(text)["drawn_from"]["count"] == 30, "JSON for other programs"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"role": "judge"}, "role is 'judge', wanted one of explorer"),
        ({"kind": "tickle"}, "kind is 'tickle', wanted one of kill"),
        ({"point": "midnight"}, "point is 'midnight', wanted null or one of batch_opened"),
        ({"role": "runner", "point": "decision_confirmed"}, "which only a gateway passes, not a runner"),
        ({"pick": 1.5}, "pick must be from 0 to 1"),
        ({"wait": -1.0}, "wait and seconds at least 0"),
        ({"wait": float("nan")}, "wait and seconds at least 0"),
        ({"kind": []}, r"kind is \[\], wanted one of"),
        ({"wait": "3"}, "wait is '3', wanted a number"),
        ({"occurrence": 1.5}, "occurrence is 1.5, wanted a whole number"),
        ({"pick": None, "point": []}, r"point is \[\], wanted null or .*pick is None, wanted a number"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: dict[str, object], wanted: str) -> None:
    schedule = draw(7, 2, EVERYTHING, 3.0)
    faults = [schedule.faults[0], replace(schedule.faults[1], **change)]  # type: ignore[arg-type]
    save(ChaosSchedule(faults), tmp_path / "schedule.json")
    with pytest.raises(CommandError, match=f"fault 2: .*{wanted}"):
        load(tmp_path / "schedule.json")


@pytest.mark.parametrize("text", ["", "[]", '{"format": 9, "faults": []}', '{"format": 1, "faults": [{"number": 1}]}'])
def test_what_is_no_schedule_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "schedule.json").write_text(text)
    with pytest.raises(CommandError, match="is not a valid schedule"):
        load(tmp_path / "schedule.json")
    with pytest.raises(CommandError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_points_inside_agents_are_drawn_evenly_and_change_nothing_else() -> None:
    plain, moved = draw(5, 600, EVERYTHING, 1.0).faults, draw(5, 600, EVERYTHING, 1.0, inside=0.5).faults
    assert draw(5, 600, EVERYTHING, 1.0, inside=0.5).faults == moved
    for before, after in zip(plain, moved, strict=True):
        assert replace(after, point=before.point, occurrence=before.occurrence) == before
    inside = [one for one in moved if one.point in INSIDE]
    assert {one.point for one in inside} == set(INSIDE)
    assert all(INSIDE[str(one.point)].role == one.role for one in inside)
    of_gateways = Counter(one.point for one in inside if one.role == "gateway")
    assert max(of_gateways.values()) - min(of_gateways.values()) <= 1
    with_some = [one for one in plain if one.role in {point.role for point in INSIDE.values()}]
    assert 0.4 < len(inside) / len(with_some) < 0.55


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a run: a YAML file to start one, or --attach RUN_FOLDER"),
        (["x.yaml", "--attach", "runs/y"], "'x.yaml' and --attach runs/y are two runs"),
        (["x.yaml", "--inside", "2"], "--inside is 2, wanted a share from 0 to 1"),
        (["x.yaml", "--clients", "-1"], "--clients is -1, wanted at least 0"),
        (["x.yaml", "--kills", "0"], "--kills is 0, wanted at least 1"),
        (["x.yaml", "--timeout", "0"], "--timeout is 0, wanted more than 0 seconds"),
        (["x.yaml", "--kinds", "kill,tickle"], "wanted some of kill, freeze, cut, restart"),
        (["x.yaml", "--roles", ""], "wanted some of explorer, runner"),
        (["x.yaml"], "x.yaml: cannot be read"),
        (["--attach", "."], "is not a running run"),
    ],
)
def test_wrong_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("name: r\nmodel: {tiny: {}}\n")
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err


def outcome() -> TrialOutcome:
    witness = RunObserver()
    faults = [
        Fault(number=1, wait=1.0, role="runner", kind="kill", pick=0.0, point="sync_commit"),
        Fault(number=2, wait=1.0, role="trainer", kind="freeze", pick=0.0, seconds=3.0, together=True),
        Fault(number=3, wait=1.0, role="broker", kind="restart", pick=0.0),
    ]
    done = [
        InjectedFault(faults[0], 11.0, Victim("runner", "runner-1", "7@1"), back=13.5, recovered=14.0),
        InjectedFault(faults[1], 12.0, Victim("trainer", "trainer-0", "8@1"), note="its point was not reached"),
    ]
    verdicts = [
        InvariantVerdict(
            "the run recovers", "violated", "1 violation", ("fault 2 (freeze trainer-0): it was not heard of",)
        ),
        InvariantVerdict("no process left", "holds", "all have ended"),
    ]
    found = TrialOutcome(ChaosSchedule(faults, 7), "a test", witness, done, 10.0)
    found.verdicts, found.rate_before, found.rate_while = verdicts, 60.0, 45.0
    found.steps, found.seconds = 12, 20.0
    return found


def test_the_report_has_each_fault_each_verdict_what_it_cost_and_what_clients_were_told() -> None:
    seen = outcome()
    asked = [ClientRequest(tries=2, call="c", recorded="yes"), ClientRequest(tries=1, call="d", recorded="no")]
    sessions = [ClientSession("a", "k", asked=asked, rewarded=True), ClientSession("b", "k")]
    seen.traffic = Traffic(sessions, Counter({"503": 3}))
    text = "\n".join(lines(seen, Path("s.json"), "trinity-mq chaos x"))
    rows = [line.split() for line in text.splitlines()]
    assert rows[1] == ["1", "1.0", "kill", "runner-1", "sync_commit", "2.5", "3.0"]
    assert rows[2][:5] == ["2", "2.0", "freeze", "3.0", "s"]
    assert rows[2][-5:] == ["its", "point", "was", "not", "reached"]
    for part in (
        "VIOLATED     the run recovers  1 violation",
        "fault 2 (freeze trainer-0): it was not heard of",
        "AN INVARIANT IS VIOLATED; 2 faults in 20 s, 12 batches trained on; recovered in 3.0 s (median)",
        "60 batches a minute before, 45 during the faults: 25% lost",
        "1 of 3 faults were not injected",
        "\nrunner     1 kill; 1 at sync_commit\ntrainer    1 freeze\n",
        "\nclients    2 sessions, 1 rewarded, 2 calls, 1 recorded, 1 unrecorded, 1 repeated, 3 failed requests\n",
    ):
        assert part in text
    assert text.endswith("schedule: s.json\nrepeat it: trinity-mq chaos x")
    data = json.loads(json.dumps(as_json(seen, Path("s.json"), "trinity-mq chaos x")))
    assert (data["holds"], data["faults"][0]["recovered"], data["traffic"]["recorded"]) == (False, 4.0, 1)
    assert data["invariants"][0]["evidence"] == ["fault 2 (freeze trainer-0): it was not heard of"]
    assert data["by_role"] == {"runner": [{"kill": 1}, {"sync_commit": 1}], "trainer": [{"freeze": 1}, {}]}


@pytest.mark.parametrize(
    "words",
    [
        ["x.yaml", "name=a b", "--kills", "9", "--seed", "7", "--roles", "runner,trainer"],
        ["--attach", "runs/x", "--seed", "3", "--further", "2"],
        ["x.yaml", "--compose", "mine", "--kinds", "kill"],
        ["x.yaml", "--schedule", "s.json", "--every", "1"],
        ["x.yaml", "mode=serve", "--inside", "0.25", "--clients", "4"],
        ["x.yaml", "--broker", "amqp://h/"],
    ],
)
def test_the_command_that_repeats_it_means_the_same(words: list[str]) -> None:
    arguments = argument_parser().parse_args(["chaos", *words])
    again = command.repeat_command(arguments, arguments.overrides, ChaosSchedule([], arguments.seed or 5))
    program, name, *rest = shlex.split(again)
    assert (program, name) == ("trinity-mq", "chaos")
    repeated = vars(argument_parser().parse_args(["chaos", *rest]))
    for key, value in vars(arguments).items():
        if key not in {"seed", "fresh", "every", "kills"} or arguments.schedule is None:
            assert repeated[key] == value or (key in {"seed", "fresh"} and not value), key
    assert arguments.schedule is not None or repeated["seed"] == (arguments.seed or 5)
    assert repeated["fresh"] == (arguments.attach is None and arguments.compose is None)

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.points import INSIDE, POINTS
from trinity_mq.proof.chaos.schedule import ENDS, KINDS, ROLES, ChaosSchedule, draw, load, save

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

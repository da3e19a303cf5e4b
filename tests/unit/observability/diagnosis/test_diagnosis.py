"""The finding and the bottleneck of synthetic observations."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.config import Config
from trinity_mq.config.settings_table import all_settings
from trinity_mq.messages import Heartbeat
from trinity_mq.observability.diagnosis import Observation, RunFinding, bottleneck, diagnose, free_resources
from trinity_mq.observability.diagnosis.levers import LEVERS, lever
from trinity_mq.observability.diagnosis.records import BROKER

ENGINE = "explorer-0-engine"
SERVING = {"id": ENGINE, "url": "u", "name": "m", "role": "rollout", "version": (1, 5), "state": "current"}


def beat(
    role: str,
    agent: str = "",
    /,
    seq: int = 1,
    state: str = "working",
    waits: tuple[str, float] | None = None,
    detail: dict[str, Any] | None = None,
    **status: Any,
) -> Heartbeat:
    """Return a heartbeat; ``status`` are fields of the role's status, ``detail`` those whose names are taken here."""
    waits_for, seconds = waits or (None, 0.0)
    return Heartbeat(
        role=role,
        id=agent or f"{role}-0",
        seq=seq,
        incarnation="a",
        lease=10.0,
        state=state,
        waits_for=waits_for,
        waits_seconds=seconds,
        detail={**(detail or {}), **status},
    )


def engine(state: str = "working", **status: Any) -> Heartbeat:
    return beat("engine", ENGINE, state=state, detail={**SERVING, **status})


HEALTHY = (
    beat("explorer", state="holding", waits=("weights of progress 41 (committed: 40)", 20.0), open=["t41"], closed=40),
    beat("trainer", state="idle", waits=("batch 41", 20.0), progress=40),
    beat("operator", state="idle", waits=("a closed batch", 20.0)),
    beat("runner", "runner-0", state="idle", waits=("a slice", 20.0), slots=16, usual_seconds=9.0),
    beat("runner", "runner-1", slots=16, slices=[("t41", 7, 0, 3.0)], usual_seconds=9.0),
    engine(),
)
EXPECTED = {"explorer": 1, "trainer": 1, "operator": 1, "runner": 2}


def seen(
    *changed: Heartbeat, without: tuple[str, ...] = (), ages: dict[str, float] | None = None, **fields: Any
) -> RunFinding:
    """Return the finding about a run of which only ``changed`` is not as in a healthy one that waits for a slice."""
    beats = {one.id: one for one in (*HEALTHY, *changed) if one.id not in without}
    aged = {name: (one, (ages or {}).get(name, 0.5)) for name, one in beats.items()}
    fields = {"still": 20.0, "expected": EXPECTED, **fields}
    return diagnose(Observation(heartbeats=aged, **fields))


def test_the_words_of_the_issue() -> None:
    slow = beat("runner", "runner-3", slots=16, slices=[("t41", 7, 0, 211.5)], usual_seconds=9.0)
    found = seen(slow, limits={"explorer.max_timeout": 360.0})
    assert found.sentence == (
        "trainer-0 waits 20 s for batch 41: task 7 (from run 0) runs on runner-3 for 212 s; the median is 9 s"
    )
    assert (found.state, found.culprit) == ("waiting", "runner-3")
    assert "explorer.over_rollout.ratio" in found.lever
    assert "explorer.max_timeout bounds an attempt at 360 s" in found.evidence
    assert "no engine generates anything: the workflow or its reward function takes the time" in found.evidence
    assert found.edges[0].waiter in {"explorer-0", "operator-0", "runner-0", "trainer-0"}
    assert next(edge for edge in found.edges if edge.waiter == "trainer-0").on == "runner-3"


def how(*changed: Heartbeat, **fields: Any) -> dict[str, Any]:
    return {"changed": changed, **fields}


def sliced(seconds: float, usual: float = 1.0) -> Heartbeat:
    return beat("runner", "runner-1", slices=[("t41", 7, 0, seconds)], usual_seconds=usual)


def doing(what: str, seconds: float, usual: float, **more: Any) -> Heartbeat:
    return beat("trainer", doing=what, doing_seconds=seconds, usual_seconds=usual, **more)


def operating(**more: Any) -> Heartbeat:
    return beat("operator", ticket="t40", seconds=50.0, usual_seconds=1.0, **more)


PAUSED = {"lane": "train", "failures": 6, "kind": "sandbox", "reason": "refused", "pause": 30.0}
HOLDING_NOTHING = [beat("runner", f"runner-{n}", state="idle", slots=16, holds={}) for n in range(2)]
EMPTY = {"tasks.train": 0, "tasks.eval": 0}
SILENT = [{"id": "runner-1", "role": "runner", "seconds": 12.0, "slices": [("t41", 7, 0, 3.0)]}]
LISTENER = beat("explorer", waits=("weights", 9.0), open=["t41"], silent=SILENT)
PULLING = {"members": {ENGINE: {"state": "pulling"}}, "trouble": "timed out"}
LOST = "16 slices of batch 41 were neither here nor there"
PEOPLE = "waits for people to judge 2 runs of its batch; in 250 s the default counts for the remaining runs"
ALARM = "the broker blocks publishers: memory or disk alarm"
FROZEN = engine(unanswered=7.0)
NO_RUNNERS = ("runner-0", "runner-1")
DELETED = {**EMPTY, "tasks.train": None}
OPERATED = operating(reviews=2, review_seconds=250.5)
STEP = doing("the train step on batch 41", 40.0, 2.0, in_hand=["t41"])
SYNC = doing("the weight sync of version 1.7", 30.0, 0.1, sync=PULLING)
CULPRITS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "engine frozen": (how(FROZEN), "stuck", ENGINE, "has not answered"),
    "engine frozen, slices age": (how(FROZEN, sliced(90.0)), "stuck", ENGINE, "frozen"),
    "engine died": (how(engine("gone")), "waiting", ENGINE, "has died"),
    "runner silent": (how(ages={"runner-1": 8.0}), "stuck", "runner-1", "no heartbeat for 8 s"),
    "runner silent before": (how(LISTENER, without=("runner-1",)), "stuck", "runner-1", "no heartbeat for 12 s"),
    "explorer silent, and so its engine": (how(ages={"explorer-0": 9.0, ENGINE: 9.0}), "stuck", "explorer-0", "9 s"),
    "no operator": (how(without=("operator-0",), depths={"closed": 2}), "stuck", "operator", "2 closed batches"),
    "no runner": (how(without=NO_RUNNERS), "stuck", "runner", "no runner is running"),
    "no trainer": (how(without=("trainer-0",)), "stuck", "trainer", "no trainer is running"),
    "no explorer": (how(without=("explorer-0", ENGINE)), "stuck", "explorer", "no explorer is running"),
    "queue emptied": (
        how(*HOLDING_NOTHING, depths=EMPTY),
        "waiting",
        "explorer-0",
        "the slices of 1 open batch are lost",
    ),
    "queue deleted": (how(*HOLDING_NOTHING, depths=DELETED), "waiting", "explorer-0", "are empty or were deleted"),
    "slices sent again": (how(beat("explorer", open=["t41"], lost=LOST)), "waiting", "explorer-0", LOST),
    "broker alarm": (how(broker=ALARM), "stuck", BROKER, "alarm"),
    "broker away": (how(broker="connection refused"), "stuck", BROKER, "refused"),
    "trainer slow": (how(STEP), "waiting", "trainer-0", "the train step on batch 41 for 40 s; the median is 2 s"),
    "sync does not end": (how(SYNC), "waiting", ENGINE, "has not taken the weights"),
    "operator slow": (how(operating()), "waiting", "operator-0", "processes a batch for 50 s"),
    "people judge": (how(OPERATED), "waiting", "operator-0", PEOPLE),
    "sandbox away": (
        how(beat("runner", "runner-1", state="holding", waits=("it", 9.0), paused=[PAUSED])),
        "waiting",
        "runner-1",
        "sandbox",
    ),
    "model loads": (
        how(beat("trainer", state="starting", waits=("the model", 25.0))),
        "waiting",
        "trainer-0",
        "is starting, for the model since 26 s",
    ),
}


def seen_as(case: dict[str, Any], **more: Any) -> RunFinding:
    fields = dict(case)
    return seen(*fields.pop("changed"), **fields, **more)


@pytest.mark.parametrize("name", CULPRITS)
def test_the_culprit_of_a_run_that_stands_still_and_nobody_where_it_moves(name: str) -> None:
    case, state, culprit, words = CULPRITS[name]
    found = seen_as(case)
    assert (found.state, found.culprit) == (state, culprit), found
    assert words in found.sentence
    assert culprit in found.sentence
    assert found.lever
    if not name.startswith("broker"):
        found = seen_as(case, still=1.0)
        assert (found.state, found.culprit) == ("moving", None)
        assert any(line.startswith("but ") and culprit in line for line in found.evidence), "the suspect"


def test_a_long_sync_names_its_bytes_and_its_deadline() -> None:
    moved = {**PULLING, "num_bytes": 65_500_000_000, "method": "memory", "deadline": 1370.0}
    found = seen(doing("the weight sync of version 1.7", 600.0, 0.1, sync=moved))
    assert "65,500 MB are sent by memory; a transfer may take 23 min" in found.evidence


def test_work_of_the_usual_duration_is_not_blamed() -> None:
    assert seen(doing("the train step on batch 41", 100.0, 60.0)).state == "moving"
    assert seen(sliced(26.0, 9.0)).state == "moving"
    assert seen(sliced(28.0, 9.0)).culprit == "runner-1"


def test_an_engine_that_may_be_frozen_keeps_the_blame_from_the_runner() -> None:
    assert seen(sliced(100.0), engine(unanswered=2.0)).culprit is None


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(how(depths={**EMPTY, "tasks.train": 3}), id="they wait in the queue"),
        pytest.param(how(depths={}), id="the queues were not seen"),
        pytest.param(how(beat("runner", holds={"t41": [(7, 0)]}), depths=EMPTY), id="a runner has one"),
        pytest.param(how(beat("runner"), depths=EMPTY), id="a runner of an old release"),
    ],
)
def test_slices_that_may_be_somewhere_are_not_called_lost(fields: dict[str, Any]) -> None:
    assert "lost" not in seen_as({**fields, "changed": (*HOLDING_NOTHING, *fields["changed"])}).sentence


def test_a_runner_whose_work_has_gone_to_others_is_blamed_last() -> None:
    lost = [{"id": "runner-9", "role": "runner", "seconds": 3000.0}]
    explorer = beat("explorer", waits=("weights", 9.0), open=["t41"], silent=lost)
    assert seen(explorer, sliced(100.0)).culprit == "runner-1"
    assert seen(explorer).culprit == "runner-9"


def test_nobody_takes_long_and_nothing_moves() -> None:
    assert seen(still=29.0).state == "moving"
    found = seen(still=31.0)
    assert (found.state, found.culprit) == ("waiting", "runner-1")
    assert "followed: trainer-0 -> runner-1" in found.evidence


def test_over_silent_and_without_tasks() -> None:
    assert seen(beat("explorer", state="finished", finished=True)).state == "over"
    assert diagnose(Observation(still=9.0)).state == "silent"
    found = seen(beat("explorer", state="idle", waits=("tasks to be submitted", 60.0)), without=("runner-1",))
    assert (found.state, found.culprit) == ("waiting", None)
    assert "tasks to be submitted" in found.sentence


def test_an_idle_run_with_a_gateway_waits_for_sessions_at_its_url() -> None:
    gateway = beat("gateway", url="http://host:8710", open=2, parked=3)
    explorer = beat("explorer", state="idle", waits=("tasks to be submitted", 60.0))
    found = seen(explorer, gateway, without=("runner-1",))
    assert (found.state, found.culprit) == ("waiting", None)
    assert "http://host:8710" in found.sentence
    assert "submit" not in found.sentence
    assert found.evidence[0] == "2 sessions are open; 3 wait for a reward or for their group"


def test_a_goodbye_that_is_heard_first_does_not_end_the_run() -> None:
    gone = {"operator-0": (beat("operator", state="gone"), 0.2)}
    found = diagnose(Observation(heartbeats=gone, expected=EXPECTED, listened=0.5, still=0.5))
    assert found.state == "silent"
    assert "operator-0" in found.sentence
    done = {"operator-0": (beat("operator", state="finished"), 0.2)}
    assert diagnose(Observation(heartbeats=done, expected=EXPECTED, listened=0.5)).state == "silent"


def test_a_run_of_a_trainer_alone_is_over_with_it() -> None:
    trainer = {"trainer-0": (beat("trainer", state="finished", finished=True), 0.5)}
    assert diagnose(Observation(heartbeats=trainer, expected={"trainer": 1})).state == "over"
    gone = {"trainer-0": (beat("trainer", state="gone"), 0.5)}
    assert diagnose(Observation(heartbeats=gone, expected={"trainer": 1})).state == "silent"


def test_a_run_that_starts_is_not_stuck() -> None:
    first = {"runner-0": (beat("runner", seq=9), 0.5)}
    for expected, others in (("explorer", {}), ("trainer", {"explorer-0": (beat("explorer", seq=9), 0.5)})):
        found = diagnose(Observation(heartbeats={**first, **others}, expected=EXPECTED, still=12.0))
        assert (found.state, found.culprit) == ("waiting", expected)
        assert f"the run is starting: no {expected} is heard yet" in found.sentence
    late = {name: (beat(one.role, name, seq=500), age) for name, (one, age) in {**first, **others}.items()}
    assert diagnose(Observation(heartbeats=late, expected=EXPECTED, still=12.0)).state == "stuck"


def test_missing_agents_are_not_blamed_before_their_heartbeats_can_have_come() -> None:
    assert seen(without=("operator-0",), depths={"closed": 1}, listened=4.0).culprit is None


SETTINGS = {one.key for one in all_settings()}
SECTIONS = "algorithm|model|buffer|explorer|runner|operator|trainer|synchronizer|broker|gateway|supervisor"


@pytest.mark.parametrize("cause", LEVERS)
def test_settings_and_commands_that_a_lever_names_exist(cause: str) -> None:
    from trinity_mq.cli.main import COMMANDS

    for key in re.findall(rf"\b(?:{SECTIONS})\.[a-z_.]*[a-z_]", lever(cause)):
        assert key in SETTINGS or any(one.startswith(f"{key}.") for one in SETTINGS), key
    for command in re.findall(r"`trinity-mq ([a-z]+)", LEVERS[cause]):
        assert command in {name for name, _, _ in COMMANDS}
    assert re.search(r"`|\b\w+\.\w+|see its log", LEVERS[cause]), "it names something to do"


THREADS = {"trainer": {"num_threads": 2}, "explorer": {"rollout_model": {"num_threads": 2}}}


@pytest.mark.parametrize(
    ("settings", "cores", "gpus", "free"),
    [
        ({}, 2, 0, set()),
        ({}, 16, 0, {"cores"}),  # threads that are auto take all cores
        (THREADS, 4, 0, set()),
        (THREADS, 16, 0, {"cores", "devices"}),
        ({}, 16, 2, {"cores"}),
        ({}, 2, 4, {"devices"}),
        ({"explorer": {"rollout_model": {"engine_num": 3}}}, 16, 4, {"cores"}),
        ({"model": {"tiny": {}, "device": "cpu"}}, 2, 8, set()),
    ],
)
def test_the_free_resources_of_a_machine(settings: dict[str, Any], cores: int, gpus: int, free: set[str]) -> None:
    config = Config.model_validate({"name": "t", "model": {"tiny": {}}, **settings})
    assert free_resources(config, cores, gpus) == free


ROLES = ("explorer", "scheduler", "runner", "operator", "trainer", "engine", "gateway", "supervisor")
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
IDS = st.lists(st.text("ab", max_size=2), max_size=2)
SLICES = st.lists(st.tuples(st.text("ab", max_size=2), st.integers(), st.integers(), NUMBERS), max_size=2)
SILENCES = {"id": st.sampled_from(["a", "z"]), "role": st.text("ab", max_size=6), "seconds": NUMBERS}
TIMES = {"seconds": NUMBERS, "usual_seconds": NUMBERS, "doing_seconds": NUMBERS, "unanswered": NUMBERS}
DETAIL = {"open": IDS, "following": IDS, "in_hand": IDS, "slices": SLICES, "finished": st.booleans()}
DETAIL |= {"slots": st.integers(), "running": st.integers(), "load": st.integers(), "url": st.just("u"), **TIMES}
DETAIL |= {"silent": st.lists(st.fixed_dictionaries(SILENCES), max_size=2), "ticket": st.none() | st.just("a")}
DETAIL |= {"doing": st.sampled_from(["", "the train step on batch 3", "the weight sync of version 1.2"])}
"""Fields of all roles but a gateway's; those of another role are passed on as unknown ones."""


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    beats = {}
    for number in range(draw(st.integers(0, 6))):
        role = draw(st.sampled_from(ROLES))
        state = draw(st.sampled_from(["starting", "working", "idle", "holding", "paused", "gone", "finished", "?"]))
        waits = draw(st.none() | st.tuples(st.text("ab", max_size=5), NUMBERS))
        detail = draw(st.fixed_dictionaries({}, optional={} if role == "gateway" else DETAIL))
        beats[f"{role}-{number}"] = (
            beat(role, f"{role}-{number}", state=state, waits=waits, detail=detail),
            draw(NUMBERS),
        )
    depths = st.dictionaries(st.sampled_from(["closed", "tasks.train"]), st.none() | st.integers(0, 9))
    shares = st.dictionaries(st.sampled_from(["trainer", "sync", "engine", "runner", "operator", "explorer"]), NUMBERS)
    return Observation(
        heartbeats=beats,
        depths=draw(depths),
        broker=draw(st.sampled_from(["", "refused"])),
        still=draw(NUMBERS),
        listened=draw(NUMBERS),
        expected=draw(st.dictionaries(st.sampled_from(ROLES), st.integers(0, 3))),
        busy=draw(shares),
        metrics=draw(st.dictionaries(st.sampled_from(["trainer/idle_frac", "time/batch", "time/sync"]), NUMBERS)),
    )


@given(observations())
def test_any_observation_gives_a_sentence_and_a_known_culprit(observation: Observation) -> None:
    found = diagnose(observation)
    assert found.sentence
    assert "\n" not in found.lever
    if found.state in {"moving", "over", "silent"}:
        assert found.culprit is None
    reported = {"a", "z"}  # ids in the explorer's list of silent agents
    assert found.culprit in {None, BROKER, *ROLES, *observation.heartbeats, *reported}
    limit = bottleneck(observation)
    assert limit is None or (limit.sentence and limit.lever)
    assert limit is None or all(0 <= share <= 1 for share in limit.busy.values())


LIMITS: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing is known": ({}, None),
    "trainer": ({"metrics": {"trainer/idle_frac": 0.05, "time/batch": 9.0, "time/sync": 0.1}}, "trainer"),
    "sync": ({"metrics": {"trainer/idle_frac": 0.1, "time/batch": 3.0, "time/sync": 4.0}}, "sync"),
    "operator": ({"busy": {"operator": 0.95, "trainer": 0.4}}, "operator"),
    "batches queue before operators": ({"busy": {"operator": 0.5}, "depths": {"closed": 3}}, "operator"),
    "engine": ({"busy": {"engine": 0.9, "runner": 1.0, "trainer": 0.1}}, "engine"),
    "runner": ({"busy": {"engine": 0.3, "runner": 0.95, "trainer": 0.1}}, "runner"),
    "pacing": ({"busy": {"engine": 0.3, "runner": 0.3, "trainer": 0.5, "explorer": 0.05}}, "explorer"),
    "sessions": (
        {"busy": {"trainer": 0.1}, "heartbeats": {"gateway-0": (beat("gateway", url="u", open=3), 0.5)}},
        "sessions",
    ),
    "balanced": ({"busy": {"engine": 0.5, "runner": 0.5, "trainer": 0.5, "explorer": 0.5}}, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_bottleneck(name: str) -> None:
    fields, stage = LIMITS[name]
    found = bottleneck(Observation(**fields))
    assert (found.stage if found else None) == stage

"""Each invariant finds what it is there for: a record that keeps it, and one that was tampered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import pytest

from trinity_mq.bus import Incoming
from trinity_mq.gateway.session import Body, Event
from trinity_mq.messages import (
    BatchReady,
    Progress,
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionReward,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
    TaskResult,
    Version,
)
from trinity_mq.messages.sessions import SampledChoice
from trinity_mq.proof.chaos.sessions.clients import ClientRequest, ClientSession, Traffic
from trinity_mq.proof.chaos.sessions.stream import SessionRecord
from trinity_mq.proof.chaos.sessions.verdicts import judge_sessions
from trinity_mq.proof.invariants import (
    Expected,
    FaultCounts,
    InvariantVerdict,
    dead_letters_explained,
    lineage,
    nothing_left,
    one_outcome,
    streams_decode,
    trained_once,
    versions_existed,
    versions_rise,
)
from trinity_mq.proof.record import ProcessedSet, Record, VersionSeen

BATCHES, TASKS, RUNS = 4, 3, 2
EXPECTED = Expected(tasks=TASKS)
Judge = Callable[[Record], InvariantVerdict]


def result(batch: int, task: int, attempt: str = "first", **more: Any) -> TaskResult:
    ids = {"batch": batch, "ticket": f"t{batch}", "task_id": task, "attempt": attempt, "parts": 1}
    return TaskResult(**{**ids, "repeat_times": RUNS, "outcome": "finished", "runs": list(range(RUNS)), **more})


def processed(batch: int, version: Version, *, first: bool = True, op: str = "op") -> ProcessedSet:
    runs = tuple((str(batch), str(task), run, 0) for task in range(TASKS) for run in range(RUNS))
    ready = BatchReady(batch=batch, ticket=f"t{batch}", op=op, chunks=1, experiences=len(runs))
    uids = tuple(f"{one}/{task}/{run}/{step}/{op}" for one, task, run, step in runs)
    return ProcessedSet(ready, batch, first, uids, runs, frozenset({version}))


def progress(number: int, generation: int = 1, **more: Any) -> Progress:
    ids = {"generation": generation, "step": number, "batch": number, "ticket": f"t{number}", "outcome": "trained"}
    return Progress(progress=number, **{**ids, **more})


@pytest.fixture
def record() -> Record:
    """Four batches; the trainer was killed after the third and went on from a checkpoint at the first."""
    return Record(
        results=[result(batch, task) for batch in range(1, BATCHES + 1) for task in range(TASKS)],
        sets=[processed(batch, (1 if batch < 4 else 2, batch - 1)) for batch in range(1, BATCHES + 1)],
        progress=[*(progress(number, 1) for number in (1, 2, 3)), *(progress(number, 2) for number in (2, 3, 4))],
    )


def test_what_a_later_generation_did_anew_counts_once(record: Record) -> None:
    assert [(one.generation, one.progress) for one in lineage(record.progress)] == [(1, 1), (2, 2), (2, 3), (2, 4)]
    repeated = [*record.progress, record.progress[-1]]
    assert lineage(repeated) == lineage(record.progress)


def test_a_sound_record_holds(record: Record) -> None:
    verdicts = [
        one_outcome(record, EXPECTED),
        trained_once(record),
        versions_rise(record, [], [], []),
        versions_existed(record),
        streams_decode(record),
    ]
    assert [verdict.result for verdict in verdicts] == ["holds"] * 5, verdicts
    assert verdicts[0].text == "12 tasks in 4 batches, 24 experiences"
    assert verdicts[1].text == "24 experiences in 4 batches, over 2 starts of the trainer"


def test_a_second_attempt_and_a_second_processing_are_no_second_outcome(record: Record) -> None:
    record.results.append(result(2, 1, "second"))
    record.sets.append(processed(2, (1, 1), first=False, op="again"))
    assert one_outcome(record, EXPECTED).result == "holds"
    assert trained_once(record).result == "holds"


def change(items: list[Any], place: int, **fields: object) -> None:
    before = items[place]
    items[place] = replace(before, **fields) if is_dataclass(before) else before.model_copy(update=fields)


def violated(verdict: InvariantVerdict, said: str) -> None:
    assert verdict.result == "violated", verdict
    assert any(said in line for line in verdict.evidence), verdict


def outcomes(record: Record) -> InvariantVerdict:
    return one_outcome(record, EXPECTED)


OVERLAPPING = result(2, 1, run_base=1, runs=[1], repeat_times=1)
TAMPERED: dict[str, tuple[Judge, Callable[[Record], object], str]] = {
    "a lost run": (
        outcomes,
        lambda record: change(record.sets, 1, runs=record.sets[1].runs[:-1], uids=record.sets[1].uids[:-1]),
        "batch 2: finished runs (task, run) that are not in it: ('2', 1)",
    ),
    "an unreported run": (
        outcomes,
        lambda record: change(record.sets, 1, runs=(*record.sets[1].runs, ("2", "9", 0, 0))),
        "no first result reports them: ('9', 0)",
    ),
    "no result": (outcomes, lambda record: record.results.pop(4), "batch 2: 2 tasks have an outcome, wanted 3"),
    "overlapping slices": (
        outcomes,
        lambda record: record.results.append(OVERLAPPING),
        "runs (task, run) that two slices report: ('1', 1)",
    ),
    "a result with too few runs": (
        outcomes,
        lambda record: change(record.results, 0, runs=[0]),
        "batch 1, task 0 from run 0: finished with 1 runs",
    ),
    "a batch trained on twice": (
        trained_once,
        lambda record: record.progress.append(progress(5, 2, batch=3, ticket="t3")),
        "ticket t3 was consumed 2 times",
    ),
    "an experience twice": (
        trained_once,
        lambda record: change(record.sets, 3, uids=(*record.sets[3].uids, record.sets[0].uids[0])),
        "experience 1/0/0/0/op is in 2 places",
    ),
    "a run twice": (
        trained_once,
        lambda record: change(record.sets, 2, runs=(*record.sets[2].runs, record.sets[2].runs[0])),
        "batch 3: task 0, run 0, step 0 is in it 2 times",
    ),
    "no set": (trained_once, lambda record: record.sets.pop(2), "batch 3 was trained on, and no complete set of it"),
    "a gap": (trained_once, lambda record: record.progress.pop(4), "progress without a message of the trainer: 3"),
    "a batch passed over": (
        trained_once,
        lambda record: change(record.progress, 5, batch=5, ticket="t5"),
        "batches that were skipped: 4",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_is_missing_or_double_is_found(record: Record, name: str) -> None:
    judge, tamper, said = TAMPERED[name]
    tamper(record)
    violated(judge(record), said)


def seen(*versions: Version, who: str = "trainer-0") -> list[VersionSeen]:
    return [VersionSeen(float(at), who, version) for at, version in enumerate(versions)]


def test_a_version_that_goes_back_is_found(record: Record) -> None:
    rising = seen((1, 1), (1, 1), (1, 3), (2, 1))
    assert versions_rise(record, rising, rising, rising).result == "holds"
    falling = seen((1, 1), (1, 3), (1, 2))
    violated(versions_rise(record, falling, [], []), "committed: 1.3 was followed by 1.2")
    violated(versions_rise(record, [], falling, []), "in the trainer's heartbeats")
    violated(versions_rise(record, [], [], seen((2, 1), (1, 9), who="engine-0 a/0")), "engine engine-0 serves")
    fresh_engine = [*seen((2, 1), who="engine-0 a/0"), *seen((1, 9), who="engine-0 a/1")]
    assert versions_rise(record, [], [], fresh_engine).result == "holds", "another life begins anew"
    record.progress.append(progress(4, 1))
    violated(versions_rise(record, [], [], []), "progress 4 of generation 1 was published after 4 of 2")


@pytest.mark.parametrize("version", [(1, 7), (3, 5), (2, 9)])
def test_a_version_that_no_trainer_had_is_found(record: Record, version: Version) -> None:
    change(record.sets, 3, versions=frozenset({(2, 3), version}))
    violated(versions_existed(record), f"batch 4 names version {version[0]}.{version[1]}, which no trainer had")


def letter(kind: str, deliveries: int, reason: str = "poisoned") -> Incoming:
    headers = {"kind": kind, "dead-reason": reason, "dead-deliveries": deliveries}
    return Incoming(body=b"", exchange="", routing_key="", queue="dead", message_id="m", headers=headers)


def test_dead_letters_are_explained_by_faults_or_named() -> None:
    many, few = FaultCounts({"runner": 4, "broker": 1, "trainer": 2}), FaultCounts({"runner": 3, "trainer": 1})
    assert dead_letters_explained([], 0, few, 5).text == "there is none"
    assert dead_letters_explained([letter("task_slice", 5), letter("batch_ready", 0)], 2, many, 5).result == "holds"
    violated(dead_letters_explained([letter("task_slice", 5)], 1, few, 5), "task_slice m: poisoned")
    violated(dead_letters_explained([letter("task_slice", 1)], 1, many, 5), "task_slice m")
    violated(dead_letters_explained([letter("batch_ready", 0)], 1, few, 5), "batch_ready m")
    violated(dead_letters_explained([letter("task_result", 0, "does not decode")], 1, many, 5), "does not decode")
    assert dead_letters_explained([], 3, many, 5).result == "not checked"


def test_what_is_left_and_what_cannot_be_read_is_found(record: Record) -> None:
    assert nothing_left([], over=True).result == "holds"
    violated(nothing_left(["process 7: python"], over=True), "process 7")
    assert nothing_left(None, over=False).result == "not checked"
    record.undecodable.append("offset 3: torn")
    violated(streams_decode(record), "offset 3: torn")


def test_what_retention_has_cut_is_not_called_lost(record: Record) -> None:
    record.results_begin = record.ready_begin = 100
    del record.sets[0], record.progress[0]
    assert one_outcome(record, EXPECTED).result == "not checked"
    assert versions_existed(record).result == "not checked"
    assert trained_once(record).result == "holds"


TWICE = "no session trained on twice"
DECIDED = "one decision about each session"
COUNT = "recorded sessions are trained on"
ANSWERS = "answers trained on once"
TRUTH = "answers to clients match the stream"
WAITS = "every session is settled"
LOST = "call-lost"


class Scene:
    """Two sessions: ``a`` asked twice and was trained on in batch 1, ``b`` repeated a request, in batch 2."""

    def __init__(self) -> None:
        self.sessions, self.traffic = SessionRecord(), Traffic()
        self.offset = 0
        self.record = Record()
        self.session("a", [("a0", [5, 6]), ("a1", [7])], 1, told=("a0", "a1"))
        # the answer of b's first try was recorded too; its client only knows that of the second
        self.session("b", [(LOST, [5]), ("b0", [8])], 2, told=("b0",), repeats=LOST)

    def session(
        self, name: str, answers: list[tuple[str, list[int]]], number: int, *, told: tuple[str, ...], repeats: str = ""
    ) -> None:
        self.say(SessionOpened(session=name, opened=0.0, idle_ttl=60, reward_ttl=60))
        for call, ids in answers:
            self.call(name, call, ids, repeats if call in told else "")
        self.say(SessionReward(session=name, reward=0.5))
        self.say(SessionEnd(session=name))
        self.decide(SessionsDecided(sessions=[name], submission=f"s-{name}"))
        self.outcome(name, number, "finished", 1)
        trained = [(name, (1, 2, *ids)) for call, ids in answers if call in told]
        ready = BatchReady(batch=number, ticket=f"t{number}", op="op", chunks=1, experiences=len(trained))
        self.record.sets.append(ProcessedSet(ready, number, is_first=True, sessions=tuple(trained)))
        self.record.progress.append(progress(number))
        self.tell(name, *told)

    def tell(self, name: str, *calls: str) -> None:
        """Have a client know of a session with these answers."""
        asked = [recorded(call) for call in calls]
        self.traffic.sessions.append(ClientSession(name, "k", asked=asked, reward=0.5, rewarded=True, ended=True))

    def call(self, session: str, call: str, ids: list[int], supersedes: str = "") -> None:
        choice = SampledChoice(ids=ids, logprobs=[0.0] * len(ids))
        made = SessionCall(session=session, call=call, at=0.0, prompt=[1, 2], choices=[choice], supersedes=supersedes)
        self.sessions.calls[session][call] = made
        self.say(made)

    def outcome(self, name: str, number: int, outcome: str, runs: int, message: str = "") -> None:
        fields = {"batch": number, "ticket": f"t{number}", "outcome": outcome, "completed_runs": runs}
        self.sessions.ledger.apply_outcome(SubmissionOutcome(submission_id=f"s-{name}", message=message, **fields))
        if runs:
            trained = SessionsTrained(ticket=f"t{number}", outcome="trained", generation=1, step=number)
            self.sessions.ledger.apply_trained(trained)

    def say(self, body: Body) -> None:
        self.offset += 1
        self.sessions.ledger.apply(Event(self.offset, 0, f"m{self.offset}", 0.0, body, 1))

    def decide(self, decided: SessionsDecided) -> None:
        self.sessions.decisions.append(decided)
        self.say(decided)

    def trained(self, number: int, *more: tuple[str, tuple[int, ...]]) -> None:
        """Add experiences to a batch."""
        change(self.record.sets, number - 1, sessions=(*self.record.sets[number - 1].sessions, *more))

    def verdicts(self) -> dict[str, InvariantVerdict]:
        return {one.name: one for one in judge_sessions(self.traffic, self.sessions, self.record)}


def told(scene: Scene, name: str) -> ClientSession:
    return next(one for one in scene.traffic.sessions if one.id == name)


def test_all_hold_of_sessions_that_count_once() -> None:
    found = Scene().verdicts()
    assert {one.result for one in found.values()} == {"holds"}, found
    assert list(found) == [TWICE, DECIDED, COUNT, ANSWERS, TRUTH, WAITS]
    assert found[COUNT].text == "2 of 2 rewarded sessions"
    assert found[ANSWERS].text == "3 answers"


def recorded(call: str) -> ClientRequest:
    return ClientRequest(tries=1, call=call, recorded="yes")


def answer_left_out(scene: Scene) -> None:
    scene.call("a", "a2", [9])
    told(scene, "a").asked.append(recorded("a2"))


def lost_batch(scene: Scene) -> None:
    """The batch was passed over and the ledger says trained: nobody says why it was not."""
    scene.record.progress[1] = progress(2, outcome="skipped")


def other_reward(scene: Scene) -> None:
    told(scene, "a").reward = 0.75


def unrewarded_was_trained_on(scene: Scene) -> None:
    told(scene, "a").rewarded, told(scene, "a").reward = False, None


def ended(scene: Scene, name: str, **decision: object) -> None:
    """Have a further session asked, rewarded and decided upon."""
    scene.say(SessionOpened(session=name, opened=0.0, idle_ttl=60, reward_ttl=60))
    scene.call(name, f"{name}0", [9])
    scene.say(SessionEnd(session=name, reward=0.5))
    scene.decide(SessionsDecided(sessions=[name], **decision))  # type: ignore[arg-type]
    scene.tell(name, f"{name}0")


FAULTS: dict[str, tuple[Callable[[Scene], object], str, str]] = {
    "in two batches": (
        lambda scene: scene.trained(2, ("a", (1, 2, 7))),
        TWICE,
        "session a is in 2 batches that were trained on: t1, t2",
    ),
    "trained and unknown": (
        lambda scene: scene.trained(2, ("c", (1, 2, 7))),
        TWICE,
        "session c was trained on, and the ledger says that it is unknown",
    ),
    "two decisions": (
        lambda scene: scene.decide(SessionsDecided(sessions=["a", "c"], submission="s-other")),
        DECIDED,
        "session a has 2 decisions",
    ),
    "a lost batch": (lost_batch, COUNT, "session b: it is trained"),
    "the lost answer too": (
        lambda scene: scene.trained(2, ("b", (1, 2, 5))),
        ANSWERS,
        f"session b: answers {LOST} are trained on 1 times, wanted 0",
    ),
    "an answer twice": (
        lambda scene: scene.trained(2, ("b", (1, 2, 8))),
        ANSWERS,
        "session b: answers b0 are trained on 2 times, wanted 1",
    ),
    "an answer left out": (answer_left_out, ANSWERS, "session a: a recorded answer is not among what was trained on"),
    "an answer vanished": (
        lambda scene: told(scene, "a").asked.append(recorded("a2")),
        TRUTH,
        "session a: answer a2 was reported as recorded and is not on the stream",
    ),
    "another reward": (other_reward, TRUTH, "session a: reward 0.75 was accepted, the stream says 0.5"),
    "an unknown session": (
        lambda scene: scene.traffic.sessions.append(ClientSession("c", "k")),
        TRUTH,
        "session c was opened and is not on the stream",
    ),
    "a refused request": (
        lambda scene: scene.traffic.refused.append("session a, end: 500"),
        TRUTH,
        "session a, end: 500",
    ),
    "no reward": (
        unrewarded_was_trained_on,
        COUNT,
        "session a was trained on, though it was discarded or has no reward",
    ),
    "queued for ever": (lambda scene: ended(scene, "c", submission="s-c"), WAITS, "session c: it is queued"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_finds_what_it_is_there_for(fault: str) -> None:
    tamper, name, said = FAULTS[fault]
    scene = Scene()
    tamper(scene)
    verdict = scene.verdicts()[name]
    assert verdict.result == "violated"
    assert said in verdict.evidence[0]


def test_a_session_whose_batch_says_why_is_left_out_and_counted() -> None:
    scene = Scene()
    ended(scene, "c", submission="s-c")
    scene.outcome("c", 3, "failed", 0, "its task was poisoned")
    found = scene.verdicts()
    assert {one.result for one in found.values()} == {"holds"}, found
    assert found[COUNT].text == "2 of 3 rewarded sessions, 1 left out: its task was poisoned"


def test_a_decision_that_contradicts_what_the_client_was_told_is_no_reason() -> None:
    scene = Scene()
    ended(scene, "c", dropped="no reward", reason="no reward came within 60 s")
    [line] = scene.verdicts()[COUNT].evidence
    assert line == "session c: it is dropped (no reward came within 60 s)"


def test_what_a_client_cannot_know_is_not_judged() -> None:
    scene = Scene()
    other_reward(scene)
    told(scene, "a").unsure.append("end")
    assert scene.verdicts()[TRUTH].result == "holds"


def test_without_clients_of_ours_the_streams_are_judged_and_nothing_else() -> None:
    scene = Scene()
    scene.trained(2, ("a", (1, 2, 7)))
    found = {one.name: one.result for one in judge_sessions(None, scene.sessions, scene.record)}
    assert found == {
        TWICE: "violated",
        DECIDED: "holds",
        COUNT: "not checked",
        ANSWERS: "not checked",
        TRUTH: "not checked",
        WAITS: "not checked",
    }

"""Each invariant of sessions finds what it is there for: records that keep it, and ones that were tampered with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
)
from trinity_mq.messages.sessions import SampledChoice
from trinity_mq.proof.chaos.sessions.clients import ClientRequest, ClientSession, Traffic
from trinity_mq.proof.chaos.sessions.stream import SessionRecord
from trinity_mq.proof.chaos.sessions.verdicts import judge_sessions
from trinity_mq.proof.invariants import InvariantVerdict
from trinity_mq.proof.record import ProcessedSet, Record

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
        self.session("a", [("a0", [5, 6]), ("a1", [7])], told=("a0", "a1"), number=1)
        # the answer of b's first try was recorded too; its client only knows that of the second
        self.session("b", [(LOST, [5]), ("b0", [8])], told=("b0",), number=2, supersedes={"b0": LOST})

    def session(
        self,
        name: str,
        answers: list[tuple[str, list[int]]],
        *,
        told: tuple[str, ...],
        number: int,
        supersedes: dict[str, str] | None = None,
    ) -> None:
        self.say(SessionOpened(session=name, opened=0.0, idle_ttl=60, reward_ttl=60))
        for call, ids in answers:
            self.call(name, call, ids, (supersedes or {}).get(call, ""))
        self.say(SessionReward(session=name, reward=0.5))
        self.say(SessionEnd(session=name))
        self.decide(SessionsDecided(sessions=[name], submission=f"s-{name}"))
        self.outcome(name, number)
        ticket = f"t{number}"
        trained = [(name, (1, 2, *ids)) for call, ids in answers if call in told]
        ready = BatchReady(batch=number, ticket=ticket, op="op", chunks=1, experiences=len(trained))
        self.record.sets.append(ProcessedSet(ready, number, is_first=True, sessions=tuple(trained)))
        self.record.progress.append(progress(number))
        asked = [recorded(call) for call in told]
        self.traffic.sessions.append(ClientSession(name, "k", asked=asked, reward=0.5, rewarded=True, ended=True))

    def call(self, session: str, call: str, ids: list[int], supersedes: str = "") -> None:
        choice = SampledChoice(ids=ids, logprobs=[0.0] * len(ids))
        made = SessionCall(session=session, call=call, at=0.0, prompt=[1, 2], choices=[choice], supersedes=supersedes)
        self.sessions.calls[session][call] = made
        self.say(made)

    def outcome(self, name: str, number: int) -> None:
        ledger, ticket = self.sessions.ledger, f"t{number}"
        ledger.apply_outcome(
            SubmissionOutcome(
                submission_id=f"s-{name}", batch=number, ticket=ticket, outcome="finished", completed_runs=1
            )
        )
        ledger.apply_trained(SessionsTrained(ticket=ticket, outcome="trained", generation=1, step=number))

    def say(self, body: Body) -> None:
        self.offset += 1
        self.sessions.ledger.apply(Event(self.offset, 0, f"m{self.offset}", 0.0, body, 1))

    def decide(self, decided: SessionsDecided) -> None:
        self.sessions.decisions.append(decided)
        self.say(decided)

    def trained(self, number: int, *more: tuple[str, tuple[int, ...]]) -> None:
        """Add experiences to a batch."""
        before = self.record.sets[number - 1]
        self.record.sets[number - 1] = ProcessedSet(
            before.ready, before.offset, is_first=True, sessions=(*before.sessions, *more)
        )

    def verdicts(self) -> dict[str, InvariantVerdict]:
        return {one.name: one for one in judge_sessions(self.traffic, self.sessions, self.record)}


def progress(number: int, outcome: str = "trained") -> Progress:
    return Progress(
        progress=number, generation=1, step=number, batch=number, ticket=f"t{number}", outcome=outcome, reason=""
    )


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
    scene.record.progress[1] = progress(2, "skipped")


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
    asked = [recorded(f"{name}0")]
    scene.traffic.sessions.append(ClientSession(name, "k", asked=asked, reward=0.5, rewarded=True, ended=True))


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
    outcome = SubmissionOutcome(
        submission_id="s-c", batch=3, ticket="t3", outcome="failed", completed_runs=0, message="its task was poisoned"
    )
    scene.sessions.ledger.apply_outcome(outcome)
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

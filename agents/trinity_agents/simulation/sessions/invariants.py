"""Invariants of a run with sessions: the reports of its gateways, its users and its trainer on each session must
agree.

The sessions are also computed here from the whole log of their stream, by the rules of docs/protocol.md and
docs/serving.md and without the library's code, except for :func:`superseded_calls`. The gateways, which read only the
part of the log that retention has left, must have the same sessions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trinity_agents.simulation import invariants
from trinity_agents.simulation.invariants import Evidence, Faults
from trinity_agents.simulation.schedule import BrokerRestart, ConnectionLoss, Freeze
from trinity_agents.simulation.sessions.gateways import answer_number, token_version
from trinity_agents.simulation.sessions.run import SessionRun
from trinity_agents.simulation.sessions.users import SessionDiary, UserRequest
from trinity_agents.trainer.history import HistoryError
from trinity_mq.bus.memory.queues import Stored
from trinity_mq.experience import Experience
from trinity_mq.gateway.lineages import superseded_calls
from trinity_mq.messages import (
    DecodeError,
    Message,
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionReward,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
    decode,
    decode_any,
)

OF_SESSIONS = {"session_call", "session_reward", "session_end", "sessions_decided"}
"""Kinds of events that a session may refuse."""

OUTSIDE: Mapping[str, type[Message]] = {"session_reward": SessionReward, "session_end": SessionEnd}
"""Kinds of events that programs other than gateways may publish."""
Event = SessionCall | SessionReward | SessionEnd


class SessionEvidence(Evidence):
    """Evidence of a run with sessions."""

    run: SessionRun

    @cached_property
    def oracle(self) -> Oracle:
        """The sessions computed from the whole log."""
        return Oracle(self.run.log())

    @cached_property
    def learned(self) -> list[Experience]:
        """Experiences that the final checkpoint was trained on, one entry for each time. Empty if the history has a
        gap.
        """
        try:
            uids = Counter(uid for entry in self.history for uid in invariants.uids_of(entry))
        except HistoryError:
            return []  # trained_once reports this error
        all_experiences = [experience for _, experiences in self.processed.values() for experience in experiences]
        return [experience for experience in all_experiences for _ in range(uids[experience.eid.uid])]

    @cached_property
    def answers(self) -> Mapping[int, list[float]]:
        """Rewards with which an answer was trained on, one for each time, by answer number."""
        rewards: defaultdict[int, list[float]] = defaultdict(list)
        for experience in self.learned:
            for number in sorted({answer_number(token) for token, _ in invariants.sampled(experience)}):
                rewards[number].append(float(experience.reward or 0.0))
        return dict(rewards)

    @cached_property
    def tickets_consumed_late(self) -> set[str]:
        """Tickets consumed so late that the gateways may have ended before they published the result."""
        return {ticket for ticket, at in self.run.consumed_at.items() if at >= self.run.acted_until}

    @cached_property
    def requests(self) -> list[tuple[SessionDiary, UserRequest]]:
        """Every request that users made in sessions, with the session's diary."""
        users = self.run.users
        return [] if users is None else [(diary, asked) for diary in users.diaries for asked in diary.asked]


def sessions_settle(evidence: SessionEvidence) -> Faults:
    """Check that each session of a user settles, unless the run ended before.

    A gateway that was away for longer than the stream's retention does not know sessions that settled before.
    """
    waiting = [name for name in evidence.run.unsettled if not _is_settled(evidence, name)]
    if waiting:
        states = {name: evidence.oracle.sessions[name].state for name in waiting if name in evidence.oracle.sessions}
        yield f"sessions that were not settled in time: {states or waiting}"
    for session in evidence.oracle.sessions.values():
        if session.path[-1] == "queued" and not evidence.run.ended_before(session.decided_at):
            yield f"session {session.id} is queued for ever"


def _is_settled(evidence: SessionEvidence, name: str) -> bool:
    return name in evidence.oracle.sessions and evidence.oracle.sessions[name].is_settled


def sessions_decided_once(evidence: SessionEvidence) -> Faults:
    """Check that each session has at most one decision, and that the sessions of one decision are of one group and fit
    into it.
    """
    for name, members in evidence.oracle.tasks.items():
        decided = members[0].decided
        assert decided is not None
        if sorted(decided.sessions) != sorted(member.id for member in members):
            yield f"{name} was decided about {decided.sessions}, and is of {[member.id for member in members]}"
        if len({member.opened.group for member in members}) > 1 or (len(members) > 1 and not members[0].opened.group):
            yield (
                f"{name} compares sessions of other groups: {[(member.id, member.opened.group) for member in members]}"
            )
        if len(members) > members[0].opened.group_size:
            yield f"{name} has {len(members)} sessions, a group {members[0].opened.group_size}"


def gateways_agree(evidence: SessionEvidence) -> Faults:
    """Check that each gateway that ended by itself has the session states that the whole event log implies.

    The reward of a settled session may be missing after retention has cut the stream.
    """
    log = evidence.run.log()
    for gateway in evidence.run.gateways_at_end:
        store = gateway.store
        if store is None or not store.is_ready():
            continue
        oracle = Oracle(log[: evidence.run.read_offset(gateway)])
        for expected in oracle.sessions.values():
            session = store.ledger.get(expected.id)
            if session is None:
                if not expected.is_settled:
                    yield f"{gateway.life.who} does not know session {expected.id}, which is {expected.state}"
                continue
            if session.lost and expected.is_settled:
                continue  # the gateway reports the state of this session as lost
            may_miss_reward = expected.is_settled and evidence.run.is_cut
            if session.state != expected.state or (session.reward != expected.reward and not may_miss_reward):
                yield (
                    f"{gateway.life.who} has session {expected.id} as {session.state} with reward {session.reward}, it "
                    f"is {expected.state} with {expected.reward} ({' > '.join(expected.path)})"
                )


def trained_as_decided(evidence: SessionEvidence) -> Faults:
    """Check that a trained session was trained on with each of its answers once, with the answer's reward.

    No other session was trained on, and each dropped session has a reason.
    """
    for session in evidence.oracle.sessions.values():
        trained = {number: evidence.answers[number] for number in _numbers(session) if number in evidence.answers}
        if session.state == "trained":
            expected = {number: [worth] for number, worth in session.worth.items()}
            if {number: sorted(rewards) for number, rewards in trained.items()} != _merged(evidence, expected):
                yield f"session {session.id} was trained on as {trained}, wanted {expected}"
        elif trained and not (
            session.state == "batched" and session.batch and session.batch.ticket in evidence.tickets_consumed_late
        ):
            yield f"session {session.id} is {session.state}, and was trained on: {trained}"
    unknown = set(evidence.answers) - {
        number for session in evidence.oracle.sessions.values() for number in _numbers(session)
    }
    if unknown:
        yield f"answers {sorted(unknown)} were trained on, and belong to no session"
    for gateway in evidence.run.gateways_at_end:
        for entry in () if gateway.store is None else gateway.store.ledger:
            if entry.state == "dropped" and not entry.why:
                yield f"{gateway.life.who} does not say why session {entry.id} was dropped"


def _numbers(session: OracleSession) -> list[int]:
    return [answer_number(call.choices[0].ids[0]) for call in session.calls.values()]


def _merged(evidence: SessionEvidence, expected: Mapping[int, list[float]]) -> Mapping[int, list[float]]:
    """Return the expected rewards with merged turns taken into account: each answer of a merged experience has the
    reward of the last answer.
    """
    merged = dict(expected)
    for experience in evidence.learned:
        numbers = list(dict.fromkeys(answer_number(token) for token, _ in invariants.sampled(experience)))
        if numbers[-1] in expected:
            merged |= {number: expected[numbers[-1]] for number in numbers if number in expected}
    return merged


def requests_trained_once(evidence: SessionEvidence) -> Faults:
    """Check that at most one answer to a repeated request is trained on. If the client received an answer, no other
    answer may be trained on. Of several equal requests that were sent at once, each may have one trained answer.

    An answer that arrived marked as recorded must be trained on if its session was.
    """
    for diary, asked in evidence.requests:
        trained = [number for number in evidence.run.clients.answers[asked.text] if number in evidence.answers]
        subject = f"session {diary.id}: {asked.text}, made {asked.tries} times,"
        if len(trained) > asked.equal:
            yield f"{subject} was trained on with the answers {trained}"
        if asked.equal == 1 and asked.answers and set(trained) - set(asked.answers):
            yield f"{subject} was answered with {list(asked.answers)}, trained on was {trained}"
        session = evidence.oracle.sessions.get(diary.id)
        if session is None or session.state != "trained" or session.reward is None:
            continue
        lost = [
            number for number, recorded in asked.answers.items() if recorded == "yes" and number not in evidence.answers
        ]
        # with equal requests, a later try may count as a repetition of the other request
        if lost and asked.tries == asked.equal and not (asked.is_repeated and asked.equal > 1):
            yield f"{subject} was answered with {lost} as recorded, which was not trained on"


def rewards_as_accepted(evidence: SessionEvidence) -> Faults:
    """Check that rewards reported as accepted were taken, and that refused rewards were not.

    Each created session is on the stream, except the session of a single call whose answer was marked as not recorded.
    """
    for diary in () if evidence.run.users is None else evidence.run.users.diaries:
        session = evidence.oracle.sessions.get(diary.id)
        if session is None:
            if diary.is_kept:
                yield f"session {diary.id} was made, and is not on the stream"
            continue
        for sent in diary.rewards:
            if sent.accepted is True and sent.reward not in session.accepted:
                yield f"session {diary.id}: reward {sent.reward} was accepted, taken were {session.accepted}"
            if sent.accepted is False and sent.reward in session.accepted:
                yield f"session {diary.id}: reward {sent.reward} was refused, and taken"


def refused_events_dead_lettered(evidence: SessionEvidence) -> Faults:
    """Check that each refused event of an external program is a dead letter, and that no accepted session event is.
    Nothing is checked if a session was not settled in time or no gateway ended by itself.
    """
    refused = {name for name, _, _ in evidence.oracle.refused}
    outside = {name for name, _, key in evidence.oracle.refused if key == "session"}
    dead = {str(stored.message_id) for stored in evidence.run.waiting_in("dead")}
    dead_of_sessions = {
        str(stored.message_id)
        for stored in evidence.run.waiting_in("dead")
        if stored.headers.get("kind") in OF_SESSIONS
    }
    if evidence.run.unsettled or evidence.run.no_gateway_finished:
        return
    late = {str(stored.message_id) for stored in evidence.run.log() if evidence.run.ended_before(stored.offset or 0)}
    if lost := sorted(name for name in outside - late if not any(name in dead_id for dead_id in dead)):
        yield f"refused, and no dead letters: {lost}"
    if unexpected := sorted(dead_id for dead_id in dead_of_sessions if not any(name in dead_id for name in refused)):
        yield f"dead letters though a session took them: {unexpected}"


def only_lock_holder_acts(evidence: SessionEvidence) -> Faults:
    """Check that only a gateway that has held the lock decides and submits."""
    yield from evidence.run.unlocked


def each_task_submitted_once(evidence: SessionEvidence) -> Faults:
    """Check that a life of a gateway submits a task at most once, and once more for each fault that may cost gateways
    the connection and for each 600 seconds of the run.
    """
    losses = sum(
        isinstance(fault, BrokerRestart) or (isinstance(fault, ConnectionLoss | Freeze) and fault.role == "gateway")
        for fault in evidence.run.schedule.faults
    )
    for (who, name), times in evidence.run.submitted.items():
        if times > 1 + losses + evidence.run.seconds // 600:
            yield f"{who} submitted {name} {times} times"


def batch_is_its_sessions(evidence: SessionEvidence) -> Faults:
    """Check that the deciding set of a batch holds experiences of all rollout runs in its manifest, and of no other
    runs.
    """
    least = evidence.run.config.algorithm.effective_min_group_runs if evidence.run.sessions.grouped else 1
    yield from invariants.as_in_manifest(evidence, least, once=False)


def tokens_of_their_weights(evidence: SessionEvidence) -> Faults:
    """Check that each token of an answer was sampled by the weights that its experience names."""
    yield from invariants.tokens_of_their_weights(evidence, token_version)


def dead_letters_accounted_for(evidence: SessionEvidence) -> Faults:
    """Check that ``dead`` holds only events of sessions, poisoned slices, and batches given up or skipped."""
    yield from invariants.dead_letters_accounted_for(evidence, OF_SESSIONS)


SESSION_INVARIANTS: Mapping[str, Callable[[SessionEvidence], Faults]] = {
    "the run is over": invariants.run_is_over,
    "no task is left": invariants.no_asyncio_task_left,
    "sessions settle": sessions_settle,
    "sessions are decided once": sessions_decided_once,
    "gateways agree": gateways_agree,
    "only one gateway acts": only_lock_holder_acts,
    "few copies are submitted": each_task_submitted_once,
    "requests are trained on once": requests_trained_once,
    "rewards as accepted": rewards_as_accepted,
    "trained as decided": trained_as_decided,
    "refused events are dead letters": refused_events_dead_lettered,
    "one manifest a batch": invariants.one_manifest,
    "a batch is its sessions": batch_is_its_sessions,
    "trained on once": invariants.trained_once,
    "tokens of the weights they name": tokens_of_their_weights,
    "versions in order": invariants.versions_in_order,
    "dead letters accounted for": dead_letters_accounted_for,
    "queues are empty": invariants.queues_are_empty,
}
"""Invariant checks by name, in the order of checking."""


def session_violations(evidence: SessionEvidence) -> list[tuple[str, str]]:
    """Return the violations, as :func:`trinity_agents.simulation.invariants.violations` does."""
    return [(name, text) for name, check in SESSION_INVARIANTS.items() for text in check(evidence)]


def note_sessions(evidence: SessionEvidence) -> None:
    """Record, for the coverage, the states that sessions passed through and the incidents of their events."""
    note, oracle = evidence.run.observer.note, evidence.oracle
    for session in oracle.sessions.values():
        for before, after in zip(("", *session.path), session.path, strict=False):
            note("session", before, after)
    calls = [call for session in oracle.sessions.values() for call in session.calls.values()]
    acting = [gateway.life.who for gateway in evidence.run.gateways if gateway.lock is not None]
    for incident, happened in (
        ("published again", oracle.copies),
        ("refused", oracle.refused),
        ("cut by retention", evidence.run.is_cut),
        ("answer superseded", any(call.supersedes for call in calls)),
        ("call not received", any(not asked.answers for _, asked in evidence.requests)),
        ("decided twice", oracle.contradictions),
        ("acted after another", len(acting) > 1),
    ):
        if happened:
            note("events of sessions", "", incident)


@dataclass
class OracleSession:
    """A session, computed from the events about it."""

    id: str
    opened: SessionOpened
    began: int
    """Offset of the event that opened the session."""
    calls: dict[str, SessionCall] = field(default_factory=dict)
    reward: float | None = None
    call_rewards: dict[str, float] = field(default_factory=dict)
    accepted: list[float] = field(default_factory=list)
    """Accepted rewards in order."""
    ends: list[str] = field(default_factory=list)
    """Outcomes of its end events in order."""
    decided: SessionsDecided | None = None
    decided_at: int = -1
    batch: SubmissionOutcome | None = None
    trained: SessionsTrained | None = None
    path: list[str] = field(default_factory=lambda: ["open"])
    """States of the session so far, in order."""

    @property
    def state(self) -> str:
        """State of the session, named as in docs/serving.md."""
        if self.trained is not None and self.trained.outcome == "trained":
            return "trained"
        if self.decided is not None and not self.decided.submission:
            return "evaluated" if self.decided.dropped == "evaluation" else "dropped"
        if self.trained is not None or (self.batch is not None and not self.batch.completed_runs):
            return "dropped"
        if self.decided is not None:
            return "queued" if self.batch is None else "batched"
        return "parked" if self.ends else "open"

    @property
    def is_settled(self) -> bool:
        """True if the session's state is final."""
        return self.state in {"trained", "evaluated", "dropped"}

    @property
    def worth(self) -> dict[int, float]:
        """Rewards with which the answers must be trained on, by answer number."""
        # superseded_calls is the library's own code; tests/unit/gateway/test_repeats.py tests it
        superseded = superseded_calls(list(self.calls.values()))
        kept = [call for name, call in self.calls.items() if name not in superseded]
        place_of = {call.call: place for place, call in enumerate(kept)}
        begun = [call.began or earlier for call, earlier in zip(kept, [0.0, *(call.at for call in kept)], strict=False)]
        parents = [place_of.get(self._continued(call, superseded)) for call in kept]
        roots: list[int] = []
        for place, parent in enumerate(parents):
            roots.append(place if parent is None else roots[parent])

        def follower(root: int) -> int | None:
            """Return the place of the call that follows the tree of calls with this root, as docs/serving.md defines
            it; None if no call follows.
            """
            members = [place for place in range(len(kept)) if roots[place] == root]
            end = max(kept[place].at for place in members)
            later = [place for place in range(members[-1] + 1, len(kept)) if begun[place] >= end]
            for place in later:
                parent = parents[place]
                if parent is not None and kept[parent].at <= begun[root] and roots[parent] != root:
                    return place
            return next((place for place in later if parents[place] is None), None)

        worth: list[float | None] = [None] * len(kept)
        for place in reversed(range(len(kept))):
            following = next((n for n, parent in enumerate(parents) if parent == place), None)
            if following is None:
                following = follower(roots[place])
            worth[place] = self.call_rewards.get(
                kept[place].call, self.reward if following is None else worth[following]
            )
        return {
            answer_number(call.choices[0].ids[0]): reward
            for call, reward in zip(kept, worth, strict=True)
            if reward is not None
        }

    def _continued(self, call: SessionCall, superseded: Collection[str]) -> str:
        """Return the id of the kept call that ``call`` continues, or an empty text. A client that received both answers
        to a repeated request may continue the replaced answer. Then ``call`` continues the same call as that answer.
        """
        name = call.continues
        while name in superseded and name in self.calls:
            name = self.calls[name].continues
        return name

    def refuses(self, body: Event) -> bool:
        """Return whether the session refuses an event: it is too late, repeats an end, or names an unknown call."""
        if self.decided is not None:
            return True
        if isinstance(body, SessionEnd) and self.ends:
            if body.outcome == "discard":
                return False
            is_news = body.outcome == "done" == self.ends[-1] and body.reward is not None and self.reward is None
            return not is_news
        return isinstance(body, SessionReward) and isinstance(body.call, str) and body.call not in self.calls

    def take(self, body: Event) -> None:
        """Apply an event."""
        if isinstance(body, SessionCall):
            self.calls.setdefault(body.call, body)
            self._end("done", unless=not self.opened.ended)
        elif isinstance(body, SessionEnd):
            if body.reward is not None:
                self._rewarded(body.reward)
            self._end(body.outcome, unless=bool(self.ends) and body.outcome != "discard")
        elif body.call is not None:
            self.call_rewards[str(body.call)] = body.reward
            self.accepted.append(body.reward)
        else:
            self._rewarded(body.reward + (self.reward or 0.0) if body.how == "add" else body.reward, amount=body.reward)
            self._end("done", unless=not body.final)

    def _rewarded(self, reward: float, amount: float | None = None) -> None:
        self.reward = reward
        self.accepted.append(reward if amount is None else amount)

    def _end(self, outcome: str, *, unless: bool) -> None:
        if not unless and not (self.ends and outcome == "done"):
            self.ends.append(outcome)


class Oracle:
    """The sessions of a run, computed from the log of their stream.

    Args:
        log: Messages of the stream in order, from its beginning.
    """

    def __init__(self, log: Iterable[Stored]) -> None:
        self.sessions: dict[str, OracleSession] = {}
        self.refused: list[tuple[str, str, str]] = []
        """(message id, kind, routing key) of each event that no session took."""
        self.contradictions: list[str] = []
        """Descriptions of repeated decisions about a session."""
        self.copies = 0
        """Number of messages that repeat an earlier message."""
        self._known: set[tuple[str, bool]] = set()
        """(message id, whether an external program chose the id) of each message."""
        self._early: dict[str, list[tuple[Stored, Event]]] = {}
        """Events of sessions that are not open yet, by session."""
        self._trained: dict[str, SessionsTrained] = {}
        for stored in log:
            self._read(stored)
        for waiting in self._early.values():
            self.refused += [_named(stored) for stored, _ in waiting]

    def _read(self, stored: Stored) -> None:
        try:
            body = _decoded(stored)
        except DecodeError:
            self.refused.append(_named(stored))
            return
        if stored.routing_key == "session" and body.kind not in OUTSIDE:
            self.refused.append(_named(stored))
            return
        name = str(stored.message_id), "session" in (stored.routing_key, stored.headers.get("by"))
        if name in self._known:
            self.copies += 1
            return
        self._known.add(name)
        self._apply(stored, body)
        for session in self.sessions.values():
            if session.state != session.path[-1]:
                session.path.append(session.state)

    def _apply(self, stored: Stored, body: Message) -> None:
        match body:
            case SessionOpened():
                opened = self.sessions[body.session] = OracleSession(body.session, body, stored.offset or 0)
                for early, event in self._early.pop(opened.id, ()):
                    self._event(early, event)
            case SessionCall() | SessionReward() | SessionEnd():
                self._event(stored, body)
            case SessionsDecided():
                self._decided(stored, body)
            case SubmissionOutcome():
                for session in self._of_submission(body.submission_id):
                    session.batch = session.batch or body
                    session.trained = session.trained or self._trained.get(session.batch.ticket)
            case SessionsTrained():
                self._trained[body.ticket] = body
                for session in self.sessions.values():
                    if session.batch is not None and session.batch.ticket == body.ticket:
                        session.trained = body
            case _:
                pass

    def _event(self, stored: Stored, body: Event) -> None:
        session = self.sessions.get(body.session)
        if session is None:
            self._early.setdefault(body.session, []).append((stored, body))
        elif session.refuses(body):
            self.refused.append(_named(stored))
        else:
            session.take(body)

    def _decided(self, stored: Stored, body: SessionsDecided) -> None:
        """Apply a decision. If any of its sessions is already decided, the whole decision is ignored."""
        members = [self.sessions[name] for name in body.sessions]
        if already_decided := [member.id for member in members if member.decided is not None]:
            self.contradictions.append(f"{already_decided} were decided before {body}")
            return
        for member in members:
            member.decided, member.decided_at = body, stored.offset or 0

    def _of_submission(self, submission: str) -> list[OracleSession]:
        return [
            session
            for session in self.sessions.values()
            if session.decided and session.decided.submission == submission
        ]

    @property
    def tasks(self) -> Mapping[str, list[OracleSession]]:
        """Sessions that became a task, by submission id."""
        by_submission: dict[str, list[OracleSession]] = {}
        for session in self.sessions.values():
            if session.decided is not None and session.decided.submission:
                by_submission.setdefault(session.decided.submission, []).append(session)
        return by_submission


def _decoded(stored: Stored) -> Message:
    kind = OUTSIDE.get(str(stored.headers.get("kind")))
    if kind is not None:
        return decode(stored.body, kind, stored.content_type)
    return decode_any(stored.body, stored.content_type)


def _named(stored: Stored) -> tuple[str, str, str]:
    return str(stored.message_id), str(stored.headers.get("kind")), stored.routing_key

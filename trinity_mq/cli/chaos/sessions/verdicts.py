"""Invariants of sessions: compares the answers that clients got with the streams. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from trinity_mq.cli.chaos.invariants import Verdict, judged, lineage
from trinity_mq.cli.chaos.record import Record
from trinity_mq.cli.chaos.sessions.clients import Told, Traffic
from trinity_mq.cli.chaos.sessions.stream import SessionRecord
from trinity_mq.gateway.recorded_call import Answers
from trinity_mq.gateway.session import SETTLED, Session
from trinity_mq.messages import SessionCall

Tokens = tuple[int, ...]
LAWFUL_DROPS = {"group not full"}
"""Decisions that may drop a session with an accepted reward."""


def trained_sessions(record: Record) -> Mapping[str, Mapping[str, list[Tokens]]]:
    """Return, by session and ticket, the tokens of its experiences that the last weights were trained on."""
    found: defaultdict[str, defaultdict[str, list[Tokens]]] = defaultdict(lambda: defaultdict(list))
    deciding = record.deciding
    for one in lineage(record.progress[: record.settled]):
        processed = deciding.get(one.ticket)
        if processed is not None and one.outcome == "trained":
            for session, tokens in processed.sessions:
                found[session][one.ticket].append(tokens)
    return found


def judge_sessions(traffic: Traffic | None, sessions: SessionRecord, record: Record) -> Iterator[Verdict]:
    """Yield the verdicts on the sessions of a run; ``traffic`` is None if the trial does not hold sessions."""
    trained = trained_sessions(record)
    yield in_one_batch(trained, sessions)
    yield decided_once(sessions)
    told = Traffic() if traffic is None else traffic
    yield recorded_sessions_count(told, sessions, trained)
    yield answers_trained_once(told, sessions, trained)
    yield told_is_kept(told, sessions)
    yield nothing_waits(told, sessions)


def in_one_batch(trained: Mapping[str, Mapping[str, list[Tokens]]], sessions: SessionRecord) -> Verdict:
    """Check that no session is in two trained batches, and that the ledger agrees about each trained session."""
    violations = [
        f"session {name} is in {len(tickets)} batches that were trained on: {', '.join(tickets)}"
        for name, tickets in trained.items()
        if len(tickets) > 1
    ]
    if not sessions.begin:
        for name in trained:
            session = sessions.ledger.get(name)
            state = "unknown" if session is None else session.state
            if state not in {"trained", "batched", "queued"}:  # the events of the last steps may not be published yet
                violations.append(f"session {name} was trained on, and the ledger says that it is {state}")
    return judged("no session trained on twice", violations, f"{len(trained)} sessions")


def decided_once(sessions: SessionRecord) -> Verdict:
    """Check that each session has one decision."""
    found: defaultdict[str, set[tuple[object, ...]]] = defaultdict(set)
    for one in sessions.decisions:
        for name in one.sessions:
            found[name].add((tuple(one.sessions), one.submission, one.dropped))
    violations = [
        f"session {name} has {len(different)} decisions: {'; '.join(map(str, sorted(different, key=str)))}"
        for name, different in found.items()
        if len(different) > 1
    ]
    return judged("one decision about each session", violations, f"{len(found)} sessions")


def recorded_sessions_count(
    traffic: Traffic, sessions: SessionRecord, trained: Mapping[str, Mapping[str, list[Tokens]]]
) -> Verdict:
    """Check that each session with recorded answers, an accepted reward and an accepted end is trained on, or has a
    stated reason.
    """
    name = "recorded sessions are trained on"
    if not traffic.sessions:
        return Verdict(name, "not checked", "no client of ours has asked")
    violations: list[str] = []
    reasons: Counter[str] = Counter()
    must = [told for told in traffic.sessions if told.must_train]
    for told in must:
        if told.id in trained:
            continue
        reason = _reason(sessions.ledger.get(told.id))
        if reason is None:
            violations.append(f"session {told.id}: {_where(sessions.ledger.get(told.id))}")
        else:
            reasons[reason] += 1
    for told in traffic.sessions:
        if told.id in trained and not told.unsure and (told.discarded or not told.rewarded):
            violations.append(f"session {told.id} was trained on, though it was discarded or has no reward")
    left_out = "".join(f", {count} left out: {reason}" for reason, count in reasons.items())
    return judged(name, violations, f"{len(must) - reasons.total()} of {len(must)} rewarded sessions{left_out}")


def _reason(session: Session | None) -> str | None:
    """Return why a complete session was not trained on, according to its batch, task or group; None: no stated
    reason.
    """
    if session is None or session.state != "dropped":
        return None
    decided = session.decided
    if decided is not None and not decided.submission and decided.dropped not in LAWFUL_DROPS:
        return None
    return session.why.splitlines()[0][:80] if session.why else None


def _where(session: Session | None) -> str:
    return "not known on the stream" if session is None else f"it is {session.state} ({session.why or 'no reason'})"


def answers_trained_once(
    traffic: Traffic, sessions: SessionRecord, trained: Mapping[str, Mapping[str, list[Tokens]]]
) -> Verdict:
    """Check that each recorded answer is trained on once, and that no answer is trained on that its client replaced by
    a retry.
    """
    name = "answers trained on once"
    if not traffic.sessions or sessions.begin:
        return Verdict(name, "not checked", "retention has cut the stream" if sessions.begin else "no client has asked")
    violations: list[str] = []
    count = 0
    for told in traffic.sessions:
        experiences = [tokens for found in trained.get(told.id, {}).values() for tokens in found]
        if not experiences or told.unsure:
            continue
        found, seen = _of_answers(told, sessions.calls.get(told.id, {}), experiences)
        violations += found
        count += seen
    return judged(name, violations, f"{count} answers")


def _of_answers(told: Told, calls: Mapping[str, SessionCall], experiences: Sequence[Tokens]) -> tuple[list[str], int]:
    """Return the violations of one trained session, and the number of its recorded answers."""
    whole = {name: _tokens(calls, call) for name, call in calls.items()}
    kept = [whole[one.call] for one in told.asked if one.call in whole]
    certain = [whole[one.call] for one in told.asked if one.recorded == "yes" and one.call in whole]
    violations: list[str] = []
    leaves = [one for one in kept if sum(_begins(other, one) for other in kept) == kept.count(one)]
    for tokens in {*whole.values()} - {()}:
        there = sum(_begins(one, tokens) for one in experiences)
        wanted = sum(_begins(one, tokens) for one in leaves)
        if there > wanted:
            names = [name for name, own in whole.items() if own == tokens]
            violations.append(
                f"session {told.id}: answers {', '.join(names)} are trained on {there} times, wanted {wanted}: a "
                "client that repeats its request counts once"
            )
        elif there < sum(_begins(one, tokens) for one in certain if one in leaves):
            violations.append(f"session {told.id}: a recorded answer is not among what was trained on")
    return violations, len(certain)


def _begins(tokens: Tokens, beginning: Tokens) -> bool:
    return tokens[: len(beginning)] == beginning


def _tokens(calls: Mapping[str, SessionCall], call: SessionCall) -> Tokens:
    """Return the tokens of a call's prompt and first answer; empty if a call that it continues is missing."""
    try:
        prompt = Answers(list(calls.values())).prompt(call)
    except ValueError:
        return ()
    return (*prompt, *(call.choices[0].ids if call.choices else ()))


def told_is_kept(traffic: Traffic, sessions: SessionRecord) -> Verdict:
    """Check that the answers to clients agree with the stream: sessions, recorded answers, rewards, ends."""
    name = "clients were told the truth"
    if not traffic.sessions or sessions.begin:
        return Verdict(name, "not checked", "retention has cut the stream" if sessions.begin else "no client has asked")
    violations = [*traffic.refused]
    for told in traffic.sessions:
        session = sessions.ledger.get(told.id)
        if session is None:
            violations.append(f"session {told.id} was opened and is not on the stream")
            continue
        violations += _untrue(told, session, sessions.calls.get(told.id, {}))
    return judged(name, violations, f"{len(traffic.sessions)} sessions")


def _untrue(told: Told, session: Session, calls: Mapping[str, SessionCall]) -> Iterator[str]:
    for one in told.asked:
        if one.recorded == "yes" and one.call not in calls:
            yield f"session {told.id}: answer {one.call} was told as recorded and is not on the stream"
    if told.unsure:
        return
    if told.reward is not None and session.reward != told.reward:
        yield f"session {told.id}: reward {told.reward:g} was accepted, the stream says {session.reward}"
    if told.rewarded and not session.has_reward:
        yield f"session {told.id}: a reward was accepted, and the stream has none"
    if told.ended and session.end is None:
        yield f"session {told.id}: its end was accepted, and the stream has none"


def nothing_waits(traffic: Traffic, sessions: SessionRecord) -> Verdict:
    """Check that every complete session of a client is settled after the last request."""
    name = "no session waits for ever"
    if not traffic.sessions:
        return Verdict(name, "not checked", "no client of ours has asked")
    must = [told for told in traffic.sessions if told.must_train]
    waiting = [
        f"session {told.id}: {_where(sessions.ledger.get(told.id))}"
        for told in must
        if (session := sessions.ledger.get(told.id)) is None or session.state not in SETTLED
    ]
    return judged(name, waiting, f"{len(must)} are settled")

"""Invariants of sessions: compares the answers that clients got with the streams. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from trinity_mq.gateway.recorded_call import prompt_of
from trinity_mq.gateway.session import SETTLED, Session
from trinity_mq.messages import SessionCall
from trinity_mq.proof.chaos.sessions.clients import ClientSession, Traffic
from trinity_mq.proof.chaos.sessions.stream import SessionRecord
from trinity_mq.proof.invariants import InvariantVerdict, lineage, verdict_of
from trinity_mq.proof.record import Record

Tokens = tuple[int, ...]
LAWFUL_DROPS = {"group not full"}
"""Reasons for which a gateway may drop a session that has an accepted reward."""


def trained_sessions(record: Record) -> Mapping[str, Mapping[str, list[Tokens]]]:
    """Return, by session and ticket, the tokens of the session's experiences that the last weights were trained on."""
    tokens_by_session: defaultdict[str, defaultdict[str, list[Tokens]]] = defaultdict(lambda: defaultdict(list))
    deciding = record.deciding
    for step in lineage(record.progress[: record.settled]):
        processed = deciding.get(step.ticket)
        if processed is not None and step.outcome == "trained":
            for session, tokens in processed.sessions:
                tokens_by_session[session][step.ticket].append(tokens)
    return tokens_by_session


def judge_sessions(traffic: Traffic | None, sessions: SessionRecord, record: Record) -> Iterator[InvariantVerdict]:
    """Yield the verdicts on the sessions of a run; ``traffic`` is None if the trial does not hold sessions."""
    trained = trained_sessions(record)
    yield in_one_batch(trained, sessions)
    yield decided_once(sessions)
    client_traffic = Traffic() if traffic is None else traffic
    yield recorded_sessions_count(client_traffic, sessions, trained)
    yield answers_trained_once(client_traffic, sessions, trained)
    yield answers_match_stream(client_traffic, sessions)
    yield sessions_settle(client_traffic, sessions)


def in_one_batch(trained: Mapping[str, Mapping[str, list[Tokens]]], sessions: SessionRecord) -> InvariantVerdict:
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
    return verdict_of("no session trained on twice", violations, f"{len(trained)} sessions")


def decided_once(sessions: SessionRecord) -> InvariantVerdict:
    """Check that no session has two different decisions."""
    decisions: defaultdict[str, set[tuple[object, ...]]] = defaultdict(set)
    for decision in sessions.decisions:
        for name in decision.sessions:
            decisions[name].add((tuple(decision.sessions), decision.submission, decision.dropped))
    violations = [
        f"session {name} has {len(different)} decisions: {'; '.join(map(str, sorted(different, key=str)))}"
        for name, different in decisions.items()
        if len(different) > 1
    ]
    return verdict_of("one decision about each session", violations, f"{len(decisions)} sessions")


def recorded_sessions_count(
    traffic: Traffic, sessions: SessionRecord, trained: Mapping[str, Mapping[str, list[Tokens]]]
) -> InvariantVerdict:
    """Check that each session with recorded answers, an accepted reward and an accepted end is trained on, or a reason
    for dropping it is stated, and that no discarded session and no session without a reward is trained on.
    """
    name = "recorded sessions are trained on"
    if not traffic.sessions:
        return InvariantVerdict(name, "not checked", "no client of this trial sent a request")
    violations: list[str] = []
    reasons: Counter[str] = Counter()
    must = [client for client in traffic.sessions if client.must_train]
    for client in must:
        if client.id in trained:
            continue
        reason = _reason(sessions.ledger.get(client.id))
        if reason is None:
            violations.append(f"session {client.id}: {_state_text(sessions.ledger.get(client.id))}")
        else:
            reasons[reason] += 1
    for client in traffic.sessions:
        if client.id in trained and not client.unsure and (client.discarded or not client.rewarded):
            violations.append(f"session {client.id} was trained on, though it was discarded or has no reward")
    left_out = "".join(f", {count} left out: {reason}" for reason, count in reasons.items())
    return verdict_of(name, violations, f"{len(must) - reasons.total()} of {len(must)} rewarded sessions{left_out}")


def _reason(session: Session | None) -> str | None:
    """Return why a complete session was not trained on, according to its batch, task or group; None: a reason is not
    stated, or does not permit it.
    """
    if session is None or session.state != "dropped":
        return None
    decided = session.decided
    if decided is not None and not decided.submission and decided.dropped not in LAWFUL_DROPS:
        return None
    return session.why.splitlines()[0][:80] if session.why else None


def _state_text(session: Session | None) -> str:
    return "not known on the stream" if session is None else f"it is {session.state} ({session.why or 'no reason'})"


def answers_trained_once(
    traffic: Traffic, sessions: SessionRecord, trained: Mapping[str, Mapping[str, list[Tokens]]]
) -> InvariantVerdict:
    """Check that each recorded answer is trained on once, and that no answer is trained on that its client replaced by
    a retry.
    """
    name = "answers trained on once"
    if (reason := _missing_evidence(traffic, sessions)) is not None:
        return InvariantVerdict(name, "not checked", reason)
    violations: list[str] = []
    count = 0
    for client in traffic.sessions:
        experiences = [tokens for problems in trained.get(client.id, {}).values() for tokens in problems]
        if not experiences or client.unsure:
            continue
        problems, answers = _answer_violations(client, sessions.calls.get(client.id, {}), experiences)
        violations += problems
        count += answers
    return verdict_of(name, violations, f"{count} answers")


def _missing_evidence(traffic: Traffic, sessions: SessionRecord) -> str | None:
    """Return why the answers to clients cannot be compared with the stream; None: they can."""
    if sessions.begin:
        return "retention has cut the stream"
    return None if traffic.sessions else "no client sent a request"


def _answer_violations(
    client: ClientSession, calls: Mapping[str, SessionCall], experiences: Sequence[Tokens]
) -> tuple[list[str], int]:
    """Return the violations of one trained session, and the number of its recorded answers."""
    whole = {name: _tokens(calls, call) for name, call in calls.items()}
    received = [whole[request.call] for request in client.asked if request.call in whole]
    certain = [whole[asked.call] for asked in client.asked if asked.recorded == "yes" and asked.call in whole]
    violations: list[str] = []
    leaves = [
        answer
        for answer in received
        if sum(_starts_with(longer, answer) for longer in received) == received.count(answer)
    ]
    for tokens in {*whole.values()} - {()}:
        trained = sum(_starts_with(experience, tokens) for experience in experiences)
        expected = sum(_starts_with(leaf, tokens) for leaf in leaves)
        if trained > expected:
            names = [name for name, call_tokens in whole.items() if call_tokens == tokens]
            violations.append(
                f"session {client.id}: answers {', '.join(names)} are trained on {trained} times, wanted {expected}: a "
                "client that repeats its request counts once"
            )
        elif trained < sum(_starts_with(answer, tokens) for answer in certain if answer in leaves):
            violations.append(f"session {client.id}: a recorded answer is not among what was trained on")
    return violations, len(certain)


def _starts_with(tokens: Tokens, beginning: Tokens) -> bool:
    return tokens[: len(beginning)] == beginning


def _tokens(calls: Mapping[str, SessionCall], call: SessionCall) -> Tokens:
    """Return the tokens of a call's prompt and first answer; empty if a call that it continues is missing."""
    try:
        prompt = prompt_of(call, calls)
    except ValueError:
        return ()
    return (*prompt, *(call.choices[0].ids if call.choices else ()))


def answers_match_stream(traffic: Traffic, sessions: SessionRecord) -> InvariantVerdict:
    """Check that the answers to clients agree with the stream: sessions, recorded answers, rewards, ends."""
    name = "answers to clients match the stream"
    if (reason := _missing_evidence(traffic, sessions)) is not None:
        return InvariantVerdict(name, "not checked", reason)
    violations = [*traffic.refused]
    for client in traffic.sessions:
        session = sessions.ledger.get(client.id)
        if session is None:
            violations.append(f"session {client.id} was opened and is not on the stream")
            continue
        violations += _mismatches(client, session, sessions.calls.get(client.id, {}))
    return verdict_of(name, violations, f"{len(traffic.sessions)} sessions")


def _mismatches(client: ClientSession, session: Session, calls: Mapping[str, SessionCall]) -> Iterator[str]:
    for request in client.asked:
        if request.recorded == "yes" and request.call not in calls:
            yield f"session {client.id}: answer {request.call} was reported as recorded and is not on the stream"
    if client.unsure:
        return
    if client.reward is not None and session.reward != client.reward:
        yield f"session {client.id}: reward {client.reward:g} was accepted, the stream says {session.reward}"
    if client.rewarded and not session.has_reward:
        yield f"session {client.id}: a reward was accepted, and the stream has none"
    if client.ended and session.end is None:
        yield f"session {client.id}: its end was accepted, and the stream has none"


def sessions_settle(traffic: Traffic, sessions: SessionRecord) -> InvariantVerdict:
    """Check that the ledger has settled every session that must be trained on."""
    name = "every session is settled"
    if not traffic.sessions:
        return InvariantVerdict(name, "not checked", "no client of this trial sent a request")
    must = [client for client in traffic.sessions if client.must_train]
    waiting = [
        f"session {client.id}: {_state_text(sessions.ledger.get(client.id))}"
        for client in must
        if (session := sessions.ledger.get(client.id)) is None or session.state not in SETTLED
    ]
    return verdict_of(name, waiting, f"{len(must)} are settled")

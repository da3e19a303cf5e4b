from __future__ import annotations

from typing import Any

from trinity_mq.dispatch.failures import MAX_KINDS, MAX_LISTED, MAX_TEXT, OTHERS, Failures
from trinity_mq.dispatch.tickets import Ticket, new_ticket
from trinity_mq.messages import Outcome, TaskBody, TaskResult


def ticket() -> Ticket:
    tasks = [TaskBody(index={"taskset": "sums", "index": 40 + n}) for n in range(3)]
    return new_ticket(1, tasks, deliver="pipeline", lane="train", time_left=60.0)


def result(task: int, message: str | None, outcome: Outcome = "failed", **more: Any) -> TaskResult:
    return TaskResult(batch=1, ticket="t", task_id=task, attempt="a", outcome=outcome, message=message, **more)


def test_a_kind_is_counted_with_the_task_that_had_it_first() -> None:
    failures = Failures()
    for task, word in ((2, "a"), (0, "b")):
        failures.add(ticket(), result(task, f"KeyError: {word!r} (bad.py:7)"))
    (kind,) = failures.listed()
    assert (kind.text, kind.count, kind.failed) == ("KeyError: 'a' (bad.py:7)", 2, 2)
    assert failures.summary() == (
        "2 slices failed: KeyError: 'a' (bad.py:7); first: task 2 of batch 1 (record 42 of sums)"
    )


def test_an_attempt_that_failed_in_a_finished_slice_is_told_apart() -> None:
    failures = Failures()
    failures.add(ticket(), result(0, "ValueError: x (bad.py:7)", "finished"))
    assert "1 slice finished with a fault: ValueError" in failures.summary()
    failures.add(ticket(), result(1, "ValueError: x (bad.py:7)"))
    assert "2 slices of which 1 failed: ValueError" in failures.summary()


def test_what_was_cut_off_is_no_failure() -> None:
    failures, cut_off = Failures(), ticket()
    cut_off.grace = 1.0
    failures.add(cut_off, result(0, "its result is not needed any more", "partial"))
    failures.add(ticket(), result(0, "the batch's time is up", "cancelled"))
    failures.add(ticket(), result(0, None, "finished"))
    assert (failures.listed(), failures.summary()) == ([], "")


def test_kinds_are_bounded_and_the_frequent_ones_are_listed() -> None:
    failures = Failures()
    for line in range(3 * MAX_KINDS):
        failures.add(ticket(), result(0, f"KeyError: 'x' (bad.py:{line})"))
    listed = failures.listed()
    assert len(listed) == MAX_LISTED
    assert (listed[0].text, listed[0].count) == (OTHERS, 2 * MAX_KINDS + 1)


def test_a_text_is_short_keeps_its_place_and_holds_no_password() -> None:
    failures = Failures()
    failures.add(ticket(), result(0, f"ValueError: amqp://me:secret@host {'prompt ' * 500} (bad.py:7)"))
    (kind,) = failures.listed()
    assert len(kind.text) < MAX_TEXT + 10
    assert kind.text.endswith("(bad.py:7)")
    assert "secret" not in kind.text

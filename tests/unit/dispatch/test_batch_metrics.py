"""What a ticket says in numbers, exactly."""

from __future__ import annotations

from typing import Any

from trinity_mq.dispatch.batch_metrics import (
    MAX_KINDS,
    MAX_LISTED,
    MAX_TEXT,
    OTHERS,
    OUTCOMES,
    Failures,
    eval_metrics,
    rollout_metrics,
    submission_outcome,
    task_status,
)
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket, new_ticket
from trinity_mq.messages import FAILURE_KINDS, Outcome, TaskBody, TaskResult


def a_ticket(tasks: int = 2, runs: int = 4, per_slice: int | None = 2, **how: Any) -> Ticket:
    bodies = [TaskBody(workflow="none", repeat_times=runs) for _ in range(tasks)]
    given = {"deliver": "pipeline", "lane": "train", "time_left": 9.0, **how}
    return new_ticket(1, bodies, max_repeat_times=per_slice, **given)


def tell(ticket: Ticket, task: int, base: int, outcome: str = "finished", attempt: str = "", **fields: Any) -> None:
    (task_slice,) = [each for each in ticket.slices if (each.task_id, each.run_base) == (task, base)]
    given: dict[str, Any] = {"batch": ticket.batch, "ticket": ticket.ticket, "repeat_times": task_slice.repeat_times}
    attempt = attempt or f"{task}-{base}"
    ticket.record(TaskResult(**given, task_id=task, run_base=base, attempt=attempt, outcome=outcome, **fields))


def test_a_training_batch_from_the_runs_up() -> None:
    ticket = a_ticket()
    tell(ticket, 0, 0, runs=[0, 1], metrics=[{"reward": 1, "n:sum": 2}, {"reward": 0, "n:sum": 3}], seconds=2.0)
    # the message makes numbers of bools: what counts is that they count
    tell(ticket, 0, 2, "partial", runs=[2], metrics=[{"reward": True, "n:sum": 5}], seconds=4.0, returned=2)
    tell(ticket, 1, 0, "failed", seconds=10.0, returned=1)
    tell(ticket, 1, 0, "finished", attempt="again", runs=[0, 1])
    ticket.cancel_rest("time")
    assert rollout_metrics(ticket, late=3) == {
        "rollout/reward/mean": 2 / 3,
        "rollout/reward/max": 2 / 3,
        "rollout/reward/min": 2 / 3,
        "rollout/n/sum": 10.0,
        "rollout/time/task_execution/mean": 6.5,
        "rollout/time/task_execution/max": 10.0,
        "rollout/time/task_execution/min": 3.0,
        "rollout/slices/finished": 1.0,
        "rollout/slices/partial": 1.0,
        "rollout/slices/failed": 1.0,
        "rollout/slices/cancelled": 1.0,
        "rollout/slices/poisoned": 0.0,
        "rollout/slices/duplicate": 1.0,
        "rollout/slices/late": 3.0,
        "rollout/slices/given_back": 3.0,
        **{f"rollout/failures/{kind}": 0.0 for kind in FAILURE_KINDS},
        "rollout/failures/unknown": 2.0,
        "rollout/finished_task_count": 1.0,
        "rollout/finished_runs": 3.0,
    }


def test_slices_that_failed_are_counted_by_kind() -> None:
    ticket = a_ticket(tasks=4)
    tell(ticket, 0, 0, "failed", failure_kind="sandbox", message="sandbox: connection refused")
    tell(ticket, 0, 2, "failed", failure_kind="sandbox", message="sandbox: connection refused")
    tell(ticket, 1, 0, "partial", runs=[0], failure_kind="timeout", message="too long")
    tell(ticket, 1, 2, runs=[2, 3], failure_kind="tool", message="a later attempt went well")
    tell(ticket, 2, 0, "poisoned", failure_kind="process", message="it killed its process")
    tell(ticket, 2, 2, "failed", failure_kind="my_cluster", message="a kind of the workflow's own")
    ticket.decide_rest(3, "failed", "too large for a message")
    found = {name.rpartition("/")[2]: n for name, n in rollout_metrics(ticket).items() if "/failures/" in name}
    assert found == {
        **dict.fromkeys(FAILURE_KINDS, 0.0),
        "sandbox": 2.0,
        "timeout": 1.0,
        "process": 1.0,
        "my_cluster": 1.0,
        "task": 2.0,
    }


def test_what_a_cut_off_left_unfinished_is_no_failure() -> None:
    ticket = a_ticket(tasks=1)
    ticket.grace = 1.0
    tell(ticket, 0, 0, "partial", runs=[0], failure_kind="stopped", message="its result is not needed any more")
    ticket.cancel_rest("time")
    assert sum(n for name, n in rollout_metrics(ticket).items() if "/failures/" in name) == 0


def test_runs_of_a_task_that_was_cut_off_count_only_where_they_are_kept() -> None:
    found = []
    for whole in (False, True):
        ticket = a_ticket()
        tell(ticket, 0, 0, runs=[0, 1], metrics=[{"reward": 1.0}] * 2)
        tell(ticket, 0, 2, runs=[2, 3], metrics=[{"reward": 1.0}] * 2)
        tell(ticket, 1, 0, runs=[0, 1], metrics=[{"reward": 0.0}] * 2)
        ticket.whole_tasks_only = whole
        ticket.cancel_rest("enough tasks are done")
        found.append(rollout_metrics(ticket))
    names = ("rollout/reward/mean", "rollout/finished_task_count", "rollout/finished_runs", "rollout/slices/cancelled")
    assert [[each[name] for name in names] for each in found] == [[0.5, 2.0, 6.0, 1.0], [1.0, 1.0, 4.0, 1.0]]


def test_nothing_but_cancelled_slices_is_counts_only() -> None:
    ticket = a_ticket()
    ticket.cancel_rest("time")
    found = rollout_metrics(ticket)
    assert {key: value for key, value in found.items() if value} == {"rollout/slices/cancelled": 4.0}
    assert {f"rollout/slices/{outcome}" for outcome in OUTCOMES} <= found.keys()


def test_an_evaluation_from_the_runs_up() -> None:
    ticket = a_ticket(lane="eval", deliver="none")
    metrics = [{"acc": 1, "time/run_execution": 1.0}, {"acc": 0, "time/run_execution": 3.0}]
    versions: dict[str, Any] = {"version_min": (1, 3), "version_max": (1, 4)}
    tell(ticket, 0, 0, runs=[0, 1], metrics=metrics, seconds=4.0, **versions)
    tell(ticket, 0, 2, runs=[2, 3], metrics=metrics, seconds=2.0, version_min=(1, 2), version_max=(1, 3))
    tell(ticket, 1, 0, "failed", seconds=6.0)
    tell(ticket, 1, 2, "partial", runs=[3], metrics=[{"acc": 1}], seconds=6.0)
    expected = {
        "acc/mean@4": 0.5,
        "acc/std@4": 0.5,
        "acc/best@2": 0.75,
        "acc/worst@2": 0.25,
        "acc/best@4": 0.9375,
        "acc/worst@4": 0.0625,
        "acc/mean@1": 1.0,
        "acc/std@1": 0.0,
        "time/run_execution": 2.0,
        "time/task_execution": 4.5,
        "finished_task_count": 2.0,
        "finished_runs": 5.0,
        "failed_runs": 3.0,
        "version/min": 2.0,
        "version/max": 4.0,
    }
    assert eval_metrics(ticket, "x") == {f"eval/x/{key}": value for key, value in expected.items()}
    detailed = eval_metrics(ticket, "x", detailed=True)
    assert [detailed[f"eval/x/time/task_execution/{each}"] for each in ("mean", "max", "min", "std")] == [
        4.5,
        6.0,
        3.0,
        1.5,
    ]
    assert detailed["eval/x/failed_runs"] == 3.0


def test_the_status_of_a_task_is_that_of_its_slices_together() -> None:
    ticket = a_ticket(tasks=1)
    tell(ticket, 0, 2, "failed", message="boom")
    tell(ticket, 0, 0, runs=[0, 1], metrics=[{"reward": 1.0, "n:sum": 2, "m:max": 1}, {"n:sum": 3, "m:max": 4}])
    status = task_status(ticket.results_of(0))
    assert (status.ok, status.message, status.completed_runs, status.total_runs) == (False, "boom", 2, 4)
    assert status.metric == {"reward": 1.0, "n:sum": 5.0, "m:max": 4.0}
    assert status.metrics == [{"reward": 1.0, "n:sum": 2, "m:max": 1}, {"n:sum": 3, "m:max": 4}]


def test_the_runners_of_a_task_end_with_the_runner_of_its_last_runs() -> None:
    ticket = a_ticket(tasks=1, runs=6)
    for base, runner in ((0, "a"), (2, "b"), (4, "a")):
        tell(ticket, 0, base, runs=[base, base + 1], runner=runner)
    assert task_status(ticket.results_of(0)).runners == ["b", "a"]


def test_what_a_submitter_is_told() -> None:
    one = SubmissionRef(submission_id="s", task_id=1, reply_to="q", want_experiences=True)
    ticket = a_ticket(submissions=[one])
    tell(ticket, 1, 0, runs=[0, 1], metrics=[{"reward": 1.0}, {"reward": 0.0}], parts=2)
    tell(ticket, 1, 2, "poisoned", message="it killed its process")
    told = submission_outcome(ticket, one)
    assert (told.outcome, told.completed_runs, told.total_runs) == ("partial", 2, 4)
    assert (told.metrics, told.message, told.experiences) == ({"reward": 0.5}, "it killed its process", 2)
    nothing = submission_outcome(ticket, one.model_copy(update={"task_id": 0}))
    assert (nothing.outcome, nothing.experiences) == ("cancelled", 0)


# -- failures by kind


def three_tasks() -> Ticket:
    tasks = [TaskBody(index={"taskset": "sums", "index": 40 + n}) for n in range(3)]
    return new_ticket(1, tasks, deliver="pipeline", lane="train", time_left=60.0)


def a_result(task: int, message: str | None, outcome: Outcome = "failed", **more: Any) -> TaskResult:
    return TaskResult(batch=1, ticket="t", task_id=task, attempt="a", outcome=outcome, message=message, **more)


def test_a_kind_is_counted_with_the_task_that_had_it_first() -> None:
    failures = Failures()
    for task, word in ((2, "a"), (0, "b")):
        failures.add(three_tasks(), a_result(task, f"KeyError: {word!r} (bad.py:7)"))
    (kind,) = failures.listed()
    assert (kind.text, kind.count, kind.failed) == ("KeyError: 'a' (bad.py:7)", 2, 2)
    assert failures.summary() == (
        "2 slices failed: KeyError: 'a' (bad.py:7); first: task 2 of batch 1 (record 42 of sums)"
    )


def test_an_attempt_that_failed_in_a_finished_slice_is_told_apart() -> None:
    failures = Failures()
    failures.add(three_tasks(), a_result(0, "ValueError: x (bad.py:7)", "finished"))
    assert "1 slice finished with a fault: ValueError" in failures.summary()
    failures.add(three_tasks(), a_result(1, "ValueError: x (bad.py:7)"))
    assert "2 slices of which 1 failed: ValueError" in failures.summary()


def test_what_was_cut_off_is_no_failure() -> None:
    failures, cut_off = Failures(), three_tasks()
    cut_off.grace = 1.0
    failures.add(cut_off, a_result(0, "its result is not needed any more", "partial"))
    failures.add(three_tasks(), a_result(0, "the batch's time is up", "cancelled"))
    failures.add(three_tasks(), a_result(0, None, "finished"))
    assert (failures.listed(), failures.summary()) == ([], "")


def test_what_failed_before_a_pinned_ticket_was_cut_off_is_counted_at_its_end() -> None:
    failures, ticket = Failures(), a_ticket(lane="eval", deliver="none", pinned=(1, 3))
    tell(ticket, 0, 0, "failed", message="KeyError: 'a' (bad.py:7)")
    ticket.grace = 1.0
    ticket.cancel_rest("the batch's time is up")
    failures.add_ended(ticket)
    assert [(kind.text, kind.count) for kind in failures.listed()] == [("KeyError: 'a' (bad.py:7)", 1)]


def test_kinds_are_bounded_and_the_frequent_ones_are_listed() -> None:
    failures = Failures()
    for line in range(3 * MAX_KINDS):
        failures.add(three_tasks(), a_result(0, f"KeyError: 'x' (bad.py:{line})"))
    listed = failures.listed()
    assert len(listed) == MAX_LISTED
    assert (listed[0].text, listed[0].count) == (OTHERS, 2 * MAX_KINDS + 1)


def test_a_text_is_short_keeps_its_place_and_holds_no_password() -> None:
    failures = Failures()
    failures.add(three_tasks(), a_result(0, f"ValueError: amqp://me:secret@host {'prompt ' * 500} (bad.py:7)"))
    (kind,) = failures.listed()
    assert len(kind.text) < MAX_TEXT + 10
    assert kind.text.endswith("(bad.py:7)")
    assert "secret" not in kind.text

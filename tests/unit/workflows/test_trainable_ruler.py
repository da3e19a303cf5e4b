"""The policy as its own judge: trained where the right answer counts, believed where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.builtin.trainable_ruler import AsyncMathTrainableRulerWorkflow, MathTrainableRulerWorkflow

BOTH = pytest.mark.parametrize("kind", [MathTrainableRulerWorkflow, AsyncMathTrainableRulerWorkflow])
PROBLEM = {"question": "4 + 3 = ?", "answer": "7"}


def right_or_wrong(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    return {"accuracy": float(response == truth)}


async def run(kind: Any, model: Any, share: float, *, times: int = 2, **more: Any) -> Any:
    task = Task(
        workflow=kind,
        raw_task=PROBLEM,
        reward_fn=right_or_wrong,
        workflow_args={"truth_share": share, "lowest": 0.0, "highest": 1.0},
        task_id=5,
        **more,
    )
    workflow = task.to_workflow(model)
    workflow.set_repeat_times(times, 4)
    return await execute(lambda: workflow, kind)


@BOTH
async def test_where_the_truth_counts_answers_and_verdicts_are_trained(kind: Any, stub_model: Any) -> None:
    model = stub_model(["7", "9", "I say [1.0, 0.5]", "no idea"])
    found = await run(kind, model, 1.0)
    answers, verdicts = found[:2], found[2:]
    assert [one.reward for one in answers] == [1.0, 0.0]
    assert [one.metrics["gold_reward"] for one in answers] == [1.0, 0.0]
    assert [one.reward for one in verdicts] == [0.75, 0.0], "its mean distance from the rule; no list is worth nothing"
    assert {one.eid.task for one in verdicts} == {"5-judge"}, "a group of their own"
    assert {one.eid.task for one in answers} == {""}, "the task's"
    assert [one.eid.run for one in verdicts] == [4, 5]
    assert {one.metrics["judge_success"] for one in found} == {0.5}
    assert "accuracy" not in verdicts[0].metrics
    question = model.calls[-1][0][-1]["content"]
    assert "4 + 3 = ?" in question
    assert question.count("<answer ") == 2


@BOTH
async def test_thoughts_are_neither_shown_nor_verdicts(kind: Any, stub_model: Any) -> None:
    model = stub_model(["<think>9?</think>7", "9", "<think>[0.5, 0.5]?</think>[0.25, 0.5]"])
    assert [one.reward for one in await run(kind, model, 0.0)] == [0.25, 0.5]
    assert "9?" not in model.calls[-1][0][-1]["content"]


@BOTH
async def test_where_it_does_not_the_answers_get_the_verdict(kind: Any, stub_model: Any) -> None:
    found = await run(kind, stub_model(["7", "9", "[0.25, 0.5]"]), 0.0)
    assert [one.reward for one in found] == [0.25, 0.5]
    assert [one.metrics["gold_reward"] for one in found] == [1.0, 0.0], "known to us, and not to the policy"


@BOTH
async def test_a_verdict_that_cannot_be_read_makes_nobody_better(kind: Any, stub_model: Any) -> None:
    found = await run(kind, stub_model(["7", "9", "[2, 1]"]), 0.0)
    assert [one.reward for one in found] == [0.0, 0.0]
    assert {one.metrics["judge_success"] for one in found} == {0.0}


@BOTH
async def test_an_evaluation_asks_no_judge(kind: Any, stub_model: Any) -> None:
    found = await run(kind, stub_model(["7", "9"]), 0.0, is_eval=True)
    assert [one.reward for one in found] == [1.0, 0.0]
    assert [one.metrics["accuracy"] for one in found] == [1.0, 0.0]


def test_which_tasks_it_is_follows_from_the_task(stub_model: Any) -> None:
    def knows(question: str) -> bool:
        task = Task(workflow=MathTrainableRulerWorkflow, raw_task={"question": question, "answer": "1"})
        return bool(task.to_workflow(stub_model([])).uses_truth)

    first = [knows(f"{n} + 1") for n in range(400)]
    assert first == [knows(f"{n} + 1") for n in range(400)]
    assert 0.12 < sum(first) / 400 < 0.28


@pytest.mark.parametrize(
    ("arguments", "words"), [({"truth_share": 2}, "truth_share"), ({"lowest": 1, "highest": 1}, "lowest below highest")]
)
def test_arguments_that_make_no_sense(stub_model: Any, arguments: dict[str, Any], words: str) -> None:
    task = Task(workflow=MathTrainableRulerWorkflow, raw_task=PROBLEM, workflow_args=arguments)
    with pytest.raises(TaskError, match=words):
        task.to_workflow(stub_model([]))

"""Answers judged by a reward that sees the conversation, as a reward model does."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_mq.rewards import RewardError, create_reward, judge_conversation, parts_of
from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.builtin.math import SYSTEM_PROMPT, AsyncMathRmWorkflow, MathRmWorkflow

BOTH = pytest.mark.parametrize("kind", [MathRmWorkflow, AsyncMathRmWorkflow])
SEEN: list[tuple[Any, Any, Any]] = []


class Model:
    """A reward model that likes answers near the truth."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, response: Any, messages: Any, ground_truth: Any = None) -> dict[str, float]:
        SEEN.append((response.response_text, messages, ground_truth))
        return {"near": -abs(float(response.response_text) - float(ground_truth)) * self.scale, "style": 0.5}


def by_text(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    return {"accuracy": float(response == truth)}


@BOTH
async def test_it_sees_the_conversation_and_its_parts_are_metrics(kind: Any, stub_model: Any) -> None:
    SEEN.clear()
    task = Task(
        workflow=kind, raw_task={"question": "4 + 3 = ?", "answer": "7"}, reward_fn=Model, reward_fn_args={"scale": 2.0}
    )
    workflow = task.to_workflow(stub_model(["7", "5"]))
    workflow.set_repeat_times(2, 4)
    found = await execute(lambda: workflow, kind)
    assert [one.reward for one in found] == [0.5, -3.5]
    assert found[1].metrics == {"near": -4.0, "style": 0.5}
    assert [one.eid.run for one in found] == [4, 5]
    text, messages, truth = SEEN[0]
    assert (text, truth) == ("7", "7")
    assert messages == [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "4 + 3 = ?"}]


@BOTH
def test_without_a_reward_or_with_another_kind_it_says_what_it_wants(kind: Any, stub_model: Any) -> None:
    with pytest.raises(TaskError, match=r"needs buffer.taskset.reward_fn: the dotted path"):
        Task(workflow=kind, raw_task={"question": "q"}).to_workflow(stub_model([]))


def test_each_kind_of_reward_where_the_other_is_wanted_says_so() -> None:
    with pytest.raises(
        RewardError, match=r"by_text .* does not judge conversations, wanted a function that is called as"
    ):
        judge_conversation(create_reward(by_text, {}), None, [], "7")
    with pytest.raises(RewardError, match=r"Model.* judges the conversation .* use math_rm_workflow"):
        parts_of(create_reward(Model, {}), "7", "7", finished=True)

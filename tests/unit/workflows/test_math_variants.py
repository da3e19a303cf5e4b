r"""Boxed math and the yardstick: what is asked, judged and trained on."""

from typing import Any

import pytest

from trinity_mq.config import FormatConfig
from trinity_mq.rewards import RewardError, create_reward, judge_conversation, parts_of
from trinity_mq.rewards.text import char_match
from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.builtin.math import (
    SYSTEM_PROMPT,
    AsyncMathBoxedWorkflow,
    AsyncMathEvalWorkflow,
    AsyncMathRmWorkflow,
    MathBoxedWorkflow,
    MathEvalWorkflow,
    MathRmWorkflow,
)

BOXED = pytest.mark.parametrize("kind", [MathBoxedWorkflow, AsyncMathBoxedWorkflow])
EVAL = pytest.mark.parametrize("kind", [MathEvalWorkflow, AsyncMathEvalWorkflow])
RIGHT = "It is \\boxed{12}."
THOUGHT = "<think>3*4</think> It is \\boxed{12}."


def task(kind, **keys):
    return Task(workflow=kind, raw_task={"question": "3 times 4?", "answer": "12"}, **keys)


async def judged(kind, model, made, runs):
    workflow = made.to_workflow(model)
    workflow.set_repeat_times(runs, 0)
    return await execute(lambda: workflow, kind)


@BOXED
async def test_the_answer_is_in_the_box_and_the_form_is_worth_something(kind, stub_model):
    model = stub_model([RIGHT, "It is 12.", "\\boxed{13}"])
    experiences = await judged(kind, model, task(kind), 3)
    assert [one.metrics["accuracy"] for one in experiences] == [1.0, 0.0, 0.0]
    assert [one.reward for one in experiences] == [1.0, -0.1, 0.0]
    system, user = model.calls[0][0]
    assert "\\boxed{}" in system["content"]
    assert "<think>" not in system["content"]
    assert user == {"role": "user", "content": "3 times 4?"}


@BOXED
async def test_thinking_is_asked_for_and_looked_at(kind, stub_model):
    model = stub_model([THOUGHT, RIGHT])
    made = task(kind, workflow_args={"with_think": True, "format_score_coef": 0.25})
    experiences = await judged(kind, model, made, 2)
    assert [one.reward for one in experiences] == [1.0, 0.75]
    assert "<think>" in model.calls[0][0][0]["content"]


@BOXED
async def test_a_base_model_gets_one_text(kind, stub_model):
    model = stub_model([RIGHT, RIGHT])
    made = task(kind, workflow_args={"use_base": True}, rollout_args={"temperature": 0.5})
    experiences = await judged(kind, model, made, 2)
    assert [one.reward for one in experiences] == [1.0, 1.0]
    ([prompt], sampling) = model.calls[0]
    assert sampling == {"temperature": 0.5, "n": 2}
    assert prompt.endswith("\n\nProblem: 3 times 4?\nSolution:")
    assert "\\boxed{}" in prompt


@BOXED
async def test_what_was_cut_is_judged_but_not_trained_on(kind, stub_model):
    cut, whole = await judged(kind, stub_model([(RIGHT, "response_truncated"), RIGHT]), task(kind), 2)
    assert cut.action_mask.tolist() == [False] * cut.response_length
    assert cut.metrics["accuracy"] == 1.0
    assert cut.reward == pytest.approx(0.9)
    assert whole.action_mask.all()
    again = type(cut).deserialize(cut.serialize())
    assert (again.experience_type, again.action_mask.any().item()) == ("single_turn", False), "and so it travels"


@BOXED
async def test_the_task_says_otherwise(kind, stub_model):
    model = stub_model(["12"])
    made = task(kind, reward_fn=char_match, format_args=FormatConfig(system_prompt="Mine."))
    (one,) = await judged(kind, model, made, 1)
    assert one.reward == 1.0
    assert model.calls[0][0][0]["content"] == "Mine."


@EVAL
async def test_the_yardstick_is_the_same_for_every_run(kind, stub_model):
    model = stub_model([RIGHT, (RIGHT, "response_truncated"), "13"])
    made = task(kind, is_eval=True, reward_fn=char_match, format_args=FormatConfig(system_prompt="Mine."))
    experiences = await judged(kind, model, made, 3)
    assert [one.metrics for one in experiences] == [
        {"accuracy": 1.0, "majority": 1.0, "finished": 1.0},
        {"accuracy": 1.0, "majority": 1.0, "finished": 0.0},
        {"accuracy": 0.0, "majority": 1.0, "finished": 1.0},
    ]
    assert "Mine." not in model.calls[0][0][0]["content"]


@EVAL
def test_the_yardstick_does_not_train(kind, stub_model):
    with pytest.raises(TaskError, match=r"only measures; name it in buffer\.eval_tasksets"):
        task(kind).to_workflow(stub_model([]))


# -- a reward that sees the conversation, as a reward model does


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

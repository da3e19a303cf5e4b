r"""Single-turn workflows: what is asked, judged and trained on."""

import threading
from typing import Any

import pytest

from trinity_mq.config import FormatConfig
from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.models import PromptTooLong
from trinity_mq.rewards import RewardError, create_reward, judge_conversation, parts_of
from trinity_mq.rewards.text import char_match
from trinity_mq.rollout.failures import reward_fault
from trinity_mq.workflows import (
    AsyncSimpleWorkflow,
    SimpleWorkflow,
    Task,
    TaskError,
    execute,
)
from trinity_mq.workflows.builtin.math import (
    SYSTEM_PROMPT,
    AsyncBoxedAnswerWorkflow,
    AsyncMathAnswerWorkflow,
    AsyncMathBenchmarkWorkflow,
    AsyncMathRmWorkflow,
    BoxedAnswerWorkflow,
    MathAnswerWorkflow,
    MathBenchmarkWorkflow,
    MathRmWorkflow,
)

BOTH = pytest.mark.parametrize("kind", [SimpleWorkflow, AsyncSimpleWorkflow])
BOTH_MATH = pytest.mark.parametrize("kind", [MathAnswerWorkflow, AsyncMathAnswerWorkflow])
BOXED = pytest.mark.parametrize("kind", [BoxedAnswerWorkflow, AsyncBoxedAnswerWorkflow])
EVAL = pytest.mark.parametrize("kind", [MathBenchmarkWorkflow, AsyncMathBenchmarkWorkflow])
JUDGES_CONVERSATION = pytest.mark.parametrize("kind", [MathRmWorkflow, AsyncMathRmWorkflow])


def task(kind, **keys):
    keys.setdefault("raw_task", {"question": "1+1=", "answer": "2"})
    return Task(workflow=kind, **keys)


async def run(kind, model, runs=1, base=0, **keys):
    """Return the experiences of ``runs`` runs of a task."""
    workflow = task(kind, **keys).to_workflow(model)
    workflow.set_repeat_times(runs, base)
    return await execute(lambda: workflow, kind)


@BOTH
async def test_all_runs_are_asked_for_in_one_request(kind, stub_model):
    model = stub_model(["2", "3", "2"])
    experiences = await run(kind, model, 3, 8, rollout_args={"temperature": 0.7, "n": 99})
    assert model.calls == [([{"role": "user", "content": "1+1="}], {"temperature": 0.7, "n": 3})]
    assert [exp.eid.run for exp in experiences] == [8, 9, 10]
    assert [exp.reward for exp in experiences] == [1.0, 0.0, 1.0]
    assert [exp.metrics for exp in experiences] == [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 1.0}]


@BOTH
async def test_an_evaluation_says_what_the_majority_answers(kind, stub_model):
    experiences = await run(kind, stub_model(["3", " 2 ", "2", "4"]), 4, is_eval=True)
    assert [exp.metrics["majority"] for exp in experiences] == [1.0] * 4
    assert [exp.metrics["accuracy"] for exp in experiences] == [0.0, 1.0, 1.0, 0.0]
    (alone,) = await run(kind, stub_model(["2"]), is_eval=True)
    assert "majority" not in alone.metrics


@pytest.mark.parametrize(
    ("texts", "majority"),
    [
        ([r"so \boxed{2}", r"I think \boxed{ 2 } it is", "2 ", r"\boxed{3}"], 1.0),
        ([r"\boxed{3}", "no, <answer>3</answer>", r"first \boxed{3} then \boxed{2}", r"\boxed{2}"], 0.0),
        (["2", "3"], 1.0),
        (["3", "2"], 0.0),
        (["<think>3?</think>2", "<think>3? no</think> 2", "3"], 1.0),
        (["<think>3", "<think>3? 3!", "2"], 1.0),
    ],
)
async def test_answers_are_equal_if_what_they_end_with_is(stub_model, texts, majority):
    def right(response, truth, *, finished):
        answer = after_thoughts(response)
        return {"accuracy": float("2" in answer and "3" not in answer)}

    experiences = await run(SimpleWorkflow, stub_model(texts), len(texts), is_eval=True, reward_fn=right)
    assert {exp.metrics["majority"] for exp in experiences} == {majority}


@BOTH
@pytest.mark.parametrize(
    ("runs", "base", "is_eval", "asked"),
    [(1, 0, False, [{"n": 1, "temperature": 0.0}]), (2, 3, False, [{"n": 2}]), (2, 0, True, [{"n": 2}])],
)
async def test_one_run_of_a_training_task_is_greedy_however_it_is_cut(kind, stub_model, runs, base, is_eval, asked):
    model = stub_model(["2", "3"])
    experiences = await run(kind, model, runs, base, workflow_args={"greedy_baseline": True}, is_eval=is_eval)
    assert [exp.eid.run for exp in experiences] == list(range(base, base + runs))
    assert [keys for _, keys in model.calls] == asked
    with pytest.raises(TaskError, match="greedy_baseline is 'yes', wanted true or false"):
        task(kind, workflow_args={"greedy_baseline": "yes"}).to_workflow(model)


@BOTH
async def test_the_reward_is_the_sum_of_its_parts(kind, stub_model):
    answers = ["230", ("237", "response_truncated")]
    exp, cut = await run(
        kind, stub_model(answers), 2, reward_fn=char_match, raw_task={"question": "q", "answer": "237"}
    )
    assert exp.reward == pytest.approx(0.5 * (0.8 * 2 / 3 + 0.2))
    assert exp.metrics == {"accuracy": 0.0, "partial_credit": exp.reward}
    assert cut.metrics["accuracy"] == 0.0, "a response that was cut is not exact"


@BOTH
async def test_a_prompt_that_is_too_long_is_a_failure_and_is_not_judged(kind, stub_model):
    def never(response, truth, *, finished):
        raise AssertionError("judged")

    for workflow, args in ((kind, {}), (BoxedAnswerWorkflow, {}), (BoxedAnswerWorkflow, {"use_base": True})):
        model = stub_model([("2", "prompt_truncated")] * 2)
        with pytest.raises(PromptTooLong, match=r"more than 2 tokens, the limit of model\.max_prompt_tokens"):
            await run(workflow, model, 2, workflow_args=args, reward_fn=never)


@BOTH
async def test_a_reward_that_is_no_number_is_blamed_on_its_function(kind, stub_model):
    def broken(response, truth, *, finished):
        return {"accuracy": float("nan"), "speed": float("-inf")} if response == "2" else {"accuracy": 1.0}

    wrong, right = await run(kind, stub_model(["2", "3"]), 2, reward_fn=broken)
    fault = reward_fault(kind, [wrong], needed=True)
    place = f"test_single_turn.py:{broken.__code__.co_firstlineno}"
    assert fault.endswith(f"broken ({place}) returned accuracy=nan, speed=-inf, wanted finite numbers")
    assert reward_fault(kind, [right], needed=True) is None


async def test_the_reward_is_not_computed_on_the_event_loop(stub_model):
    seen = []

    def slow(response, truth, *, finished):
        seen.append(threading.current_thread())
        return {"accuracy": 1.0}

    await run(AsyncSimpleWorkflow, stub_model(["2"]), reward_fn=slow)
    assert seen[0] is not threading.current_thread()


# -- math: a boxed answer, and an evaluation


RIGHT = "It is \\boxed{12}."
THOUGHT = "<think>3*4</think> It is \\boxed{12}."
PRODUCT = {"question": "3 times 4?", "answer": "12"}
MINE = FormatConfig(system_prompt="Mine.")


@BOTH_MATH
async def test_math_asks_for_a_boxed_number_and_compares_it(kind, stub_model):
    model = stub_model(["It is \\boxed{1,000.0}.", "999"])
    experiences = await run(kind, model, 2, raw_task={"question": "q", "answer": "so #### 1000"})
    assert [exp.reward for exp in experiences] == [1.0, 0.0]
    assert "\\boxed{}" in model.calls[0][0][0]["content"]


@BOXED
async def test_the_answer_is_in_the_box_and_the_form_is_worth_something(kind, stub_model):
    model = stub_model([RIGHT, "It is 12.", "\\boxed{13}"])
    experiences = await run(kind, model, 3, raw_task=PRODUCT)
    assert [exp.metrics["accuracy"] for exp in experiences] == [1.0, 0.0, 0.0]
    assert [exp.reward for exp in experiences] == [1.0, -0.1, 0.0]
    system, user = model.calls[0][0]
    assert "\\boxed{}" in system["content"]
    assert "<think>" not in system["content"]
    assert user == {"role": "user", "content": "3 times 4?"}


@BOXED
async def test_thinking_is_asked_for_and_looked_at(kind, stub_model):
    model = stub_model([THOUGHT, RIGHT])
    args = {"with_think": True, "format_score_coef": 0.25}
    experiences = await run(kind, model, 2, raw_task=PRODUCT, workflow_args=args)
    assert [exp.reward for exp in experiences] == [1.0, 0.75]
    assert "<think>" in model.calls[0][0][0]["content"]


@BOXED
async def test_a_base_model_gets_one_text(kind, stub_model):
    model = stub_model([RIGHT, RIGHT])
    args = {"workflow_args": {"use_base": True}, "rollout_args": {"temperature": 0.5}}
    experiences = await run(kind, model, 2, raw_task=PRODUCT, **args)
    assert [exp.reward for exp in experiences] == [1.0, 1.0]
    ([prompt], sampling) = model.calls[0]
    assert sampling == {"temperature": 0.5, "n": 2}
    assert prompt.endswith("\n\nProblem: 3 times 4?\nSolution:")
    assert "\\boxed{}" in prompt


@BOXED
async def test_what_was_cut_is_judged_but_not_trained_on(kind, stub_model):
    cut, whole = await run(kind, stub_model([(RIGHT, "response_truncated"), RIGHT]), 2, raw_task=PRODUCT)
    assert cut.action_mask.tolist() == [False] * cut.response_length
    assert cut.metrics["accuracy"] == 1.0
    assert cut.reward == pytest.approx(0.9)
    assert whole.action_mask.all()
    again = type(cut).deserialize(cut.serialize())
    assert (again.experience_type, again.action_mask.any().item()) == ("single_turn", False), "and so it travels"


@BOXED
async def test_the_task_says_otherwise(kind, stub_model):
    model = stub_model(["12"])
    (exp,) = await run(kind, model, raw_task=PRODUCT, reward_fn=char_match, format_args=MINE)
    assert exp.reward == 1.0
    assert model.calls[0][0][0]["content"] == "Mine."


@EVAL
async def test_the_yardstick_is_the_same_for_every_run_and_does_not_train(kind, stub_model):
    model = stub_model([RIGHT, (RIGHT, "response_truncated"), "13"])
    ignored = {"reward_fn": char_match, "format_args": MINE}
    experiences = await run(kind, model, 3, raw_task=PRODUCT, is_eval=True, **ignored)
    assert [exp.metrics for exp in experiences] == [
        {"accuracy": 1.0, "majority": 1.0, "finished": 1.0},
        {"accuracy": 1.0, "majority": 1.0, "finished": 0.0},
        {"accuracy": 0.0, "majority": 1.0, "finished": 1.0},
    ]
    assert "Mine." not in model.calls[0][0][0]["content"]
    with pytest.raises(TaskError, match=r"only measures; name it in buffer\.eval_tasksets"):
        task(kind).to_workflow(model)


# -- a reward that sees the conversation, as a reward model does


SEEN: list[tuple[Any, Any, Any]] = []


class RewardModel:
    """Likes answers near the truth."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, response: Any, messages: Any, ground_truth: Any = None) -> dict[str, float]:
        SEEN.append((response.response_text, messages, ground_truth))
        return {"near": -abs(float(response.response_text) - float(ground_truth)) * self.scale, "style": 0.5}


@JUDGES_CONVERSATION
async def test_it_sees_the_conversation_and_its_parts_are_metrics(kind, stub_model):
    SEEN.clear()
    record, reward = (
        {"question": "4 + 3 = ?", "answer": "7"},
        {"reward_fn": RewardModel, "reward_fn_args": {"scale": 2.0}},
    )
    experiences = await run(kind, stub_model(["7", "5"]), 2, 4, raw_task=record, **reward)
    assert [exp.reward for exp in experiences] == [0.5, -3.5]
    assert experiences[1].metrics == {"near": -4.0, "style": 0.5}
    assert [exp.eid.run for exp in experiences] == [4, 5]
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "4 + 3 = ?"}]
    assert SEEN[0] == ("7", messages, "7")
    with pytest.raises(TaskError, match=r"needs buffer.taskset.reward_fn: the dotted path"):
        task(kind).to_workflow(stub_model([]))


def test_each_kind_of_reward_where_the_other_is_wanted_says_so():
    def by_text(response, truth, *, finished):
        return {"accuracy": float(response == truth)}

    with pytest.raises(RewardError, match=r"by_text .* does not judge conversations, wanted a function that is called"):
        judge_conversation(create_reward(by_text, {}), None, [], "7")
    with pytest.raises(RewardError, match=r"Model.* judges the conversation .* use math_rm_workflow"):
        parts_of(create_reward(RewardModel, {}), "7", "7", finished=True)

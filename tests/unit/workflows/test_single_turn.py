import threading

import pytest

from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.models import PromptTooLong
from trinity_mq.rewards.text import char_match
from trinity_mq.rollout.failures import reward_fault
from trinity_mq.workflows import (
    AsyncSimpleWorkflow,
    SimpleWorkflow,
    Task,
    TaskError,
    execute,
)
from trinity_mq.workflows.builtin.math import AsyncMathWorkflow, MathBoxedWorkflow, MathWorkflow

BOTH = pytest.mark.parametrize("kind", [SimpleWorkflow, AsyncSimpleWorkflow])
BOTH_MATH = pytest.mark.parametrize("kind", [MathWorkflow, AsyncMathWorkflow])


def task(kind, **keys):
    keys.setdefault("raw_task", {"question": "1+1=", "answer": "2"})
    return Task(workflow=kind, **keys)


async def run(workflow):
    return await execute(lambda: workflow, type(workflow))


@BOTH
async def test_all_runs_are_asked_for_in_one_request(kind, stub_model):
    model = stub_model(["2", "3", "2"])
    workflow = task(kind, rollout_args={"temperature": 0.7, "n": 99}).to_workflow(model)
    workflow.set_repeat_times(3, 8)
    experiences = await run(workflow)
    assert model.calls == [([{"role": "user", "content": "1+1="}], {"temperature": 0.7, "n": 3})]
    assert [exp.eid.run for exp in experiences] == [8, 9, 10]
    assert [exp.reward for exp in experiences] == [1.0, 0.0, 1.0]
    assert [exp.metrics for exp in experiences] == [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 1.0}]


@BOTH
async def test_an_evaluation_says_what_the_majority_answers(kind, stub_model):
    workflow = task(kind, is_eval=True).to_workflow(stub_model(["3", " 2 ", "2", "4"]))
    workflow.set_repeat_times(4, 0)
    experiences = await run(workflow)
    assert [exp.metrics["majority"] for exp in experiences] == [1.0] * 4
    assert [exp.metrics["accuracy"] for exp in experiences] == [0.0, 1.0, 1.0, 0.0]
    (alone,) = await run(task(kind, is_eval=True).to_workflow(stub_model(["2"])))
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

    workflow = task(SimpleWorkflow, is_eval=True, reward_fn=right).to_workflow(stub_model(texts))
    workflow.set_repeat_times(len(texts), 0)
    assert {exp.metrics["majority"] for exp in await run(workflow)} == {majority}


GREEDY = {"greedy_baseline": True}


@BOTH
@pytest.mark.parametrize(
    ("runs", "base", "is_eval", "asked"),
    [(1, 0, False, [{"n": 1, "temperature": 0.0}]), (2, 3, False, [{"n": 2}]), (2, 0, True, [{"n": 2}])],
)
async def test_one_run_of_a_training_task_is_greedy_however_it_is_cut(kind, stub_model, runs, base, is_eval, asked):
    model = stub_model(["2", "3"])
    workflow = task(kind, workflow_args=GREEDY, is_eval=is_eval).to_workflow(model)
    workflow.set_repeat_times(runs, base)
    assert [exp.eid.run for exp in await run(workflow)] == list(range(base, base + runs))
    assert [keys for _, keys in model.calls] == asked


@BOTH
async def test_the_reward_is_the_sum_of_its_parts(kind, stub_model):
    made = task(kind, reward_fn=char_match, raw_task={"question": "q", "answer": "237"})
    (exp,) = await run(made.to_workflow(stub_model(["230"])))
    assert exp.reward == pytest.approx(0.5 * (0.8 * 2 / 3 + 0.2))
    assert exp.metrics == {"accuracy": 0.0, "partial_credit": exp.reward}


@BOTH
async def test_a_response_that_was_cut_is_not_exact(kind, stub_model):
    (exp,) = await run(task(kind).to_workflow(stub_model([("2", "response_truncated")])))
    assert exp.reward == 0.0


@BOTH
async def test_a_prompt_that_is_too_long_is_a_failure_and_is_not_judged(kind, stub_model):
    def never(response, truth, *, finished):
        raise AssertionError("judged")

    for workflow in (kind, MathBoxedWorkflow):
        made = task(workflow, reward_fn=never).to_workflow(stub_model([("2", "prompt_truncated")] * 2))
        made.set_repeat_times(2, 0)
        with pytest.raises(PromptTooLong, match=r"more than 2 tokens, the limit of model\.max_prompt_tokens"):
            await run(made)
    base = task(MathBoxedWorkflow, workflow_args={"use_base": True}, reward_fn=never)
    with pytest.raises(PromptTooLong):
        await run(base.to_workflow(stub_model([("2", "prompt_truncated")])))


@BOTH
async def test_a_reward_that_is_no_number_is_blamed_on_its_function(kind, stub_model):
    def broken(response, truth, *, finished):
        return {"accuracy": float("nan"), "speed": float("-inf")} if response == "2" else {"accuracy": 1.0}

    workflow = task(kind, reward_fn=broken).to_workflow(stub_model(["2", "3"]))
    workflow.set_repeat_times(2, 0)
    wrong, right = await run(workflow)
    fault = reward_fault(kind, [wrong], needed=True)
    place = f"test_single_turn.py:{broken.__code__.co_firstlineno}"
    assert fault.endswith(f"broken ({place}) returned accuracy=nan, speed=-inf, wanted finite numbers")
    assert reward_fault(kind, [right], needed=True) is None


@BOTH
def test_whether_a_run_is_greedy_is_true_or_false(kind, stub_model):
    with pytest.raises(TaskError, match="greedy_baseline is 'yes', wanted true or false"):
        task(kind, workflow_args={"greedy_baseline": "yes"}).to_workflow(stub_model([]))


async def test_the_reward_is_not_computed_on_the_event_loop(stub_model):
    seen = []

    def slow(response, truth, *, finished):
        seen.append(threading.current_thread())
        return {"accuracy": 1.0}

    await run(task(AsyncSimpleWorkflow, reward_fn=slow).to_workflow(stub_model(["2"])))
    assert seen[0] is not threading.current_thread()


@BOTH_MATH
async def test_math_asks_for_a_boxed_number_and_compares_it(kind, stub_model):
    model = stub_model(["It is \\boxed{1,000.0}.", "999"])
    workflow = task(kind, raw_task={"question": "q", "answer": "so #### 1000"}).to_workflow(model)
    workflow.set_repeat_times(2, 0)
    assert [exp.reward for exp in await run(workflow)] == [1.0, 0.0]
    assert "\\boxed{}" in model.calls[0][0][0]["content"]

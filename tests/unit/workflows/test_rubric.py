import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workflows.tiny_engines import scripted_judge
from trinity_mq.models import ModelWrapper
from trinity_mq.rewards.text import exact_match
from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.auxiliary import AuxiliaryError
from trinity_mq.workflows.builtin.rubric import AsyncRubricJudgeWorkflow, Criterion, RubricJudgeWorkflow, rubric_score

BOTH = pytest.mark.parametrize("kind", [RubricJudgeWorkflow, AsyncRubricJudgeWorkflow])
RUBRIC = [
    {"title": "Facts", "description": "All facts are right.", "weight": 3},
    "It is short.",
    {"description": "It is rude.", "weight": -2},
]


def by_text(met):
    """Return a judge's answer: it reads the one text in the question and looks up what it meets."""

    def answer(messages):
        text = re.search(r"<answer \w+>\n(.*?)\n</answer", messages[1]["content"], re.DOTALL).group(1)
        found = met[text]
        return found if isinstance(found, str | int) else f"Hm.\n{json.dumps(found)}"

    return answer


async def run(kind, model, judge, *, times=1, **keys):
    keys.setdefault("raw_task", {"question": "Say something.", "rubric": RUBRIC})
    made = Task(workflow=kind, **keys)
    wrapper = ModelWrapper(judge)
    workflow = made.to_workflow(model, [wrapper])
    workflow.set_repeat_times(times, 2)
    try:
        return await execute(lambda: workflow, kind)
    finally:
        await wrapper.aclose()


@BOTH
async def test_points_reached_over_points_there_are(kind, stub_model):
    met = {"good": [1, 1, 0], "half": [0.5, 0.5, 0], "rude": [1, True, 1], "bad": [0, 0, 1]}
    async with scripted_judge(by_text(met)) as judge:
        experiences = await run(kind, stub_model(["good", "half", "rude", "bad", "good"]), judge.model, times=5)
    assert [exp.reward for exp in experiences] == [1.0, 0.5, 0.5, 0.0, 1.0]
    assert [exp.eid.run for exp in experiences] == [2, 3, 4, 5, 6]
    assert experiences[1].metrics == {"rubric_score": 0.5, "judge_success": 1.0}
    assert experiences[1].info == {"rubric_met": [0.5, 0.5, 0.0]}
    assert len(judge.asked) == 4, "the same text is judged once"
    question = judge.asked[0][-1]["content"]
    assert "1. Facts: All facts are right.\n2. It is short.\n3. It is rude." in question


@BOTH
async def test_one_without_scores_is_neutral_among_the_others(kind, stub_model):
    met = {"a": [1, 1, 0], "b": [0, 0, 0], "c": "I cannot say."}
    async with scripted_judge(by_text(met)) as judge:
        experiences = await run(kind, stub_model(["a", "c", "b"]), judge.model, times=3)
    assert [exp.reward for exp in experiences] == [1.0, 0.5, 0.0]
    assert [exp.metrics["judge_success"] for exp in experiences] == [1.0, 0.0, 1.0]
    assert "no list of 3 scores" in experiences[1].info["judge_problem"]
    assert len(judge.asked) == 4, "asked twice about the one"


@BOTH
async def test_no_scores_at_all_are_zeros(kind, stub_model):
    async with scripted_judge("[1, 1]") as judge:
        experiences = await run(kind, stub_model(["a", "b"]), judge.model, times=2)
    assert [exp.reward for exp in experiences] == [0.0, 0.0]
    assert experiences[0].info["judge_problem"] == "its last list has 2 scores, wanted 3"


@BOTH
async def test_failures_are_errors_with_a_reason(kind, stub_model):
    async with scripted_judge(by_text({"a": "x", "b": "x"})) as judge:
        args = {"on_bad_judge": "fail", "judge_tries": 1}
        with pytest.raises(AuxiliaryError, match="no scores in 1 tries"):
            await run(kind, stub_model(["a", "b"]), judge.model, times=2, workflow_args=args)
    async with scripted_judge(by_text({"a": 401, "b": [1, 1, 1]})) as judge:
        with pytest.raises(AuxiliaryError, match="cannot be asked"):
            await run(kind, stub_model(["a", "b"]), judge.model, times=2)


@BOTH
async def test_the_judge_is_not_shown_thoughts(kind, stub_model):
    async with scripted_judge(by_text({"a": [1, 1, 0], "": [0, 0, 0]})) as judge:
        experiences = await run(kind, stub_model(["<think>b?</think>a", "<think>a? Let"]), judge.model, times=2)
    assert [exp.reward for exp in experiences] == [1.0, 0.0]


@BOTH
async def test_prompts_that_were_cut_are_not_judged(kind, stub_model):
    async with scripted_judge("[1, 1, 0]") as judge:
        model = stub_model([("[masked]", "prompt_truncated"), "a"])
        experiences = await run(kind, model, judge.model, times=2)
    assert [exp.reward for exp in experiences] == [0.0, 1.0]
    assert len(judge.asked) == 1


@BOTH
async def test_a_rubric_for_all_tasks_and_one_of_a_tasks_own(kind, stub_model):
    async with scripted_judge("[1]") as judge:
        args = {"rubric": ["Ends with a dot."]}
        await run(kind, stub_model(["a"]), judge.model, raw_task={"question": "q"}, workflow_args=args)
        own = {"question": "q", "rubric": ["Has two words."]}
        await run(kind, stub_model(["a"]), judge.model, raw_task=own, workflow_args=args)
    assert "Ends with a dot." in judge.asked[0][-1]["content"]
    assert "Has two words." in judge.asked[1][-1]["content"]


@BOTH
async def test_the_rule_of_the_task_is_a_metric(kind, stub_model):
    async with scripted_judge("[0, 0, 0]") as judge:
        record = {"question": "q", "answer": "7", "rubric": RUBRIC}
        (exp,) = await run(kind, stub_model(["7"]), judge.model, raw_task=record, reward_fn=exact_match)
    assert (exp.reward, exp.metrics["gold_reward"]) == (0.0, 1.0)


@BOTH
@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        (None, r"workflow_args\.rubric is missing"),
        ([], r"raw_task\.rubric"),
        ("Be good.", r"raw_task\.rubric is 'Be good\.'"),
        ([{"description": "x", "wait": 1}], r"raw_task\.rubric\.0\.wait"),
        ([{"description": "x", "weight": -1}], "no criterion has a weight above 0"),
        ([{"description": "x", "weight": float("nan")}], r"raw_task\.rubric\.0\.weight"),
        (["x"] * 51, "at most 50"),
        ([3], r"raw_task\.rubric\.0"),
    ],
)
async def test_rubrics_that_cannot_be_are_the_tasks_fault(kind, rubric, said, stub_model):
    async with scripted_judge("[1]") as judge:
        with pytest.raises(TaskError, match=said):
            await run(kind, stub_model(["a"]), judge.model, raw_task={"question": "q", "rubric": rubric})


WEIGHTS = st.lists(st.floats(-5, 5), min_size=1, max_size=6).filter(lambda found: max(found) > 0.01)


@given(data=st.data(), weights=WEIGHTS)
def test_scores_stay_in_range_and_more_met_is_never_less(data, weights):
    rubric = [Criterion(description="x", weight=weight) for weight in weights]
    met = data.draw(st.lists(st.floats(0, 1), min_size=len(weights), max_size=len(weights)))
    score = rubric_score(rubric, met)
    assert 0 <= score <= 1
    better = [1.0 if weight > 0 else share for weight, share in zip(weights, met, strict=True)]
    assert rubric_score(rubric, better) >= score - 1e-9
    assert rubric_score(rubric, [float(weight > 0) for weight in weights]) == 1.0

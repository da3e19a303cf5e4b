"""Judges that are real models behind a real engine server: random weights say nothing of use, and that is counted."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.workflows.tiny_engines import make_generator, tiny_engine
from trinity_mq.models import EngineClients, ModelWrapper
from trinity_mq.workflows import Task, execute, load_workflow
from trinity_mq.workflows.auxiliary import AuxiliaryError

NAMES = ["ruler_workflow", "async_ruler_workflow", "rubric_judge_workflow", "async_rubric_judge_workflow"]
RUBRIC = {"rubric": ["It is short.", {"description": "It is wrong.", "weight": -1}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    return {
        "student": make_generator(folder / "student", seed=1, max_model_len=512),
        "judge": make_generator(folder / "judge", seed=2),
        "narrow": make_generator(folder / "narrow", seed=2, max_model_len=64),
    }


async def judged(models, name, judge, failing=None):
    """Return the experiences of three runs of one task, or what it failed with where that is to match ``failing``."""
    kind = load_workflow(name)
    given = {"judge_max_tokens": 12, **(RUBRIC if "rubric" in name else {})}
    task = Task(workflow=kind, raw_task={"question": "Name a prime."}, workflow_args=given)
    async with tiny_engine(models["student"], "student") as here, tiny_engine(models[judge], judge) as there:
        async with EngineClients() as clients:
            model = ModelWrapper(here, clients=clients, max_response_tokens=8)
            wrappers = [ModelWrapper(there, clients=clients)]
            workflow = await asyncio.to_thread(task.to_workflow, model, wrappers)
            workflow.set_repeat_times(3, 0)
            try:
                if failing is None:
                    return await execute(lambda: workflow, kind)
                with pytest.raises(AuxiliaryError, match=failing) as caught:
                    await execute(lambda: workflow, kind)
                return caught.value
            finally:
                for one in (model, *wrappers):
                    await one.aclose()


@pytest.mark.parametrize("name", NAMES)
async def test_a_judge_that_says_nothing_of_use_teaches_nothing_and_is_counted(models, name):
    experiences = await judged(models, name, "judge")
    assert [one.eid.run for one in experiences] == [0, 1, 2]
    assert len({one.reward for one in experiences}) == 1, "no advantage for anybody"
    assert {one.metrics["judge_success"] for one in experiences} == {0.0}
    assert all("there is no list of" in one.info["judge_problem"] for one in experiences)
    assert all(one.versions and len(one.logprobs) == one.response_length for one in experiences)


@pytest.mark.parametrize("name", NAMES)
async def test_a_question_too_long_for_the_judge_fails_the_run_with_its_words(models, name):
    said = r"the judge 'narrow' at http://.* cannot be asked: .*the prompt has at least \d+ tokens, 63 are allowed"
    assert (await judged(models, name, "narrow", failing=said)).lost is None, "it is there, and to be asked again"

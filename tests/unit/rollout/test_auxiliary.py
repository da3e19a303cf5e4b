"""Auxiliary models on the way to a workflow: chosen by beats, handed over in order, in the runner and in a process of
its own; and an evaluation that one of them answers."""

import asyncio
import sys

import pytest

from tests.unit.models.test_engine_selection import Engines
from tests.unit.rollout.scripted_engine import completion, scripted_engine
from trinity_agents.runner.process_pool import ProcessPool
from trinity_agents.runner.slice_executor import SliceExecutor
from trinity_mq.config import load_config
from trinity_mq.messages import Heartbeat, TaskBody, TaskSlice
from trinity_mq.models import InferenceModel
from trinity_mq.models.engine_selection import BACKOFF, STALE, AuxiliaryAsPolicy, auxiliary_models
from trinity_mq.models.errors import EngineLost
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.runtime.deliveries import CrashLog, DeliveryHistory
from trinity_mq.testing.virtual_time import run_virtually

ASKS = """
from trinity_mq.workflows import Workflow
from trinity_mq.workflows.auxiliary import auxiliary_errors

class Judged(Workflow):
    is_async = True
    async def run_async(self):
        ask = [{"role": "user", "content": "q"}]
        experiences = await self.model.chat_async(ask)
        names = []
        for judge in self.auxiliary_model_wrappers:
            HOW
        experiences[0].reward = 1.0
        experiences[0].info = {"names": names}
        return experiences
"""
SAID = """(said,) = await judge.chat_async(ask)
            names.append(f"{judge.model_name} said {said.response_text}")"""
WORKFLOW = ASKS.replace("HOW", SAID)
BY_OPENAI = ASKS.replace("HOW", "await judge.get_openai_async_client().chat.completions.create(messages=ask)")
CAUGHT = """with auxiliary_errors(judge, "judge"):
                await judge.chat_async(ask)"""
CATCHING = ASKS.replace("HOW", CAUGHT)


@pytest.fixture
def workflow(tmp_path, monkeypatch):
    (tmp_path / "judged_workflow.py").write_text(WORKFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "judged_workflow.Judged"
    sys.modules.pop("judged_workflow", None)


def config():
    judges = [{"name": name, "engine": "external", "url": "http://127.0.0.1:9/v1"} for name in ("judge", "critic")]
    return load_config({"name": "x", "model": {"tiny": {}}, "explorer": {"auxiliary_models": judges}})


def a_slice(workflow, **task):
    body = TaskBody(workflow=workflow, **task)
    lane = "eval" if task.get("is_eval") else "train"
    times = {"max_timeout": 20.0, "slice_timeout": 40.0, "max_retry_times": 0}
    pinned = (9, 9) if lane == "eval" else None
    return TaskSlice(batch=1, ticket="t", task_id=0, task=body, lane=lane, pinned=pinned, **times)


DEAD_JUDGE = InferenceModel("dead-judge", "http://127.0.0.1:9", "judge", role="auxiliary")
DEAD_POLICY = InferenceModel("policy-7", "http://127.0.0.1:9", "m")


class Alive:
    """Engines that are known."""

    def __init__(self, policy, **models):
        self.policy, self.models, self.gone = policy, models, []

    def __call__(self):
        return self.policy

    def auxiliary(self, name):
        if name not in self.models:
            raise EngineLost(f"no living engine of auxiliary model {name!r} is known")
        return self.models[name]

    def lost(self, engine):
        self.gone.append(engine.id)


class Held:
    """The part of an in-flight slice that the executor needs."""

    detached = False

    def __init__(self, task_slice, before=0):
        from trinity_mq.rollout.run_results import RunResults

        self.task_slice, self.results, self.running, self.seconds = task_slice, RunResults(), False, 0.0
        self.past, self.name = DeliveryHistory(returned=before), "slice"

    def absorb_cancel(self):
        return False


ALONE = {"on_detached": lambda work: None, "crash_notes": CrashLog()}


def judge(engine, name):
    return InferenceModel(engine.model.id, engine.model.url, name, role="auxiliary")


@pytest.mark.parametrize("before", [0, 1])
async def test_a_workflow_gets_them_in_the_order_of_the_configuration(workflow, before):
    """Also one that runs in a process of its own, since its slice came back."""
    async with scripted_engine() as policy, scripted_engine("j") as first, scripted_engine("c") as second:
        first.script = lambda body: completion("good")
        second.script = lambda body: completion("bad")
        models = Alive(policy.model, critic=judge(second, "critic"), judge=judge(first, "judge"))
        pool = ProcessPool(1)
        executor = SliceExecutor(config(), models, workflows=WorkflowRunner(config(), None), isolated=pool, **ALONE)
        outcome = await executor.execute(Held(a_slice(workflow), before))
        await executor.close()
    assert outcome.message is None
    assert outcome.experiences[0].info["names"] == ["judge said good", "critic said bad"]
    assert {body["model"] for body in first.requests} == {"judge"}


@pytest.mark.parametrize("before", [0, 1])
async def test_an_evaluation_is_answered_by_the_model_it_names(workflow, before):
    async with scripted_engine() as policy, scripted_engine("j") as other:
        models = Alive(policy.model, judge=judge(other, "judge"), critic=judge(other, "critic"))
        executor = SliceExecutor(config(), models, workflows=WorkflowRunner(config(), None), isolated=None, **ALONE)
        asked = a_slice(workflow, is_eval=True, rollout_args={"model": "judge"})
        outcome = await executor.execute(Held(asked, before))
        assert len(outcome.runs) == 1
        assert policy.requests == []
        assert other.requests[0]["model"] == "judge"
        assert "X-TMQ-Version" not in other.headers[0], "its versions are not the policy's"
        # in training the policy answers, whatever a task says
        await executor.execute(Held(a_slice(workflow, rollout_args={"model": "judge"})))
        assert len(policy.requests) == 1
        await executor.close()


class Moving(Alive):
    """Another engine takes over from the one that was lost."""

    def __init__(self, policy, then, **models):
        super().__init__(policy, **models)
        self.then = then

    def lost(self, engine):
        super().lost(engine)
        self.models[engine.name] = self.then


@pytest.mark.parametrize(
    ("kind", "retries", "before"), [(WORKFLOW, 0, 0), (BY_OPENAI, 0, 0), (CATCHING, 1, 0), (WORKFLOW, 0, 1)]
)
async def test_a_judge_that_is_lost_is_named_and_left_out_and_the_rollout_engine_is_not(
    tmp_path, workflow, kind, retries, before
):
    (tmp_path / "judged_workflow.py").write_text(kind)
    async with scripted_engine() as policy, scripted_engine("j") as other:
        models = Moving(policy.model, judge(other, "judge"), judge=DEAD_JUDGE, critic=judge(other, "critic"))
        pool = ProcessPool(1)
        executor = SliceExecutor(config(), models, workflows=WorkflowRunner(config(), None), isolated=pool, **ALONE)
        task_slice = a_slice(workflow).model_copy(update={"max_retry_times": retries})
        outcome = await executor.execute(Held(task_slice, before))
        await executor.close()
    assert outcome.runs == [0], outcome.message
    assert models.gone == ["dead-judge"]
    assert len(policy.requests) == 2, "the answers are made anew"


@pytest.mark.parametrize(
    ("kind", "judges", "message", "gone"),
    [
        pytest.param(WORKFLOW, {}, "no living engine of auxiliary model 'judge' is known", set(), id="no judge"),
        *(
            pytest.param(
                kind,
                {"judge": DEAD_JUDGE, "critic": DEAD_JUDGE},
                "engine of auxiliary model 'judge' dead-judge is lost: http://127.0.0.1:9",
                {"dead-judge"},
                id=f"a lost judge{how}",
            )
            for kind, how in ((WORKFLOW, ""), (BY_OPENAI, ", asked by a client of OpenAI"))
        ),
        pytest.param(WORKFLOW, None, "rollout engine policy-7 is lost: http://127.0.0.1:9", {"policy-7"}, id="policy"),
    ],
)
async def test_the_error_says_who_is_missing_or_was_lost(tmp_path, workflow, kind, judges, message, gone):
    (tmp_path / "judged_workflow.py").write_text(kind)
    async with scripted_engine() as policy, scripted_engine("j") as other:
        if judges is None:
            models = Alive(DEAD_POLICY, judge=judge(other, "judge"), critic=judge(other, "critic"))
        else:
            models = Alive(policy.model, **judges)
        runner = WorkflowRunner(config(), None)
        task_slice = a_slice(workflow).model_copy(update={"slice_timeout": 1.5, "max_timeout": 1.5})
        outcome = await runner.run_slice(task_slice, models)
        await runner.close()
    assert outcome.runs == []
    assert message in outcome.message
    assert set(models.gone) == gone
    assert judges != {} or policy.requests == [], "nothing was begun that could not be finished"


def test_one_asked_in_place_of_the_policy_is_told_apart_when_it_is_lost():
    models = Alive(InferenceModel("p", "u", "m"), judge=InferenceModel("j", "u", "judge", role="auxiliary"))
    answering = AuxiliaryAsPolicy("judge", models)
    answering.lost(answering())
    assert models.gone == ["j"]
    assert answering.auxiliary("judge").id == "j"
    assert auxiliary_models(["judge"], lambda: None) == [], "a caller that knows no engines gives them itself"


class Named(Engines):
    """The model's name, too, is the test's to say."""

    def beat(self, engine, **detail):
        self.seq += 1
        said = {"id": engine, "url": f"http://{engine}", "name": "m", "role": "rollout", "version": [1, 0], **detail}
        self.beats[engine] = Heartbeat(
            role="engine", id=engine, seq=self.seq, incarnation="x", lease=10.0, state="working", detail=said
        )
        self.choice.receive()


def test_the_engine_of_an_auxiliary_model_is_chosen_like_any():
    async def main():
        engines = Named()
        beat = engines.beat

        def judges(**first):
            beat("j1", name="judge", role="auxiliary", version=None, **{"load": 5, **first})
            beat("j2", name="judge", role="auxiliary", version=None, load=0)
            beat("c1", name="critic", role="auxiliary", version=None, load=0)
            beat("p", load=0)

        judges()
        with pytest.raises(EngineLost, match="no living engine of auxiliary model 'nobody'"):
            engines.choice.auxiliary("nobody")
        assert {engines.choice.auxiliary("judge").id for _ in range(5)} == {"j2"}
        assert engines.choice.auxiliary("critic").id == "c1"
        assert engines.chosen() == {"p": 20}
        judges()
        engines.choice.lost(engines.choice.auxiliary("judge"))
        assert {engines.choice.auxiliary("judge").id for _ in range(9)} == {"j1"}
        await asyncio.sleep(max(BACKOFF, STALE) + 0.1)
        judges(load=0)
        engines.beats["j2"] = engines.beats["j2"].model_copy(update={"state": "holding"})
        engines.choice.receive()
        assert {engines.choice.auxiliary("judge").id for _ in range(9)} == {"j1"}, "the other one's server is away"

    run_virtually(main())

import pytest

from trinity_mq.workflows import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    RunFailedError,
    StepWiseRewardWorkflow,
    Task,
    execute,
)


class Steps:
    """Asks until the answer is "stop"; the third step asks twice."""

    max_step_num = 5

    def step(self, step_num):
        answer = self.client.ask()
        if step_num == 2:
            answer = self.client.ask()
        return answer != "stop"

    async def step_async(self, step_num):
        answer = await self.client.ask()
        if step_num == 2:
            answer = await self.client.ask()
        return answer != "stop"


class Stepwise(Steps, StepWiseRewardWorkflow):
    def reward(self, exps, step_num):
        return step_num * 10 + len(exps)


class AsyncStepwise(Steps, AsyncStepWiseRewardWorkflow):
    async def reward_async(self, exps, step_num):
        return step_num * 10 + len(exps)


class Propagation(Steps, RewardPropagationWorkflow):
    def reward(self, exps):
        return float(len(exps))


class AsyncPropagation(Steps, AsyncRewardPropagationWorkflow):
    async def reward_async(self, exps):
        return float(len(exps))


STEP_WISE = pytest.mark.parametrize("kind", [Stepwise, AsyncStepwise])
PROPAGATION = pytest.mark.parametrize("kind", [Propagation, AsyncPropagation])
ALL = pytest.mark.parametrize("kind", [Stepwise, AsyncStepwise, Propagation, AsyncPropagation])


async def run(kind, model, **keys):
    return await execute(lambda: kind(task=Task(workflow=kind), model=model, **keys), kind)


@STEP_WISE
async def test_each_step_gets_its_own_reward(kind, stub_model):
    experiences = await run(kind, stub_model(["a", "b", "c", "stop", "never"], enable_history=True))
    assert [exp.response_text for exp in experiences] == ["a", "b", "c", "stop"]
    assert [exp.eid.step for exp in experiences] == [0, 1, 2, 2]
    assert [exp.reward for exp in experiences] == [1, 11, 22, 22]


@PROPAGATION
async def test_a_run_without_steps_is_rewarded_too(kind, stub_model):
    rewarded = []

    class NoSteps(kind):
        max_step_num = 0

        def reward(self, exps):
            rewarded.append(exps)
            return 0.0

        async def reward_async(self, exps):
            return self.reward(exps)

    with pytest.raises(RunFailedError, match="returned no experience"):
        await run(NoSteps, stub_model([], enable_history=True))
    assert rewarded == [[]]


@ALL
async def test_a_truncated_answer_makes_its_step_the_last(kind, stub_model):
    answers = ["a", ("b", "response_truncated"), "c"]
    experiences = await run(kind, stub_model(answers, enable_history=True))
    assert [exp.response_text for exp in experiences] == ["a", "b"]
    assert all(exp.reward is not None for exp in experiences)


@ALL
def test_the_client_fits_the_workflow_and_is_only_made_if_wanted(kind, stub_model):
    model = stub_model([], enable_history=True)
    workflow = kind(task=Task(workflow=kind), model=model)
    assert workflow.client.kind == ("async" if kind.is_async else "sync")
    assert not workflow.repeatable
    assert len(model.clients) == 1
    assert kind(task=Task(workflow=kind), model=model, use_openai_client=False).client is None
    assert len(model.clients) == 1

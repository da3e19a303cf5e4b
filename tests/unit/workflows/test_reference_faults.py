"""Faults of the system that ours follows, each shown not to be here (shared/reference: sections 2.10, 4 and 8.1)."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from tests.unit.workflows.running import running
from trinity_mq.testing.scripted import ScriptedGenerator
from trinity_mq.workflows import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    SimpleWorkflow,
    StepWiseRewardWorkflow,
    Task,
    Workflow,
)


def task(kind, **keys):
    return Task(workflow=kind, raw_task={"question": "1", "answer": "1"}, batch_id=1, task_id=0, **keys)


def ask(workflow):
    messages = [{"role": "user", "content": "1"}]
    return workflow.client.chat.completions.create(model=workflow.model.model_name, messages=messages)


class Late(StepWiseRewardWorkflow):
    """The first attempt fails, and something of it asks on in the middle of the second."""

    max_step_num = 2
    attempts = 0
    late_may_ask, late_has_asked = threading.Event(), threading.Event()

    def step(self, step_num):
        type(self).attempts += step_num == 0
        ask(self)
        if self.attempts == 1:
            threading.Thread(target=self.ask_late).start()
            raise RuntimeError("first attempt")
        if step_num == 0:
            self.late_may_ask.set()
            assert self.late_has_asked.wait(30)
        return True

    def ask_late(self):
        try:
            assert self.late_may_ask.wait(30)
            self.late = self.model.chat([{"role": "user", "content": "1"}])
        finally:
            self.late_has_asked.set()

    def reward(self, exps, step_num):
        return 1.0


async def test_w15_a_retry_shares_nothing_with_the_attempt_that_was_given_up(tmp_path):
    scripted = ScriptedGenerator(["first", "second", "late", "third"])
    async with running(scripted, tmp_path, max_retry_times=1) as runner:
        status, experiences = await runner.run_task_async(task(Late))
    assert status.ok, status.message
    assert len(scripted.prompts) == 4, "it did ask"
    assert [one.response_text for one in experiences] == ["second", "third"]


class Blocks(Workflow):
    begun, release = threading.Event(), threading.Event()

    def run(self):
        self.begun.set()
        assert self.release.wait(30), "the event loop stood still"
        return self.model.chat([{"role": "user", "content": "1"}], n=1)


async def test_w16_a_blocking_workflow_does_not_hold_the_event_loop(tmp_path):
    async def let_go():
        assert await asyncio.to_thread(Blocks.begun.wait, 30)
        Blocks.release.set()

    async with running(ScriptedGenerator(["1", "1"]), tmp_path, max_timeout=40.0) as runner:
        (status, _), _ = await asyncio.gather(runner.run_task_async(task(Blocks), 2), let_go())
    assert status.ok, status.message


class Half(Workflow):
    """Fails in its second run, after it has asked."""

    calls = 0

    def run(self):
        experiences = self.model.chat([{"role": "user", "content": "1"}])
        type(self).calls += 1
        if type(self).calls == 2:
            raise RuntimeError("went wrong")
        return experiences


async def test_w20_status_and_data_agree_when_a_run_fails(tmp_path):
    Half.calls = 0
    async with running(ScriptedGenerator(["1"] * 3), tmp_path) as runner:
        status, experiences = await runner.run_task_async(task(Half), 3)
    assert not status.ok
    assert status.completed_runs == len(experiences) == len({one.eid.run for one in experiences}) == 2
    assert "RuntimeError: went wrong" in status.message


class TooFew(SimpleWorkflow):
    def run(self):
        return super().run()[:1]


async def test_a_repeatable_workflow_does_not_count_runs_it_did_not_do(tmp_path):
    async with running(ScriptedGenerator(["1"] * 3), tmp_path) as runner:
        status, experiences = await runner.run_task_async(task(TooFew), 3)
    assert (status.ok, status.completed_runs, len(experiences)) == (False, 1, 1)
    assert "no experience for runs [1, 2]" in status.message


class StepWise(StepWiseRewardWorkflow):
    max_step_num = 1

    def step(self, step_num):
        assert isinstance(self.client, openai.OpenAI)
        ask(self)
        return True

    def reward(self, exps, step_num):
        return 1.0


class AsyncStepWise(AsyncStepWiseRewardWorkflow):
    max_step_num = 1

    async def step_async(self, step_num):
        assert isinstance(self.client, openai.AsyncOpenAI), "there it is the synchronous one"
        await ask(self)
        return True

    async def reward_async(self, exps, step_num):
        return 1.0


class Propagation(StepWise, RewardPropagationWorkflow):
    body = RewardPropagationWorkflow.body

    def reward(self, exps):
        return 1.0


class AsyncPropagation(AsyncStepWise, AsyncRewardPropagationWorkflow):
    body = AsyncRewardPropagationWorkflow.body

    async def reward_async(self, exps):
        return 1.0


ALL = [StepWise, AsyncStepWise, Propagation, AsyncPropagation]


@pytest.mark.parametrize("kind", ALL)
async def test_each_twin_has_the_client_of_its_kind(tmp_path, kind):
    async with running(ScriptedGenerator(["1"]), tmp_path) as runner:
        status, (one,) = await runner.run_task_async(task(kind))
    assert (status.ok, one.reward) == (True, 1.0), status.message


@pytest.mark.parametrize("kind", ALL)
async def test_without_history_the_setting_is_named_and_nothing_is_tried_again(tmp_path, kind):
    made = []

    class Counted(kind):
        def __init__(self, **given):
            made.append(self)
            super().__init__(**given)

    off = {"enable_history": False}
    async with running(ScriptedGenerator([]), tmp_path, max_retry_times=5, rollout_model=off) as runner:
        status, _ = await runner.run_task_async(task(Counted))
    assert "explorer.rollout_model.enable_history: true" in status.message
    assert len(made) == 1

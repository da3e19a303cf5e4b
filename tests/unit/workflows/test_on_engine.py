"""Every built-in workflow of this package's core on a real tiny model behind a real engine server."""

import threading

import pytest
import torch

from tests.unit.workflows.scripted_runs import run_scripted
from tests.unit.workflows.tiny_engines import make_generator, running
from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config import AlgorithmConfig
from trinity_mq.engines.generation.request import ScoreRequest
from trinity_mq.experience import ExperienceBatch
from trinity_mq.models.recording.responses import MASKED_TEXT
from trinity_mq.testing.scripted import ScriptedGenerator
from trinity_mq.workflows import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
    Task,
    load_workflow,
)

TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(' ') + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
QUESTION = [{"role": "user", "content": "1"}]
TOOLS = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def in_a_thread(response: str, truth: str) -> float:
    return float(threading.current_thread().name == "reward")


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return make_generator(tmp_path_factory.mktemp("chatting") / "model", chat_template=TEMPLATE)


def check_exact(generator, experiences):
    """The tokens are those that were sampled: the same weights give them the same logprobs."""
    for one in experiences:
        scored = generator.score([ScoreRequest(one.tokens.tolist(), one.temperature)])[0]
        again = torch.tensor(scored[one.prompt_length - 1 :])
        assert torch.allclose(one.logprobs, again, atol=1e-4), (one.logprobs, again)
        assert generator.codec.decode([one.tokens[: one.prompt_length].tolist()]) == [one.prompt_text]
        assert (one.version_min, one.version_max) == ((1, 7), (1, 7))


CASES = [
    ("simple_workflow", {}, "12"),
    ("math_answer_workflow", {}, "12"),
    ("math_workflow", {}, "12"),
    ("math_boxed_workflow", {}, "12"),
    ("boxed_answer_workflow", {"with_think": True, "use_base": True, "format_score_coef": 0.25}, "12"),
    ("math_benchmark_workflow", {}, "12"),
    ("tool_choice_workflow", {"tools": TOOLS}, [{"name": "add", "arguments": {"a": 1}}]),
    ("tool_agent_workflow", {"tools": [f"{__name__}.multiply"]}, "12"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "truth"), [case for case in CASES if not {"benchmark", "agent"} & set(case[0].split("_"))]
)
async def test_a_greedy_run_is_the_baseline_of_the_others(generator, tmp_path, name, arguments, truth):
    """From the request to the tokens of a train step, for the algorithm remax."""
    task = Task(
        workflow=load_workflow(f"async_{name}"),
        raw_task={"question": "What is 3 times 4?", "answer": truth},
        workflow_args={**arguments, "greedy_baseline": True},
        batch_id=3,
        task_id=5,
    )
    async with running(generator, tmp_path, max_response_tokens=12) as runner:
        (status, experiences), (_, again) = [await runner.run_task_async(task, 3, 0) for _ in range(2)]
    assert status.ok, status.message
    assert [one.eid.run for one in experiences] == [0, 1, 2]
    greedy, *others = experiences
    assert greedy.tokens.tolist() == again[0].tokens.tolist()
    check_exact(generator, experiences)
    greedy.reward, (first, second) = 0.25, others
    first.reward, second.reward = 1.0, 0.0
    algorithm = AlgorithmConfig(algorithm_type="remax", repeat_times=3)
    batch = ExperienceBatch.of(experiences)
    kept, metrics = estimate(batch, algorithm.estimator, min_group_runs=algorithm.effective_min_group_runs)
    found = [(one.eid.run, float(one.advantages.sum() / max(one.action_mask.sum(), 1))) for one in kept]
    trained = {one.eid.run for one in others if one.action_mask.any()}  # boxed math masks what was cut
    assert found == [(1, 0.75 * (1 in trained)), (2, -0.25 * (2 in trained))]
    assert metrics["rollout/partial_groups"] == 0
    assert not greedy.action_mask.any(), "no estimator would train on it"


@pytest.mark.parametrize("twin", ["", "async_"])
@pytest.mark.parametrize(("name", "arguments", "truth"), CASES)
async def test_built_in_workflows_sample_and_judge(generator, tmp_path, twin, name, arguments, truth):
    kind = load_workflow(twin + name)
    assert kind.is_async == bool(twin)
    task = Task(
        workflow=kind,
        raw_task={"question": "What is 3 times 4?", "answer": truth},
        workflow_args=arguments,
        is_eval="benchmark" in name,
        batch_id=3,
        task_id=5,
    )
    async with running(generator, tmp_path, max_response_tokens=12) as runner:
        status, experiences = await runner.run_task_async(task, 2, 4)
    assert status.ok, status.message
    assert sorted({one.eid.rid for one in experiences}) == ["3/5/4", "3/5/5"]
    assert all(isinstance(one.reward, float) and "accuracy" in one.metrics for one in experiences)
    check_exact(generator, experiences)
    first, second = experiences[0], experiences[-1]
    assert first.tokens[first.prompt_length :].tolist() != second.tokens[second.prompt_length :].tolist()


class Asks:
    """Three steps, the last with two questions, each with what was answered before."""

    max_step_num = 3
    stop_on_truncation = False

    def __init__(self, **given):
        super().__init__(**given)
        self.messages = [{"role": "user", "content": "1"}]

    def request(self):
        return {"model": self.model.model_name, "messages": self.messages, "max_tokens": 5}

    def hear(self, completion):
        text = completion.choices[0].message.content
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "2"}]


class Sync(Asks):
    def step(self, step_num):
        for _ in range(1 + step_num // 2):
            self.hear(self.client.chat.completions.create(**self.request()))
        return True


class Async(Asks):
    async def step_async(self, step_num):
        for _ in range(1 + step_num // 2):
            self.hear(await self.client.chat.completions.create(**self.request()))
        return True


class Stepwise(Sync, StepWiseRewardWorkflow):
    def reward(self, exps, step_num):
        return step_num * 10 + len(exps)


class AsyncStepwise(Async, AsyncStepWiseRewardWorkflow):
    async def reward_async(self, exps, step_num):
        return step_num * 10 + len(exps)


class Propagation(Sync, RewardPropagationWorkflow):
    def reward(self, exps):
        return float(len(exps))


class AsyncPropagation(Async, AsyncRewardPropagationWorkflow):
    async def reward_async(self, exps):
        return float(len(exps))


STEPS = pytest.mark.parametrize("kind", [Stepwise, AsyncStepwise, Propagation, AsyncPropagation])


@STEPS
async def test_steps_are_the_recorded_calls_token_for_token(generator, tmp_path, kind):
    async with running(generator, tmp_path, max_response_tokens=12) as runner:
        status, experiences = await runner.run_task_async(Task(workflow=kind, raw_task={}, batch_id=1, task_id=0), 3)
    assert status.ok, status.message
    assert [(one.eid.run, one.eid.step) for one in experiences] == [
        (run, step) for run in range(3) for step in (0, 1, 2, 2)
    ]
    wanted = [1, 11, 22, 22] if "Stepwise" in kind.__name__ else [4.0] * 4
    assert [one.reward for one in experiences] == wanted * 3
    check_exact(generator, experiences)
    for run in range(3):
        first, second = (one for one in experiences if one.eid.run == run and one.eid.step < 2)
        said = first.response_text.removesuffix("<eos>")
        assert second.prompt_text.startswith(first.prompt_text + said), "a step sees what was answered before"


@STEPS
async def test_a_prompt_that_is_too_long_ends_the_run_with_what_there_is(tmp_path, kind):
    scripted = ScriptedGenerator(["x" * 60] * 3, max_model_len=30)
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(Task(workflow=kind, raw_task={}, batch_id=1, task_id=0))
    assert status.ok, status.message
    assert len(scripted.prompts) == 1
    *good, masked = experiences
    assert [one.eid.step for one in good] == list(range(len(scripted.prompts)))
    assert (masked.eid.step, masked.truncate_status) == (len(good), "prompt_truncated")
    assert not masked.action_mask.any()
    assert masked.reward == (0.0 if "Stepwise" in kind.__name__ else float(len(experiences)))


@STEPS
def test_a_client_is_only_made_if_it_is_wanted(kind, stub_model):
    model = stub_model([], enable_history=True)
    assert kind(task=Task(workflow=kind), model=model, use_openai_client=False).client is None


@STEPS
async def test_without_history_the_setting_is_named_and_nothing_is_tried_again(tmp_path, kind):
    made = []

    class Counted(kind):
        def __init__(self, **given):
            made.append(self)
            super().__init__(**given)

    off = {"enable_history": False}
    async with running(ScriptedGenerator([]), tmp_path, max_retry_times=5, rollout_model=off) as runner:
        status, _ = await runner.run_task_async(Task(workflow=Counted, raw_task={}, batch_id=1, task_id=0))
    assert "explorer.rollout_model.enable_history: true" in status.message
    assert len(made) == 1


@STEPS
async def test_a_truncated_answer_makes_its_step_the_last(tmp_path, kind):
    class Stops(kind):
        stop_on_truncation = True

    async with running(ScriptedGenerator(["a", "b" * 9, "c"]), tmp_path) as runner:
        status, experiences = await runner.run_task_async(Task(workflow=Stops, raw_task={}, batch_id=1, task_id=0))
    assert status.ok, status.message
    assert [exp.response_text for exp in experiences] == ["a", "b" * 5]
    assert all(exp.reward is not None for exp in experiences)
    assert status.metric["ended_truncated"] == 1.0, "what upstream does not do is reported"


@STEPS
async def test_a_run_that_no_truncated_answer_ended_reports_this(tmp_path, kind):
    async with running(ScriptedGenerator(["a", "b" * 9, *"cdefgh"]), tmp_path) as runner:
        status, _ = await runner.run_task_async(Task(workflow=kind, raw_task={}, batch_id=1, task_id=0))
    assert (status.ok, status.metric["ended_truncated"]) == (True, 0.0)


class Late(StepWiseRewardWorkflow):
    """The first attempt fails, and something of it asks on in the middle of the second."""

    max_step_num = 2
    attempts = 0
    late_may_ask, late_has_asked = threading.Event(), threading.Event()

    def step(self, step_num):
        type(self).attempts += step_num == 0
        self.client.chat.completions.create(model=self.model.model_name, messages=QUESTION)
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
            self.model.chat(QUESTION)
        finally:
            self.late_has_asked.set()

    def reward(self, exps, step_num):
        return 1.0


async def test_a_retry_shares_nothing_with_the_attempt_that_was_given_up(tmp_path):
    scripted = ScriptedGenerator(["first", "second", "late", "third"])
    async with running(scripted, tmp_path, max_retry_times=1) as runner:
        status, experiences = await runner.run_task_async(Task(workflow=Late, raw_task={}, batch_id=1, task_id=0))
    assert status.ok, status.message
    assert len(scripted.prompts) == 4, "it did ask"
    assert [one.response_text for one in experiences] == ["second", "third"]


@pytest.mark.parametrize("name", ["thinking_budget_workflow", "async_thinking_budget_workflow"])
@pytest.mark.parametrize(("budget", "limit"), [(0, 14), (3, 20), (3, None), (9, 10), (40, None)])
async def test_thoughts_over_the_budget_are_ended(generator, tmp_path, name, budget, limit):
    """The forced tokens are in the response and are not trained on; all others have the logprobs of the model."""
    end = "</think>"
    task = Task(
        workflow=load_workflow(name),
        raw_task={"messages": [{"role": "user", "content": "3 times 4?"}]},
        workflow_args={"thinking_token_budget": budget},
        rollout_args={"max_tokens": limit} if limit else {},
        repeat_times=3,
        batch_id=3,
        task_id=5,
        is_eval=True,
    )
    async with running(generator, tmp_path, max_response_tokens=30) as runner:
        status, experiences = await runner.run_task_async(task, 3, 0)
    assert status.ok, status.message
    assert [one.experience_type for one in experiences] == ["single_turn"] * 3
    for one in experiences:
        response = one.tokens[one.prompt_length :].tolist()
        assert len(response) <= (limit or 30)
        forced = [place for place, kept in enumerate(one.action_mask.tolist()) if not kept]
        if budget + len(end) > (limit or 30):
            assert forced == [], "the answer ends before the end of the thoughts fits in it"
            assert len(response) <= budget
            continue
        assert forced == list(range(budget, budget + len(end)))
        assert generator.codec.decode([response[budget : budget + len(end)]]) == [end]
        assert end in one.response_text
        scored = torch.tensor(generator.score([ScoreRequest(one.tokens.tolist(), one.temperature)])[0])
        exact = torch.isclose(scored[one.prompt_length - 1 :], one.logprobs, atol=1e-4)
        assert exact[one.action_mask].all()


def thinking_task(budget):
    return Task(
        workflow=load_workflow("async_thinking_budget_workflow"),
        raw_task={"messages": QUESTION, "answer": "1"},
        workflow_args={"thinking_token_budget": budget},
        reward_fn=f"{__name__}.in_a_thread",
    )


async def test_answers_within_a_budget_are_not_rewarded_on_the_event_loop():
    [experience], _ = await run_scripted(thinking_task(9), ["1", "1", "1"])
    assert experience.reward == 1.0


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_budget_masks_a_prompt_that_is_too_long(budget, is_cut):
    """Only the prompt is limited, not the thoughts behind it in the second request."""
    limits = {"max_prompt_tokens": 5 if is_cut else 20, "enable_prompt_truncation": True}
    [experience], _ = await run_scripted(thinking_task(budget), ["x" * 9] * 4, **limits)
    text = MASKED_TEXT if is_cut else f"{'x' * budget}</think>{'x' * 9}"
    assert (experience.truncate_status, experience.response_text) == ("prompt_truncated" if is_cut else None, text)


async def test_a_budget_needs_messages_and_a_number(generator, tmp_path):
    task = Task(workflow=load_workflow("thinking_budget_workflow"), raw_task={}, batch_id=1, task_id=1)
    async with running(generator, tmp_path) as runner:
        status, _ = await runner.run_task_async(task, 1, 0)
        assert "thinking_token_budget is missing" in status.message
        task.workflow_args = {"thinking_token_budget": 3}
        status, _ = await runner.run_task_async(task, 1, 0)
        assert "wanted a list of messages" in status.message

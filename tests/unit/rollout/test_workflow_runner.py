import asyncio
import socket
import sys
import threading
from collections import Counter
from typing import ClassVar

import pytest
from structlog.testing import capture_logs

from tests.unit.rollout.scripted_engine import completion, refused, scripted_engine
from trinity_mq.config import Config, RunnerConfig
from trinity_mq.messages import TaskBody, TaskSlice
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.rollout.seeds import stable_seed
from trinity_mq.rollout.workflow_runner import WorkflowRunner
from trinity_mq.workflows import AsyncSimpleWorkflow, SandboxFailed, StepWiseRewardWorkflow, Task, Workflow

THIS = __name__


@pytest.fixture
async def engine():
    async with scripted_engine() as served:
        yield served


@pytest.fixture
def config():
    return Config.model_validate(
        {
            "model": {"tiny": {}, "max_prompt_tokens": 30, "max_response_tokens": 8, "max_model_len": 64},
            "explorer": {"max_timeout": 20, "rollout_model": {"enable_history": True, "temperature": 0.9}},
        }
    )


@pytest.fixture
async def runner(config):
    made = WorkflowRunner(config, runner_id="runner-0")
    with capture_logs():  # rendering a traceback for the console takes a second
        yield made
    await made.close()


def task_slice(workflow, runs=4, base=0, **keys):
    body = {
        "workflow": workflow if "_" in workflow else f"{THIS}.{workflow}",
        "raw_task": {"question": "3+4=", "answer": "7"},
        "index": {"taskset": "sums", "index": 11},
        **keys.pop("task", {}),
    }
    # "caller": most workflows here return no rewards, which only those of a training batch need
    limits = {"max_timeout": 20.0, "max_retry_times": 2, "slice_timeout": 50.0, "deliver": "caller", **keys}
    return TaskSlice(
        batch=5, ticket="t", task_id=2, run_base=base, repeat_times=runs, task=TaskBody(**body), seed=77, **limits
    )


class Coroutine(Workflow):
    is_async = True


class Asks(Coroutine):
    """One request; not repeatable; spoils its task and leaves info and metrics out."""

    async def run_async(self):
        assert self.task.raw_task["question"] == "3+4="
        self.task.raw_task["question"] = "spoilt"
        experiences = await self.ask()
        for experience in experiences:
            experience.info = experience.metrics = None
        return experiences

    async def ask(self):
        return await self.model.chat_async([{"role": "user", "content": "q"}])


class Blocking(Workflow):
    threads: ClassVar = set()

    def run(self):
        self.threads.add(threading.current_thread().name)
        return self.model.chat([{"role": "user", "content": "q"}])


class FailsOnce(Asks):
    """The second and the fourth instance fail."""

    made: ClassVar = Counter()

    async def run_async(self):
        self.made["instances"] += 1
        if self.made["instances"] in {2, 4}:
            raise ArithmeticError("not  this\ntime")
        return await super().run_async()


class Never(Coroutine):
    async def run_async(self):
        await asyncio.Event().wait()


class NeverReturns(Workflow):
    release = threading.Event()

    def run(self):
        self.release.wait()


class Skips(AsyncSimpleWorkflow):
    """Repeatable; returns nothing for the first run it is asked for, the first time."""

    blocks: ClassVar = []

    async def run_async(self):
        self.blocks.append((self.run_id_base, self.repeat_times))
        return (await super().run_async())[1 if len(self.blocks) == 1 else 0 :]


class Numberless(AsyncSimpleWorkflow):
    async def run_async(self):
        experiences = await super().run_async()
        for experience in experiences:
            experience.eid.run = 99
        return experiences


class Unnumbered(AsyncSimpleWorkflow):
    """Sets no run number, as workflows for Trinity-RFT may."""

    copies: ClassVar = 1

    async def run_async(self):
        experiences = await self.model.chat_async([{"role": "user", "content": "q"}], n=self.repeat_times * self.copies)
        for place, experience in enumerate(experiences):
            experience.reward = float(place)
        return experiences


class UnnumberedPairs(Unnumbered):
    copies = 2


class UnnumberedOdd(Unnumbered):
    async def run_async(self):
        return (await super().run_async() + await super().run_async())[1:]


class OnlyTheFirstRun(Coroutine):
    """Two steps of run 0, with its number; the other runs are missing the first time."""

    can_repeat = True

    async def run_async(self):
        runs = range(self.run_id_base, self.run_id_base + (1 if self.run_id_base == 0 else self.repeat_times))
        experiences = []
        for run in runs:
            for step in range(2):
                (experience,) = await self.model.chat_async([{"role": "user", "content": "q"}], n=1)
                experience.eid.run, experience.eid.step = run, step
                experiences.append(experience)
        return experiences


class Empty(Coroutine):
    async def run_async(self):
        return []


class Exits(Coroutine):
    async def run_async(self):
        sys.exit(9)


class FromItself(Coroutine):
    async def run_async(self):
        try:
            raise ValueError("own bug")
        except ValueError as error:
            raise error from error  # its chain of causes has no end


class InGroup(Coroutine):
    async def run_async(self):
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(self.model.chat_async([{"role": "user", "content": "q"}]))
        return answer.result()


class Steps(StepWiseRewardWorkflow):
    max_step_num = 2

    def step(self, step_num):
        self.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        return True

    def reward(self, exps, step_num):
        return float(step_num)


async def test_a_repeatable_workflow_makes_one_request_and_all_is_stamped(runner, engine):
    outcome = await runner.run_slice(task_slice("async_simple_workflow", runs=3, base=4), lambda: engine.model)
    assert outcome.message is None
    (request,) = engine.requests
    assert (request["n"], request["temperature"], request["max_tokens"]) == (3, 0.9, 8)
    assert outcome.runs == [4, 5, 6]
    assert [exp.eid.rid for exp in outcome.experiences] == ["5/2/4", "5/2/5", "5/2/6"]
    exp = outcome.experiences[0]
    assert (exp.taskset, exp.index, exp.info["model_version"], exp.reward) == ("sums", 11, 3, 1.0)
    assert {each.info["truth"] for each in outcome.experiences} == {"7"}
    assert outcome.version_min == outcome.version_max == (1, 3)
    assert outcome.seconds > 0
    assert len(outcome.metrics) == 3
    assert outcome.metrics[0].pop("time/run_execution") > 0
    assert outcome.metrics[0] == {"accuracy": 1.0, "reward": 1.0, "response_tokens:sum": 2.0}


@pytest.mark.parametrize("base", [0, 3])
@pytest.mark.parametrize(("kind", "copies"), [("Unnumbered", 1), ("UnnumberedPairs", 2)])
async def test_runs_without_numbers_are_numbered_in_their_order(runner, engine, kind, copies, base):
    outcome = await runner.run_slice(task_slice(kind, runs=3, base=base), lambda: engine.model)
    assert (outcome.runs, outcome.message) == ([base, base + 1, base + 2], None)
    assert [(exp.eid.run, exp.reward) for exp in outcome.experiences] == [
        (base + place // copies, float(place)) for place in range(3 * copies)
    ]


@pytest.mark.parametrize(("kind", "number"), [("UnnumberedOdd", 0), ("Numberless", 99)])
async def test_experiences_without_numbers_that_cannot_be_divided_or_with_others_are_refused(
    runner, engine, kind, number
):
    outcome = await runner.run_slice(task_slice(kind, runs=3, base=3, max_retry_times=0), lambda: engine.model)
    assert (outcome.runs, outcome.experiences) == ([], [])
    assert f"returned experiences with eid.run [{number}], was asked for [3, 4, 5]" in outcome.message


async def test_steps_of_the_first_run_stay_with_it(runner, engine):
    outcome = await runner.run_slice(task_slice("OnlyTheFirstRun", runs=3), lambda: engine.model)
    assert (outcome.runs, len(outcome.experiences)) == ([0, 1, 2], 6), "the others were tried again"
    assert [(exp.eid.run, exp.eid.step) for exp in outcome.experiences] == [(r, s) for r in range(3) for s in range(2)]


@pytest.mark.parametrize("kind", ["Asks", "Blocking"])
async def test_other_workflows_run_all_at_once_each_by_itself(runner, engine, kind):
    """None sees what another did to its task; those that block have threads of their own."""
    together = asyncio.Barrier(4)

    async def script(body):
        await together.wait()
        return completion()

    engine.script = script
    outcome = await runner.run_slice(task_slice(kind), lambda: engine.model)
    assert (outcome.runs, outcome.message) == ([0, 1, 2, 3], None)
    assert threading.current_thread().name not in Blocking.threads
    assert len({exp.eid.rid for exp in outcome.experiences}) == 4
    assert {exp.info["truth"] for exp in outcome.experiences} == {"7"}
    assert len({request["seed"] for request in engine.requests}) == 4


async def test_step_wise_workflows_have_histories_of_their_own(runner, engine):
    outcome = await runner.run_slice(task_slice("Steps", runs=3), lambda: engine.model)
    assert outcome.message is None
    assert [(exp.eid.run, exp.eid.step) for exp in outcome.experiences] == [
        (run, step) for run in range(3) for step in range(2)
    ]
    assert [metrics["reward"] for metrics in outcome.metrics] == [1.0] * 3
    assert [metrics["response_tokens:sum"] for metrics in outcome.metrics] == [4.0] * 3


async def test_only_failed_runs_are_tried_again(runner, engine):
    FailsOnce.made.clear()
    outcome = await runner.run_slice(task_slice("FailsOnce"), lambda: engine.model)
    assert outcome.runs == [0, 1, 2, 3]
    assert FailsOnce.made["instances"] == 6
    assert len(engine.requests) == 4
    assert outcome.message.startswith("ArithmeticError: not this time (")
    assert "test_workflow_runner.py:" in outcome.message


class SandboxAway(Asks):
    """The sandbox is away for the first attempts, of which there are so many."""

    attempts: ClassVar = Counter()

    async def run_async(self):
        how = self.task.workflow_args
        self.attempts["all"] += 1
        if self.attempts["all"] <= how["away"]:
            raise SandboxFailed("connection refused", kind=how["kind"], retryable=how.get("retryable", True))
        return await super().run_async()


@pytest.mark.parametrize(
    ("how", "attempts_made", "ends"),
    [
        ({"away": 2, "kind": "sandbox"}, 3, [0]),
        ({"away": 9, "kind": "tool"}, 3, []),
        ({"away": 9, "kind": "provider", "retryable": False}, 1, []),
    ],
)
async def test_a_sandbox_that_is_away_is_tried_again_unless_it_is_final(runner, engine, how, attempts_made, ends):
    SandboxAway.attempts.clear()
    task = task_slice("SandboxAway", runs=1, task={"workflow_args": how})
    outcome = await runner.run_slice(task, lambda: engine.model)
    assert SandboxAway.attempts["all"] == attempts_made
    assert outcome.runs == ends
    assert (outcome.failure_kind, outcome.retryable) == (how["kind"], how.get("retryable", True))
    assert outcome.message.startswith(f"{how['kind']}: connection refused (")
    assert "test_workflow_runner.py:" in outcome.message


async def test_a_run_without_reward_is_told_where_a_batch_is_trained_on(runner, engine):
    outcome = await runner.run_slice(task_slice("Asks", runs=2, deliver="pipeline"), lambda: engine.model)
    assert outcome.runs == [0, 1]
    assert outcome.message.startswith("Asks returned no reward; set experience.reward to a number (")
    assert (await runner.run_slice(task_slice("Asks", runs=2), lambda: engine.model)).message is None


async def test_missing_runs_of_a_repeatable_workflow_are_asked_for_again(runner, engine):
    Skips.blocks.clear()
    outcome = await runner.run_slice(task_slice("Skips", base=8), lambda: engine.model)
    # The first go answers for runs 8 to 11 with the first response left out.
    assert Skips.blocks == [(8, 4), (8, 1)]
    assert outcome.runs == [8, 9, 10, 11]
    assert "returned no experience for runs [8] of [8, 9, 10, 11]" in outcome.message
    assert len({exp.eid.rid for exp in outcome.experiences}) == 4


@pytest.mark.parametrize("kind", ["Never", "NeverReturns"])
async def test_an_attempt_has_its_time_and_retries_have_an_end(runner, engine, kind):
    NeverReturns.release.clear()
    limits = {"max_timeout": 0.1, "max_retry_times": 1, "slice_timeout": 30.0}
    async with asyncio.timeout(10):
        outcome = await runner.run_slice(task_slice(kind, runs=2, **limits), lambda: engine.model)
    NeverReturns.release.set()
    assert outcome.runs == []
    assert outcome.message.startswith(f"{kind} took longer than max_timeout, 0.1 s (")


async def test_the_time_of_the_slice_ends_everything_but_keeps_what_is_done(runner, engine):
    served = iter([completion()])

    async def script(body):
        return next(served, None) or await asyncio.Event().wait()

    engine.script = script
    outcome = await runner.run_slice(task_slice("Asks", runs=2, slice_timeout=2.0), lambda: engine.model)
    assert len(outcome.runs) == len(outcome.experiences) == 1
    assert outcome.message == "not done within the 2 s of the slice"


async def test_waiting_for_an_engine_or_its_weights_is_no_attempt(runner, engine):
    troubles = [EngineNotReady("waits for weights", 0.01), EngineLost("no living engine"), EngineLost("none yet")]
    answers = [refused(503, "engine_not_current", 0.01) for _ in range(5)]
    engine.script = lambda body: answers.pop() if answers else None

    def models():
        if troubles:
            raise troubles.pop()
        return engine.model

    outcome = await runner.run_slice(task_slice("async_simple_workflow", max_retry_times=0), models)
    assert len(outcome.runs) == 4
    assert outcome.message is None


async def test_no_engine_at_all_ends_with_the_slice_and_says_so(runner):
    def models():
        raise EngineLost("no living engine is known")

    outcome = await runner.run_slice(task_slice("Asks", slice_timeout=0.2), models)
    assert (outcome.runs, outcome.failure_kind, outcome.retryable) == ([], "engine", True)
    assert outcome.message == (
        "not done within the 0.2 s of the slice, waiting for an engine: no living engine is known"
    )


@pytest.mark.parametrize("kind", ["async_simple_workflow", "simple_workflow", "Steps", "InGroup"])
async def test_a_lost_engine_is_replaced_by_another(runner, engine, kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = InferenceModel(id="gone", url=f"http://127.0.0.1:{server.getsockname()[1]}", name="m")
    engines = [engine.model, gone]
    asked = []

    def models():
        asked.append(engines.pop() if len(engines) > 1 else engines[0])
        return asked[-1]

    outcome = await runner.run_slice(task_slice(kind, runs=1, max_retry_times=0), models)
    assert (outcome.runs, outcome.message) == ([0], None)
    assert [model.id for model in asked] == ["gone", "engine-0"]


async def test_what_an_engine_refuses_is_not_asked_again(runner, engine):
    engine.script = lambda body: refused(400, "bad_request")
    outcome = await runner.run_slice(task_slice("async_simple_workflow"), lambda: engine.model)
    assert outcome.runs == []
    assert "EngineRefused" in outcome.message
    assert len(engine.requests) == 1


def too_long(body):
    return refused(400, "context_length_exceeded", prompt_token_ids=[1, 2, 3], limit=2)


@pytest.mark.parametrize("kind", ["Asks", "Blocking", "async_simple_workflow"])
async def test_a_prompt_that_is_too_long_is_a_failure_of_the_task(runner, engine, kind):
    engine.script = too_long
    outcome = await runner.run_slice(task_slice(kind, runs=2), lambda: engine.model)
    assert (outcome.runs, outcome.experiences, outcome.metrics) == ([], [], [])
    assert (outcome.failure_kind, outcome.retryable) == ("task", False)
    assert "the prompt has more than 2 tokens, the limit of model.max_prompt_tokens" in outcome.message
    assert len(engine.requests) == (1 if kind == "async_simple_workflow" else 2), "not tried again"


def with_model(config, **model):
    """Return the configuration with other settings of the model and of the engine."""
    rollout = model.pop("rollout_model", {})
    settings = config.model_dump(include={"model", "explorer"}, exclude_unset=True)
    settings["model"] |= model
    settings["explorer"]["rollout_model"] |= rollout
    return Config.model_validate(settings)


@pytest.mark.parametrize("kind", ["Asks", "Blocking", "async_simple_workflow"])
async def test_a_prompt_that_is_too_long_gives_masked_runs_where_that_is_configured(config, engine, kind):
    runner = WorkflowRunner(with_model(config, enable_prompt_truncation=True))
    engine.script = too_long
    outcome = await runner.run_slice(task_slice(kind, runs=2), lambda: engine.model)
    await runner.close()
    assert (outcome.runs, outcome.message) == ([0, 1], None)
    for experience in outcome.experiences:
        assert (experience.truncate_status, experience.tokens.tolist()) == ("prompt_truncated", [1, 2, 3])
        assert (experience.reward, experience.action_mask.tolist()) == (0.0, [False])
    counts = [metrics.get("prompt_truncated:sum") for metrics in outcome.metrics]
    assert counts == ([None, None] if kind == "Asks" else [1.0, 1.0]), "Asks removes its metrics"


@pytest.mark.parametrize(
    ("truncation", "limit"),
    [({}, 30), ({"enable_prompt_truncation": True}, 30), ({"enable_prompt_truncation": False}, None)],
)
async def test_the_limits_of_prompts_and_answers_reach_the_engine(config, engine, truncation, limit):
    ending = {"min_response_tokens": 3, "ignore_eos": True}
    runner = WorkflowRunner(with_model(config, **truncation, rollout_model=ending))
    await runner.run_slice(task_slice("async_simple_workflow", runs=1), lambda: engine.model)
    overridden = {"rollout_args": {"min_tokens": 2, "ignore_eos": False}, "format_args": {"reply_prefix": "So"}}
    await runner.run_slice(task_slice("async_simple_workflow", runs=1, task=overridden), lambda: engine.model)
    await runner.close()
    first, second = engine.requests
    assert (first["min_tokens"], first["ignore_eos"], first.get("max_prompt_tokens")) == (3, True, limit)
    assert (second["min_tokens"], second["ignore_eos"]) == (2, False)
    assert (second["messages"][-1], second["continue_final_message"]) == ({"role": "assistant", "content": "So"}, True)
    assert "continue_final_message" not in first


class AsksOnceTooLong(AsyncSimpleWorkflow):
    """Repeatable; the prompt of its first run is too long."""

    async def run_async(self):
        responses = []
        for run in range(self.repeat_times):
            prompt = "long" if run == 0 else "short"
            (response,) = await self.model.chat_async([{"role": "user", "content": prompt}])
            response.eid.run, response.reward = self.run_id_base + run, 1.0
            responses.append(response)
        return responses


async def test_the_other_runs_of_a_task_are_kept(runner, engine):
    engine.script = lambda body: too_long(body) if body["messages"][0]["content"] == "long" else None
    outcome = await runner.run_slice(task_slice("AsksOnceTooLong", runs=3), lambda: engine.model)
    assert outcome.runs == [1, 2]
    assert [metrics["reward"] for metrics in outcome.metrics] == [1.0, 1.0]
    assert (outcome.failure_kind, len(engine.requests)) == ("task", 3)


async def test_a_pinned_slice_waits_for_newer_weights_but_not_for_older(runner, engine):
    held = [[1, 2]]
    engine.script = lambda body: refused(409, "version_mismatch", wanted=[1, 3], held=held.pop()) if held else None
    outcome = await runner.run_slice(task_slice("Asks", runs=1, pinned=(1, 3), max_retry_times=0), lambda: engine.model)
    assert (outcome.runs, outcome.message) == ([0], None)
    assert engine.headers[0]["X-TMQ-Version"] == "1.3"
    held = [[1, 4]]
    outcome = await runner.run_slice(task_slice("Asks", runs=1, pinned=(1, 3)), lambda: engine.model)
    assert outcome.runs == []
    assert "VersionMismatch" in outcome.message
    assert held == []


async def test_work_done_again_draws_the_same_and_a_retry_draws_anew(runner, engine):
    async def seeds(part):
        engine.requests.clear()
        await runner.run_slice(part, lambda: engine.model)
        return sorted(request["seed"] for request in engine.requests)

    first = await seeds(task_slice("Asks"))
    assert first == await seeds(task_slice("Asks"))
    assert len(set(first)) == 4
    assert not set(first) & set(await seeds(task_slice("Asks", base=4)))
    assert set(await seeds(task_slice("Asks", runs=2))) < set(first)

    FailsOnce.made.clear()
    retried = await seeds(task_slice("FailsOnce"))
    assert len(set(retried) - set(first)) == 2


@pytest.mark.parametrize(
    ("kind", "limits", "failure_kind", "message"),
    [
        ("Empty", {}, "workflow", "Empty returned no experience; a run gives at least one"),
        ("Exits", {}, "workflow", "Exits called sys.exit(9)"),
        ("FromItself", {}, "workflow", "ValueError: own bug ("),
        ("Never", {"max_timeout": 0.05}, "timeout", "Never took longer than max_timeout, 0.05 s ("),
        ("Never", {"slice_timeout": 0.05}, "timeout", "not done within the 0.05 s of the slice"),
        ("async_simple_workflw", {}, "task", "unknown workflow 'async_simple_workflw'; did you mean"),
        ("async_simple_workflow", {"task": {"raw_task": {}}}, "task", "TaskError: raw_task['question']"),
    ],
)
async def test_what_gives_nothing_has_failed_with_a_kind(runner, engine, kind, limits, failure_kind, message):
    task = task_slice(kind, runs=2, max_retry_times=0, **limits)
    outcome = await runner.run_slice(task, lambda: engine.model)
    assert (outcome.runs, outcome.failure_kind) == ([], failure_kind)
    assert outcome.message.startswith(message)
    assert engine.requests == []


async def test_cancelling_reaches_the_workflow(runner, engine):
    task = asyncio.ensure_future(runner.run_slice(task_slice("Never"), lambda: engine.model))
    await asyncio.sleep(0.05)
    task.cancel()
    async with asyncio.timeout(1):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_run_task_gives_status_and_experiences(config, engine):
    runner = WorkflowRunner(config, engine.model)
    task = Task(workflow=AsyncSimpleWorkflow, raw_task={"question": "q", "answer": "7"}, batch_id=1, task_id=0)
    status, experiences = await asyncio.to_thread(runner.run_task, task, repeat_times=2, run_id_base=3)
    assert (status.ok, status.completed_runs, status.total_runs, status.message) == (True, 2, 2, None)
    assert (status.metric["accuracy"], len(status.metrics)) == (1.0, 2)
    assert [exp.eid.rid for exp in experiences] == ["1/0/3", "1/0/4"]
    again, _ = await asyncio.to_thread(runner.run_task, task)
    assert again.ok
    with pytest.raises(RuntimeError, match=r"await run_task_async\(\)"):
        runner.run_task(task)
    with pytest.raises(RuntimeError, match="without a model"):
        await WorkflowRunner(config).run_task_async(task)
    status, _ = await runner.run_task_async(Task(raw_task={}))
    assert "no workflow" in status.message
    await runner.close()


def test_seeds_are_stable():
    assert stable_seed(1, "2/x", 3) == 1347747480926742596
    assert len({stable_seed(a, b) for a in range(10) for b in (0, 1, "0", "1")}) == 40


# -- ``runner.concurrent_mode``: how the runs of a slice are done


def a_slice(kind, runs=3, **limits):
    return task_slice(kind, runs, task={"raw_task": {"question": "q"}}, **{"max_retry_times": 1, **limits})


@pytest.fixture
def ran(engine, config):
    """Runs slices in a mode by one runner."""
    Noted.reset_all()

    async def run(mode, *slices):
        made = WorkflowRunner(in_mode(config, mode))
        with capture_logs():
            try:
                return [await made.run_slice(each, lambda: engine.model) for each in slices]
            finally:
                await made.close()

    return run


def in_mode(config, mode):
    runner = RunnerConfig(concurrent_mode=mode)
    return config.model_copy(update={"runner": runner})


class Noted(Workflow):
    """Notes who does what, and how many at a time."""

    is_async = True
    instances: ClassVar[list] = []
    resets: ClassVar[list] = []
    loops: ClassVar[set] = set()
    histories: ClassVar[list] = []
    at_work: ClassVar[int] = 0
    most: ClassVar[int] = 0
    questions: ClassVar[list] = []

    @classmethod
    def reset_all(cls):
        for noted in (Noted.instances, Noted.resets, Noted.histories, Noted.questions):
            noted.clear()
        Noted.loops.clear()
        Noted.at_work = Noted.most = 0

    def __init__(self, **given):
        super().__init__(**given)
        self.instances.append(self)
        self.client = self.model.get_openai_async_client()

    def begin(self):
        Noted.at_work += 1
        Noted.most = max(Noted.most, Noted.at_work)

    async def run_async(self):
        self.begin()
        self.loops.add((asyncio.get_running_loop(), threading.current_thread()))
        self.questions.append(self.task.raw_task["question"])
        self.task.raw_task["question"] = "spoilt"
        await asyncio.sleep(0.02)
        try:
            await self.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
            self.histories.append(len(self.model.extract_experience_from_history(clear_history=False)))
            return self.model.extract_experience_from_history(clear_history=False)
        finally:
            Noted.at_work -= 1


class Resets(Noted):
    """Its reset() does not keep the task."""

    can_reset = True

    def reset(self, task):
        self.resets.append(self)


class FailsSecond(Resets):
    async def run_async(self):
        if len(self.resets) == 1 and len(self.instances) == 1:
            raise ArithmeticError("once")
        return await super().run_async()


class Blocks(Workflow):
    at_work: ClassVar[threading.Barrier] = threading.Barrier(3, timeout=5)

    def run(self):
        self.at_work.wait()
        return self.model.chat([{"role": "user", "content": "q"}])


class BlocksItsLoop(Coroutine):
    async def run_async(self):
        Blocks.at_work.wait()
        return await self.model.chat_async([{"role": "user", "content": "q"}])


@pytest.mark.parametrize(
    ("mode", "kind", "instances", "resets", "at_once", "loops"),
    [
        pytest.param("sequential", "Resets", 1, 2, 1, 1, id="one after the other by one instance"),
        pytest.param("sequential", "Noted", 3, 0, 1, 1, id="what cannot be reset"),
        pytest.param("asynchronous", "Resets", 3, 0, 3, 1, id="all at once on one loop"),
        pytest.param("multi-threading", "Resets", 3, 0, None, 3, id="threads and loops of their own"),
    ],
)
async def test_runs_of_a_slice_in_each_mode(ran, engine, mode, kind, instances, resets, at_once, loops):
    (outcome,) = await ran(mode, a_slice(kind))
    assert (outcome.runs, outcome.message) == ([0, 1, 2], None)
    assert (len(Noted.instances), len(Noted.resets), len(Noted.loops)) == (instances, resets, loops)
    assert at_once in {Noted.most, None}
    assert (asyncio.get_running_loop() in {loop for loop, _ in Noted.loops}) == (mode != "multi-threading")
    assert Noted.histories == [1, 1, 1], "each run sees its own only"
    assert len({request["seed"] for request in engine.requests}) == 3


@pytest.mark.parametrize(("mode", "instances", "resets"), [("sequential", 1, 5), ("asynchronous", 6, 0)])
async def test_sequential_slices_share_an_instance_which_is_reset_to_each_task(ran, engine, mode, instances, resets):
    def asking(question):
        task = {"raw_task": {"question": question}, "rollout_args": {"top_k": len(question)}}
        return task_slice("Resets", 2, task=task)

    outcomes = await ran(mode, *map(asking, ("q", "other", "q")))
    assert [(outcome.runs, outcome.message) for outcome in outcomes] == [([0, 1], None)] * 3
    assert (len(Noted.instances), len(Noted.resets)) == (instances, resets)
    assert Noted.questions == ["q", "q", "other", "other", "q", "q"]
    assert Noted.histories == [1] * 6
    assert [request["top_k"] for request in engine.requests] == [1, 1, 5, 5, 1, 1]


async def test_an_instance_whose_run_failed_is_not_used_again(ran):
    (outcome,) = await ran("sequential", a_slice("FailsSecond"))
    assert outcome.runs == [0, 1, 2]
    assert "ArithmeticError: once" in outcome.message
    assert len(Noted.instances) == 2
    assert Noted.resets == [Noted.instances[0], Noted.instances[1]]


async def test_sequential_runs_that_are_done_outlive_the_time_of_the_slice(ran, engine):
    async def third_hangs(body):
        if len(engine.requests) == 3:
            await asyncio.Event().wait()

    engine.script = third_hangs
    (outcome,) = await ran("sequential", a_slice("Resets", slice_timeout=1.0))
    assert outcome.runs == [0, 1]
    assert outcome.message == "not done within the 1 s of the slice"


@pytest.mark.parametrize(
    ("mode", "kind"), [("asynchronous", "Blocks"), ("multi-threading", "Blocks"), ("multi-threading", "BlocksItsLoop")]
)
async def test_what_blocks_is_done_in_parallel(ran, mode, kind):
    """Each run waits in its thread for two others: one that held the event loop would wait for them until it failed."""
    Blocks.at_work.reset()
    (outcome,) = await ran(mode, a_slice(kind))
    assert (outcome.runs, outcome.message) == ([0, 1, 2], None)

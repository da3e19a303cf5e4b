import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from tests.unit.workflows.tiny_engines import make_generator, tiny_engine
from trinity_mq.experience import Experience
from trinity_mq.models import EngineClients, EngineNotReady, ModelWrapper
from trinity_mq.models.errors import EngineLost
from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.auxiliary import AuxiliaryError
from trinity_mq.workflows.builtin.distill import (
    AsyncDistillWorkflow,
    AsyncMathDistillWorkflow,
    DistillWorkflow,
    MathDistillWorkflow,
    add_teacher_logprobs,
    add_teacher_logprobs_async,
)

BOTH = pytest.mark.parametrize("kind", [DistillWorkflow, AsyncDistillWorkflow])
BOTH_MATH = pytest.mark.parametrize("kind", [MathDistillWorkflow, AsyncMathDistillWorkflow])
CHARACTERS = "0123456789+-=,"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    small = {"characters": CHARACTERS, "max_model_len": 64}
    return {
        "student": make_generator(folder / "student", **small),
        "teacher": make_generator(folder / "teacher", seed=5, **small),
        "stranger": make_generator(folder / "stranger", characters=CHARACTERS[::-1], max_model_len=64),
    }


@asynccontextmanager
async def wrapped(models, teacher="teacher", **keys):
    """Yield the wrappers of a student and of a teacher on engines of their own."""
    async with tiny_engine(models["student"], "student") as here, tiny_engine(models[teacher], teacher) as there:
        async with EngineClients() as clients:
            student = ModelWrapper(here, seed=1, max_response_tokens=6, clients=clients, **keys)
            yield student, ModelWrapper(there, clients=clients)


async def run(kind, model, teacher, *, times=1, **keys):
    keys.setdefault("raw_task", {"question": "+372="})
    made = Task(workflow=kind, **keys)
    workflow = made.to_workflow(model, [] if teacher is None else [teacher])
    workflow.set_repeat_times(times, 3)
    return await execute(lambda: workflow, kind)


def plain(generator, experience):
    """The reference: one unpadded forward pass of the teacher over the tokens that the student sampled."""
    ids = experience.tokens.long()
    with torch.no_grad():
        logits = generator.model(ids[None]).logits[0].float() / experience.temperature
    logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return logprobs[experience.prompt_length - 1 :]


@BOTH
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_each_sampled_token_has_the_teachers_logprob(kind, temperature, models):
    async with wrapped(models, temperature=temperature) as (model, teacher):
        experiences = await run(kind, model, teacher, times=4)
    assert [exp.eid.run for exp in experiences] == [3, 4, 5, 6]
    assert len({tuple(exp.tokens.tolist()) for exp in experiences}) > 1
    for exp in experiences:
        assert exp.teacher_logprobs.dtype == torch.float32
        assert exp.teacher_logprobs.shape == exp.logprobs.shape == (exp.response_length,)
        assert torch.allclose(exp.teacher_logprobs, plain(models["teacher"], exp), atol=1e-5, rtol=0)
        assert not torch.allclose(exp.teacher_logprobs, exp.logprobs, atol=1e-3)
        difference = (exp.logprobs - exp.teacher_logprobs).mean().item()
        assert exp.metrics == {"kl_divergence": pytest.approx(difference, abs=1e-6)}
        assert exp.reward == 0.0
    assert Experience.deserialize_many(Experience.serialize_many(experiences)) == experiences


@BOTH
async def test_the_check_takes_no_seed_and_leaves_no_history(kind, models):
    async with tiny_engine(models["student"], "student") as here, EngineClients() as clients:
        made = []
        for check in (True, False):
            model = ModelWrapper(here, seed=1, max_response_tokens=6, clients=clients, enable_history=True)
            teacher = ModelWrapper(here, clients=clients)
            made.append(await run(kind, model, teacher, times=3, workflow_args={"check_vocabulary": check}))
            assert len(model.extract_experience_from_history()) == 3
    assert [exp.tokens.tolist() for exp in made[0]] == [exp.tokens.tolist() for exp in made[1]]


@BOTH
async def test_a_teacher_with_another_vocabulary_is_refused(kind, models):
    async with wrapped(models, "stranger") as (model, teacher):
        with pytest.raises(TaskError, match=r"splits text into other tokens.*token 0 of a prompt is.*one tokenizer"):
            await run(kind, model, teacher)
        assert len(await run(kind, model, teacher, workflow_args={"check_vocabulary": False})) == 1


@BOTH
async def test_the_two_are_compared_once(kind, models):
    asked = []

    class Counting(ModelWrapper):
        def generate(self, prompts, **sampling):
            asked.append(prompts)
            return super().generate(prompts, **sampling)

        async def generate_async(self, prompts, **sampling):
            asked.append(prompts)
            return await super().generate_async(prompts, **sampling)

    async with tiny_engine(models["student"], f"for {kind.__name__}") as here, EngineClients() as clients:
        for _ in range(3):
            model = ModelWrapper(here, clients=clients, max_response_tokens=2)
            await run(kind, model, Counting(here, clients=clients))
    assert asked == [["+372="]]


@BOTH_MATH
async def test_math_keeps_whether_the_student_was_right(kind, stub_model):
    model, teacher = stub_model(["\\boxed{42}", "7"]), Scoring()
    record, args = {"question": "q", "answer": "42"}, {"check_vocabulary": False}
    experiences = await run(kind, model, teacher, times=2, raw_task=record, workflow_args=args)
    assert [exp.reward for exp in experiences] == [1.0, 0.0]
    assert [exp.metrics["accuracy"] for exp in experiences] == [1.0, 0.0]
    assert "\\boxed{}" in model.calls[0][0][0]["content"]


@BOTH
async def test_the_distance_to_the_teacher_can_be_the_reward(kind, models):
    async with wrapped(models) as (model, teacher):
        experiences = await run(kind, model, teacher, times=4, workflow_args={"kl_reward": 0.5})
    assert len({exp.reward for exp in experiences}) > 1
    for exp in experiences:
        distance = float((exp.logprobs - exp.teacher_logprobs).sum())
        assert exp.reward == pytest.approx(-0.5 * distance, abs=1e-5)


class Scoring:
    """A teacher whose logprob of a token is its place, or what ``result`` says; it may fail."""

    model_name, model_path = "t", "/t"

    def __init__(self, result=None, error=None):
        self.result, self.error, self.asked = result, error, []
        self.model = type("Handle", (), {"url": "http://teacher"})()

    def logprobs(self, tokens, temperature=None):
        self.asked.append((list(tokens), temperature))
        if self.error:
            raise self.error
        return torch.arange(1, len(tokens)).float() if self.result is None else torch.tensor(self.result)

    async def logprobs_async(self, tokens, temperature=None):
        await asyncio.sleep(0)
        return self.logprobs(tokens, temperature)


async def score(way, experiences, teacher):
    if way == "async":
        await add_teacher_logprobs_async(experiences, teacher)
    else:
        add_teacher_logprobs(experiences, teacher)


WAYS = pytest.mark.parametrize("way", ["sync", "async"])


@WAYS
async def test_conversations_are_aligned_from_the_first_response_token_on(way):
    mask = [True, False, False, True]
    exp = Experience(tokens=[9, 8, 7, 6, 5, 4], prompt_length=2, action_mask=mask, logprobs=[0.0] * 4, temperature=0.5)
    teacher = Scoring()
    await score(way, [exp], teacher)
    assert teacher.asked == [([9, 8, 7, 6, 5, 4], 0.5)], "the very tokens, at the student's temperature"
    assert exp.teacher_logprobs.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert exp.metrics["kl_divergence"] == -(2.0 + 5.0) / 2, "of the trained tokens alone"


@WAYS
@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (Scoring(result=[0.0]), r"gave \(1,\) logprobs for 3 tokens, wanted 2"),
        (Scoring(result=[0.0, float("nan")]), "not finite numbers"),
        (Scoring(error=EngineLost("gone")), "the teacher 't' at http://teacher cannot be asked: EngineLost: gone"),
    ],
)
async def test_a_teacher_that_fails_is_an_error_that_says_so(way, teacher, said):
    exp = Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[0.0, 0.0])
    with pytest.raises(AuxiliaryError, match=said) as raised:
        await score(way, [exp, exp], teacher)
    assert raised.value.__cause__ is None
    with pytest.raises(EngineNotReady):  # the runner waits for it
        await score(way, [exp], Scoring(error=EngineNotReady("loading")))


@BOTH
async def test_without_a_teacher_the_setting_is_named(kind, stub_model):
    with pytest.raises(TaskError, match=r"auxiliary model 0 as its teacher.*workflow_args\.teacher"):
        await run(kind, stub_model([]), None)

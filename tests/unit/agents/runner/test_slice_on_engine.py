"""A slice against a real engine: taskset, workflow, sampling, reward, operators, with nothing scripted."""

import asyncio

import pytest

from trinity_mq.config import AlgorithmConfig, Config, OperatorConfig, TasksetConfig
from trinity_mq.data import open_taskset
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import Experience
from trinity_mq.messages import TaskSlice
from trinity_mq.models import InferenceModel, ensure_model_folder
from trinity_mq.operators import AdvantageOperator, create_operators, run_chain
from trinity_mq.rollout.workflow_runner import WorkflowRunner


@pytest.fixture
def config(tmp_path):
    return Config.model_validate(
        {
            "model": {"tiny": {}, "max_model_len": 32, "max_prompt_tokens": 16, "max_response_tokens": 4},
            "run_dir": str(tmp_path),
            "explorer": {"max_timeout": 30},
        }
    )


@pytest.fixture
async def engine(config, tmp_path):
    folder = ensure_model_folder(config.model, tmp_path / "model", 0)
    server = EngineServer(
        TextGenerator.build(config.model, folder, num_threads=1),
        ServerSettings(engine_id="e0", model_name="tiny", model_path=str(folder), token="x", max_response_tokens=4),
        None,
    )
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(lambda url: ready.set()))
        await ready.wait()
        server.state.phase, server.state.version = "current", (1, 7)
        yield InferenceModel("e0", server.url, "tiny", str(folder), (1, 7))
        server.stop("the test is over")


async def test_from_taskset_to_advantages(config, engine):
    taskset = open_taskset(
        TasksetConfig(name="sums", storage_type="synthetic", path="ops3", reward_fn="char_match"), repeat_times=16
    )
    runner = WorkflowRunner(config)
    experiences = []
    for number, body in enumerate(taskset.next_batch(4)):
        task_slice = TaskSlice(
            batch=1,
            ticket="t",
            task_id=number,
            repeat_times=16,
            task=body,
            seed=number,
            slice_timeout=30,
            max_timeout=30,
        )
        outcome = await runner.run_slice(task_slice, lambda: engine)
        assert (outcome.runs, outcome.message) == (list(range(16)), None)
        assert (outcome.version_min, outcome.version_max) == ((1, 7), (1, 7))
        again = await runner.run_slice(task_slice, lambda: engine)
        assert [exp.response_text for exp in again.experiences] == [exp.response_text for exp in outcome.experiences]
        experiences += Experience.deserialize_many(Experience.serialize_many(outcome.experiences))
    await runner.close()
    assert len({exp.eid.rid for exp in experiences}) == 64
    assert len({exp.response_text for exp in experiences}) > 10
    assert {(exp.taskset, exp.temperature) for exp in experiences} == {("sums", 1.0)}
    assert all(0 <= exp.reward <= 1 for exp in experiences)
    operators = create_operators([OperatorConfig(name="invalid_reward_filter")])
    algorithm = AlgorithmConfig(repeat_times=16, std_level="batch")
    kept, metrics = await run_chain([*operators, AdvantageOperator(algorithm)], experiences)
    assert len(kept) == 64
    assert metrics["rollout/missing_rewards"] == 0
    assert sum(float(exp.advantages[0]) for exp in kept) == pytest.approx(0, abs=1e-3)

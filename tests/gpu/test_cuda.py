"""What needs a CUDA device: train steps in float32 and bfloat16 autocast, the engine, and both agreeing with a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config import Config, load_config
from trinity_mq.engines.generation.request import GenerationRequest, ScoreRequest
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.models import ensure_model_folder
from trinity_mq.sync.gate.canary import LIMITS
from trinity_mq.training.learner import TorchLearner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test compiles flex attention

CANARY = [2, 3, 4, 5, 6, 7]


def config(device: str, dtype: str) -> Config:
    return load_config(
        {
            "model": {
                "tiny": {"hidden_size": 128},
                "max_model_len": 32,
                "max_prompt_tokens": 16,
                "max_response_tokens": 8,
                "device": device,
                "dtype": dtype,
            },
            "algorithm": {"repeat_times": 8, "std_level": "batch", "optimizer": {"lr": 2e-3, "lr_warmup_steps": 0}},
            "seed": 3,
        }
    )


def rollout(generator: TextGenerator, step: int) -> list[Experience]:
    """Sample eight groups; the reward is the share of tokens that are 7, which is quickly learned."""
    prompts = [[2 + (step + i) % 10, 3, 4] for i in range(8)]
    requests = [GenerationRequest(p, max_tokens=6, n=8, seed=100 * step + i) for i, p in enumerate(prompts)]
    return [
        Experience(
            eid=EID(batch=step, task=task, run=run),
            tokens=[*prompt, *sample.token_ids],
            prompt_length=3,
            logprobs=sample.logprobs,
            reward=sample.token_ids.count(7) / len(sample.token_ids),
            temperature=1.0,
        )
        for task, (prompt, samples) in enumerate(zip(prompts, generator.generate(requests), strict=True))
        for run, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_training_and_sampling_on_cuda_learn_and_agree(tmp_path: Path, dtype: str) -> None:
    settings = config("cuda", dtype)
    folder = ensure_model_folder(settings.model, tmp_path / "model", settings.seed)
    learner = TorchLearner(settings, folder, 40)
    await learner.open(None)
    generator = TextGenerator.build(settings.model, folder, num_threads=1)
    rewards = []
    for step in range(1, 41):
        generator.apply(generator.check(dict(await learner.weights())))
        own = await learner.canary_logprobs(CANARY)
        (theirs,) = generator.score([ScoreRequest(CANARY)])
        assert max(abs(a - b) for a, b in zip(own, theirs, strict=True)) <= LIMITS[dtype].largest
        experiences = rollout(generator, step)
        rewards.append(sum(e.reward or 0.0 for e in experiences) / len(experiences))
        kept, _ = estimate(ExperienceBatch.of(experiences), settings.algorithm.estimator, min_group_runs=4)
        metrics = await learner.step(kept, step)
        assert metrics["actor/optimizer_steps"] == 1.0
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards
    (tmp_path / "saved").mkdir()
    await learner.save(tmp_path / "saved")
    again = TorchLearner(settings, folder, 40)
    await again.open(tmp_path / "saved")
    assert await again.canary_logprobs(CANARY) == pytest.approx(await learner.canary_logprobs(CANARY), abs=1e-5)
    await learner.close()
    await again.close()


async def test_float32_on_cuda_equals_the_cpu(tmp_path: Path) -> None:
    folder = ensure_model_folder(config("cpu", "float32").model, tmp_path / "model", 3)
    found = []
    for device in ("cpu", "cuda"):
        generator = TextGenerator.build(config(device, "float32").model, folder, num_threads=1)
        learner = TorchLearner(config(device, "float32"), folder, 10)
        await learner.open(None)
        generator.apply(generator.check(dict(await learner.weights())))
        found.append(generator.score([ScoreRequest(CANARY, 0.7)])[0])
        await learner.close()
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
async def test_an_offloaded_optimizer_makes_the_same_steps_and_keeps_nothing_on_the_device(
    tmp_path: Path, kind: str
) -> None:
    def settings(offload: bool) -> Config:
        plain = config("cuda", "float32")
        momentum = {} if kind == "adamw" else {"momentum": 0.9}
        changes = {"optimizer_type": kind, "offload": offload, **momentum}
        optimizer = plain.algorithm.optimizer.model_copy(update=changes)
        return plain.model_copy(update={"algorithm": plain.algorithm.model_copy(update={"optimizer": optimizer})})

    model = ensure_model_folder(settings(False).model, tmp_path / "model", 3)
    generator = TextGenerator.build(settings(False).model, model, num_threads=1)
    batches = [
        estimate(ExperienceBatch.of(rollout(generator, step)), settings(False).algorithm.estimator)[0]
        for step in range(1, 7)
    ]

    async def trained(learner: TorchLearner, steps: range) -> dict[str, torch.Tensor]:
        for step in steps:
            metrics = await learner.step(batches[step - 1], step)
            assert metrics["actor/update_norm"] > 0
            assert {"time/forward", "time/backward", "time/optimizer"} <= metrics.keys()
        return {name: tensor.clone() for name, tensor in await learner.weights()}

    plain, offloaded, resumed = (TorchLearner(settings(offload), model, 6) for offload in (False, True, True))
    for one in (plain, offloaded):
        await one.open(None)
    wanted = await trained(plain, range(1, 7))
    await trained(offloaded, range(1, 4))
    states = offloaded._opened[1].state.values()
    moments = [value for state in states for value in state.values() if torch.is_tensor(value) and value.numel() > 1]
    assert moments
    assert all(value.is_pinned() for value in moments)
    (tmp_path / "checkpoint").mkdir()
    await offloaded.save(tmp_path / "checkpoint")
    await resumed.open(tmp_path / "checkpoint")
    found = await trained(resumed, range(4, 7))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for one in (plain, offloaded, resumed):
        await one.close()

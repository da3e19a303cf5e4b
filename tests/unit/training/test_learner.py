"""The learner against plain torch: logprobs, gradients, steps, resume, and a policy that really learns."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trinity_mq.algorithms.evaluator import component_weights
from trinity_mq.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, TinyModelConfig, TrainerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.checkpoints.state import Parts, read_parts
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.model.policy import LearnerError
from trinity_mq.training.packing import DivisionSettings, MicroBatch, train_tokens

PAD, EOS = 0, 1
CHARACTERS = "0123456789,="
TOKEN = {character: number + 2 for number, character in enumerate(CHARACTERS)}
VOCABULARY = len(CHARACTERS) + 2


def pack(experiences: list[Experience], max_tokens: int, algorithm: AlgorithmConfig | None = None) -> list[MicroBatch]:
    settings = algorithm or AlgorithmConfig()
    tokens = train_tokens(experiences, settings, component_weights(settings, 1), 1)
    return tokens.micro_batches(range(len(experiences)), DivisionSettings(max_tokens), settings.reduction)


def make_model(folder: Path, *, tied: bool = False, layers: int = 2) -> Path:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": EOS, **TOKEN}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def config(
    *, lr: float = 1e-3, dtype: str = "float32", max_tokens: int = 16384, clip_grad: float = 1.0, **algorithm: Any
) -> Config:
    return Config(
        model=ModelConfig(tiny=TinyModelConfig(), dtype=dtype, device="cpu"),
        algorithm=AlgorithmConfig(optimizer=OptimizerConfig(lr=lr, clip_grad=clip_grad), **algorithm),
        trainer=TrainerConfig(max_tokens_per_micro_batch=max_tokens),
    )


Opener = Callable[..., Any]


@pytest.fixture
async def opened(folder: Path) -> AsyncIterator[Opener]:
    """Open learners that are closed at the end."""
    made: list[TorchLearner] = []

    async def open_one(
        settings: Config | None = None,
        model: Path = folder,
        checkpoint: Path | None = None,
        total_steps: int | None = None,
    ) -> TorchLearner:
        made.append(TorchLearner(settings or config(), model, total_steps))
        await made[-1].open(checkpoint)
        return made[-1]

    yield open_one
    for one in made:
        await one.close()


def batch(seed: int, count: int = 12) -> list[Experience]:
    """Sequences of different lengths with logprobs near those of an untrained policy."""
    r = random.Random(seed)
    result = []
    for run in range(count):
        prompt, response = r.randint(1, 6), r.randint(1, 7)
        result.append(
            Experience(
                eid=EID(seed, 0, run),
                tokens=[r.randrange(2, VOCABULARY) for _ in range(prompt + response)],
                prompt_length=prompt,
                logprobs=[-math.log(VOCABULARY) + r.uniform(-0.4, 0.4) for _ in range(response)],
                advantages=[r.uniform(-1, 1)] * response,
                temperature=r.choice([1.0, 0.7]),
            )
        )
    return result


async def state_of(learner: TorchLearner) -> Parts:
    """Return what the learner writes to a checkpoint."""
    with TemporaryDirectory() as folder:
        await learner.save(Path(folder))
        return read_parts(Path(folder), {})


async def weights_of(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in await learner.weights()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def plain_logprobs(model: Any, one: Experience) -> torch.Tensor:
    """Return the response's logprobs from a forward pass of this sequence alone."""
    ids = one.tokens.long()
    logits = model(ids[None]).logits[0, one.prompt_length - 1 : -1] / one.temperature
    return logits.log_softmax(-1).gather(1, ids[one.prompt_length :, None])[:, 0]


def probe_step(model: Any, optimizer: Any, experiences: list[Experience], rate: float, entropy_weight: float) -> float:
    """The measured recipe's update, written out: one padded loss with means, clip 0.2 and 0.28, AdamW."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    objective, entropy, tokens = torch.zeros(()), torch.zeros(()), 0
    for one in experiences:
        ids = one.tokens.long()
        everything = (model(ids[None]).logits[0, one.prompt_length - 1 : -1] / one.temperature).log_softmax(-1)
        logprobs = everything.gather(1, ids[one.prompt_length :, None])[:, 0]
        r = (logprobs - one.logprobs).exp()
        objective = objective + torch.min(r * one.advantages, r.clamp(0.8, 1.28) * one.advantages).sum()
        entropy = entropy - (everything.exp() * everything).sum()
        tokens += len(logprobs)
    loss = -objective / tokens - entropy_weight * entropy / tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


async def test_steps_equal_the_recipe(folder: Path, opened: Opener) -> None:
    learner = await opened(config(entropy_coef=0.01, entropy_decay=True, max_tokens=50), total_steps=20)
    plain = Qwen3ForCausalLM.from_pretrained(folder).eval()
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, 4):
        metrics = await learner.step(batch(step), step)
        decay = 1 - step / 20
        loss = probe_step(plain, optimizer, batch(step), 1e-3 * decay * step / 10, 0.01 * decay)
        assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["actor/lr"] == pytest.approx(1e-3 * decay * step / 10)
    expected = dict(plain.named_parameters())
    for name, tensor in await learner.weights():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=2e-5)


async def test_metrics_say_what_happened(folder: Path, opened: Opener) -> None:
    learner = await opened(config(entropy_coef=0.5))
    plain = Qwen3ForCausalLM.from_pretrained(folder).eval()
    experiences = batch(3)
    with torch.no_grad():
        difference = torch.cat([(plain_logprobs(plain, one) - one.logprobs).abs() for one in experiences])
    metrics = await learner.step(experiences, 1)
    assert metrics["rollout/rollout_vs_train_logprob_diff/mean"] == pytest.approx(float(difference.mean()), abs=1e-5)
    assert metrics["rollout/rollout_vs_train_logprob_diff/max"] == pytest.approx(float(difference.max()), abs=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert metrics["actor/entropy_loss"] == pytest.approx(-0.5 * metrics["actor/entropy"])
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/pg_loss"] + metrics["actor/entropy_loss"])
    assert metrics["actor/optimizer_steps"] == 1
    assert metrics["actor/skipped_nonfinite_loss"] == 0
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    assert metrics["prompt_length/mean"] == sum(one.prompt_length for one in experiences) / 12
    assert metrics["response_length/mean"] == sum(one.response_length for one in experiences) / 12
    assert metrics["perf/tokens_per_second"] > 0
    assert {"actor/grad_norm", "actor/ppo_kl", "actor/ratio_max", "time/train_step"} <= metrics.keys()


async def test_a_batch_with_nothing_to_train_on_changes_nothing(opened: Opener) -> None:
    learner = await opened()
    before = await weights_of(learner)
    experiences = batch(1)
    for one in experiences:
        one.action_mask = torch.zeros_like(one.action_mask)
    metrics = await learner.step(experiences, 1)
    assert metrics["actor/skipped_empty"] == 1
    assert metrics["actor/optimizer_steps"] == 0
    assert same(before, await weights_of(learner))
    with pytest.raises(ValueError, match="train step 2 has no experiences"):
        await learner.step([], 2)


async def test_manifest_and_weights_agree_and_are_the_live_ones(opened: Opener) -> None:
    learner = await opened()
    weights = await learner.weights()
    assert await learner.manifest() == [(name, "float32", list(tensor.shape)) for name, tensor in weights]
    assert not any(tensor.requires_grad for _, tensor in weights)
    before = {name: tensor.clone() for name, tensor in weights}
    await learner.step(batch(1), 1)
    assert same(await weights_of(learner), dict(weights))
    assert not same(await weights_of(learner), before)


async def test_bfloat16_shows_bfloat16_and_still_learns_at_a_small_rate(opened: Opener) -> None:
    learner = await opened(config(dtype="bfloat16", lr=1e-6))
    master = {name: tensor.detach().clone() for name, tensor in learner.policy.model.named_parameters()}
    for step in range(1, 4):
        metrics = await learner.step(batch(step), step)
        assert metrics["actor/optimizer_steps"] == 1
    assert {dtype for _, dtype, _ in await learner.manifest()} == {"bfloat16"}
    assert {tensor.dtype for _, tensor in await learner.weights()} == {torch.bfloat16}
    moved = [not torch.equal(tensor, master[name]) for name, tensor in learner.policy.model.named_parameters()]
    assert all(moved)


async def test_the_canary_is_a_plain_forward_pass(folder: Path, opened: Opener) -> None:
    learner = await opened()
    plain = Qwen3ForCausalLM.from_pretrained(folder).eval()
    tokens = [3, 5, 7, 2, 9]
    whole = Experience(tokens=tokens, prompt_length=1, temperature=1.0)
    before = await learner.canary_logprobs(tokens)
    assert before == pytest.approx(plain_logprobs(plain, whole).tolist(), abs=1e-5)
    for step in range(1, 4):
        await learner.step(batch(1), step)
    assert await learner.canary_logprobs(tokens) != pytest.approx(before, abs=1e-4)
    with pytest.raises(ValueError, match="at least 2"):
        await learner.canary_logprobs([3])


async def test_torch_runs_in_one_thread_that_is_not_the_loops(opened: Opener) -> None:
    seen: list[tuple[str, int]] = []
    learner = await opened()
    learner.policy.model.register_forward_pre_hook(
        lambda *_: seen.append((threading.current_thread().name, torch.get_num_threads()))
    )
    async with asyncio.TaskGroup() as group:
        for step in (1, 2, 3):
            group.create_task(learner.step(batch(step), step))
    assert seen == [("learner_0", 1)] * 3


async def test_errors_say_what_to_do(folder: Path, tmp_path: Path, opened: Opener) -> None:
    unopened = TorchLearner(config(), folder, None)
    with pytest.raises(LearnerError, match=r"call open\(\) first"):
        await unopened.step(batch(1), 1)
    await unopened.close()
    with pytest.raises(LearnerError, match=r"no causal language model.*Hugging Face folder"):
        await opened(model=tmp_path)
    learner = await opened()
    await learner.save(tmp_path)
    facts = json.loads((tmp_path / "learner.json").read_text())
    for content, wrong in (
        ("[1]", "learner.json is damaged or missing"),
        ("not JSON", "learner.json is damaged or missing"),
        (json.dumps(facts | {"optimizer": facts["optimizer"] | {"param_groups": []}}), "does not fit this run"),
        (json.dumps(facts | {"optimizer": {}}), "does not fit this run"),
    ):
        (tmp_path / "learner.json").write_text(content)
        with pytest.raises(DamagedCheckpointError, match=wrong):
            await opened(checkpoint=tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
async def test_a_checkpoint_whose_weights_do_not_load_is_damaged(
    tmp_path: Path, opened: Opener, file: str, content: bytes | None
) -> None:
    learner = await opened()
    await learner.save(tmp_path)
    (tmp_path / "state" / file).unlink()
    if content is not None:
        (tmp_path / "state" / file).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"does not load|is damaged or missing"):
        await opened(checkpoint=tmp_path)


async def test_a_checkpoint_of_another_model_is_named_so(tmp_path: Path, opened: Opener) -> None:
    learner = await opened(model=make_model(tmp_path / "small", layers=1))
    (tmp_path / "checkpoint").mkdir()
    await learner.save(tmp_path / "checkpoint")
    with pytest.raises(DamagedCheckpointError, match=r"it has no tensor 'policy\.model\.layers\.1\."):
        await opened(checkpoint=tmp_path / "checkpoint")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here cuda is a good device")
async def test_a_missing_gpu_is_one_clear_error(opened: Opener) -> None:
    settings = config()
    wanted = settings.model_copy(update={"model": settings.model.model_copy(update={"device": "cuda"})})
    with pytest.raises(LearnerError, match=r"no CUDA device here; use model\.device=auto or cpu"):
        await opened(wanted)

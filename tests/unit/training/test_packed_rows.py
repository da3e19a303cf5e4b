"""Packed rows: the same numbers as sequences alone, for the models that may have them; the others are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.unit.training.test_critic import rewarded
from tests.unit.training.test_learner import Opener, batch, config, folder, opened, pack, weights_of
from trinity_mq.config import AlgorithmConfig, TrainerConfig
from trinity_mq.experience import Experience
from trinity_mq.training.critic import Critic, Targets
from trinity_mq.training.model import attention
from trinity_mq.training.model.attention import model_inputs, packing_problem, use_packed_attention
from trinity_mq.training.model.policy import LearnerError, Policy, checkpoint_blocks
from trinity_mq.training.packing import MicroBatch, train_tokens
from trinity_mq.training.update import StepLoss, accumulate

__all__ = ["folder", "opened"]

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "learned positions": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "sliding window": transformers.MistralConfig(**SHAPE, sliding_window=4),
    "gemma2": transformers.Gemma2Config(**SHAPE, head_dim=16, sliding_window=4, final_logit_softcapping=2.0),
}
MAMBA = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "mamba": (MAMBA, "linear_attention"),
    "convolution": (transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]), "of the kind conv"),
    "positions of its own": (
        transformers.OPTConfig(**SMALL, ffn_dim=48, num_hidden_layers=2, word_embed_proj_dim=32),
        "depend on the sequence before it",
    ),
    "slopes instead of positions": (transformers.BloomConfig(**SMALL, n_layer=2), "depend on the sequence before it"),
}


def trained(packing: str = "packed", **settings: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"packing": packing, **settings})


def saved(shape: PreTrainedConfig, folder: Path) -> Path:
    """Write a model of this shape with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MODELS[request.param], tmp_path_factory.mktemp("model"))


def packed_row(experiences: list[Experience], max_tokens: int) -> list[MicroBatch]:
    tokens = train_tokens(experiences, AlgorithmConfig(), {"rl": 1.0}, 1)
    return tokens.micro_batches(range(len(experiences)), max_tokens, packed=True)


def test_a_row_holds_sequences_one_after_the_other() -> None:
    first = Experience(tokens=[10, 11, 12, 13], prompt_length=2, logprobs=[-1.0, -2.0], advantages=[1.0, 1.0])
    second = Experience(tokens=[20, 21], prompt_length=1, logprobs=[-3.0], advantages=[2.0])
    (row,) = packed_row([second, first], 100)
    assert row.input_ids.tolist() == [[10, 11, 12, 20]]
    assert (row.lengths.tolist(), row.longest_packed) == ([3, 1], 3)
    assert (row.rows.tolist(), row.columns.tolist()) == ([0, 0, 0], [1, 2, 3])
    assert (row.segment.tolist(), row.targets.tolist(), row.mu.tolist()) == (
        [0, 0, 1],
        [12, 13, 21],
        [-1.0, -2.0, -3.0],
    )
    assert [one.input_ids.tolist() for one in packed_row([second, first], 5)] == [[[10, 11, 12]], [[20]]]


def test_rows_are_as_full_as_padded_ones_are_not() -> None:
    experiences = batch(7, 40)
    rows, padded = packed_row(experiences, 40), pack(experiences, 40)
    tokens = sum(len(one.tokens) for one in experiences)
    assert sum(row.input_ids.numel() for row in rows) == tokens - 40
    assert sum(one.input_ids.numel() for one in padded) > tokens - 40
    assert len(rows) == math.ceil(tokens / 40)


def test_only_flash_attention_is_told_where_sequences_begin() -> None:
    (row,) = packed_row(batch(1, 3), 100)

    class Told:
        class config:  # noqa: N801
            _attn_implementation = "flash_attention_2"

    lengths = row.lengths.tolist()
    told = model_inputs(Told, row)
    assert told["cu_seq_lens_q"].tolist() == [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
    assert told["cu_seq_lens_q"] is told["cu_seq_lens_k"]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["max_length_q"] == told["max_length_k"] == max(lengths)
    Told.config._attn_implementation = "sdpa"
    alone = model_inputs(Told, row)
    assert alone.keys() == {"input_ids", "position_ids"}
    assert alone["position_ids"].tolist() == [[place for length in lengths for place in range(length)]]
    assert model_inputs(Told, pack(batch(1, 3), 100)[0]).keys() == {"input_ids"}


def alone(folder: Path, experiences: list[Experience]) -> torch.Tensor:
    """Return the logprobs of each sequence in a pass of its own, in the order of the experiences."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for one in experiences:
        ids = one.tokens.long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, one.prompt_length - 1 : -1] / one.temperature
        found.append(logits.log_softmax(-1).gather(1, ids[one.prompt_length :, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("max_tokens", [1, 40, 16384])
def test_logprobs_in_a_row_are_those_of_sequences_alone(model_folder: Path, max_tokens: int) -> None:
    policy = Policy(config().model, model_folder, 0, trained())
    assert policy.packs
    experiences = batch(1)
    wanted = alone(model_folder, experiences)
    found = torch.zeros_like(wanted)
    rows = packed_row(experiences, max_tokens)
    assert len(rows) == {1: 12, 40: 3, 16384: 1}[max_tokens]
    for row in rows:
        found[row.index] = policy.score(row, entropy_gradient=False)[0].detach()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_gradients_of_packed_and_padded_rows_are_equal(model_folder: Path) -> None:
    algorithm = AlgorithmConfig()
    loss = StepLoss(algorithm, {"rl": 1.0}, 0.01)
    found = []
    for packing, max_tokens in (("padded", 16384), ("packed", 16384), ("packed", 30)):
        policy = Policy(config().model, model_folder, 0, trained(packing))
        tokens = train_tokens(batch(2), algorithm, loss.weights, 1)
        batches = tokens.micro_batches(range(12), max_tokens, packed=policy.packs)
        total = accumulate(policy, batches, loss, {})
        assert (total.padding == 0) == (packing == "packed")
        found.append(torch.cat([one.grad.flatten() for one in policy.parameters if one.grad is not None]))
    assert found[0].abs().max() > 1e-3
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-5, atol=1e-6)


def test_the_critic_takes_packed_rows(model_folder: Path) -> None:
    base = config()
    found = []
    for packing in ("padded", "packed"):
        critic = Critic(base.model_copy(update={"trainer": trained(packing)}), model_folder)
        assert critic.division.packed == (packing == "packed")
        torch.nn.init.normal_(critic.module.head.weight, generator=torch.Generator().manual_seed(0))
        tokens = train_tokens(batch(2), AlgorithmConfig(), {"rl": 1.0}, 1)
        batches = tokens.micro_batches(range(12), 60, packed=critic.division.packed)
        values = critic.values(batches, tokens.tokens)
        _, metrics = critic.optimizer_step(batches, Targets(values, torch.arange(tokens.tokens).float()))
        gradient = torch.cat([one.grad.flatten() for one in critic.parameters if one.grad is not None])
        found.append((values, gradient, metrics))
    (values, gradient, metrics), (wanted, slope, others) = found
    assert wanted.std() > 0.1
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-6)
    assert metrics == pytest.approx(others, rel=1e-4)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
async def test_train_steps_are_the_same_in_packed_rows(opened: Opener, name: str) -> None:
    """With a critic, a reference and several micro-batches."""
    if name == "ppo":
        base = config(algorithm_type="ppo", repeat_times=1, critic={"lr": 1e-3})
    else:
        base = config(entropy_coef=0.01)
    seen = []
    for packing in ("padded", "packed"):
        settings = base.model_copy(update={"trainer": trained(packing, max_tokens_per_micro_batch=40)})
        learner = await opened(settings)
        metrics = [await learner.step(rewarded(step) if name == "ppo" else batch(step), step) for step in (1, 2)]
        seen.append((metrics, await weights_of(learner)))
    (padded, weights), (packed, others) = seen
    assert all(one["perf/padding_frac"] > 0 for one in padded)
    assert all(one["perf/padding_frac"] == 0 for one in packed)
    for one, other in zip(padded, packed, strict=True):
        kept = {key: value for key, value in one.items() if not key.startswith(("time/", "perf/"))}
        assert {key: other[key] for key in kept} == pytest.approx(kept, rel=1e-3, abs=1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_mix_sequences_are_refused(tmp_path: Path, name: str) -> None:
    shape, why = REFUSED[name]
    saved(shape, tmp_path)
    wanted = rf"trainer\.packing is packed.*{shape.model_type} model.*{why}.*auto or padded"
    with pytest.raises(LearnerError, match=wanted):
        Policy(config().model, tmp_path, 0, trained())
    with capture_logs() as logs:
        policy = Policy(config().model, tmp_path, 0, trained("auto", share_prefixes=False))
    assert not policy.packs
    assert [(entry["event"], entry["model"]) for entry in logs] == [("rows_are_padded", shape.model_type)]
    assert "no attention for packed rows on cpu" in logs[0]["reason"]
    (padded,) = pack(batch(1), 16384)
    found, _ = policy.score(padded, entropy_gradient=False)
    by_index = torch.zeros_like(found).index_copy(0, padded.index, found)
    torch.testing.assert_close(by_index.detach(), alone(tmp_path, batch(1)), rtol=0, atol=1e-5)


def test_layers_that_only_state_their_kind_are_believed(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert packing_problem(model, torch.float32) is None
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert "chunked_attention" in str(packing_problem(model, torch.float32))


def test_the_first_attention_that_works_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed implementations are replaced: flash attention needs a GPU."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(attention, "_installed", lambda device, dtype: ["flash_attention_2", "eager"])
    assert use_packed_attention(model, "auto", torch.float32) is None
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(attention, "_installed", lambda device, dtype: ["flash_attention_2"])
    problem = use_packed_attention(model, "auto", torch.float32)
    assert "flash_attention_2" in str(problem)
    assert model.config._attn_implementation == "sdpa"
    with capture_logs() as logs:
        policy = Policy(config().model, folder, 0, trained())
    assert policy.packs, "a mask, where that is asked for"
    assert logs == []


def test_why_auto_pads_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, why = REFUSED["mamba"]
    saved(shape, tmp_path)
    monkeypatch.setattr(attention, "_installed", lambda device, dtype: ["eager"])
    with capture_logs() as logs:
        policy = Policy(config().model, tmp_path, 0, trained("auto", share_prefixes=False))
    assert not policy.packs
    assert [(entry["event"], entry["model"]) for entry in logs] == [("rows_are_padded", "mamba")]
    assert why in logs[0]["reason"]


def test_a_rank_without_sequences_still_passes_through_the_model(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    tokens = train_tokens(batch(2, 3), algorithm, {"rl": 1.0}, 1)
    for packed in (False, True):
        (empty,) = tokens.micro_batches([0], 100, packed=packed, rank=1, ranks=2)
        assert (empty.tokens, empty.input_ids.shape, empty.longest_packed) == (0, (1, 1), 0)
        policy = Policy(config().model, folder, 0, trained() if packed else None)
        logprob, entropy = policy.score(empty, entropy_gradient=True)
        (logprob.sum() + entropy.sum()).backward()
        assert all(one.grad is not None and not one.grad.any() for one in policy.parameters)


def test_ranks_share_an_optimizer_step(folder: Path) -> None:
    experiences = batch(2, 12)
    tokens = train_tokens(experiences, AlgorithmConfig(), {"rl": 1.0}, 1)
    for packed in (False, True):
        whole = tokens.micro_batches(range(12), 16384, packed=packed)[0]
        parts = [tokens.micro_batches(range(12), 30, packed=packed, rank=rank, ranks=3) for rank in range(3)]
        assert len(set(map(len, parts))) == 1
        every = [one for part in parts for one in part]
        assert sorted(index for one in every for index in one.index.tolist()) == sorted(whole.index.tolist())
        assert {scale for one in every for scale in one.scale.tolist()} == set(whole.scale.tolist())
        sizes = [sum(int(one.lengths.sum()) for one in part) for part in parts]
        assert max(sizes) - min(sizes) <= max(len(one.tokens) for one in experiences)


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_gradients_are_the_same_without_kept_activations(model_folder: Path, packing: str) -> None:
    loss = StepLoss(AlgorithmConfig(), {"rl": 1.0}, 0.01)
    found, kept = [], []
    for is_on in (False, True):
        policy = Policy(config().model, model_folder, 0, trained(packing, gradient_checkpointing=is_on))
        tokens = train_tokens(batch(2), AlgorithmConfig(), loss.weights, 1)
        batches = tokens.micro_batches(range(12), 16384, packed=policy.packs)
        elements = [0]

        def note(tensor: torch.Tensor, elements: list[int] = elements) -> torch.Tensor:
            elements[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            policy.score(batches[0], entropy_gradient=True)
        kept.append(elements[0])
        accumulate(policy, batches, loss, {})
        found.append(torch.cat([one.grad.flatten() for one in policy.parameters if one.grad is not None]))
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
    assert kept[1] < kept[0] / 2


def test_a_model_without_blocks_is_told_so() -> None:
    with pytest.raises(LearnerError, match=r"Linear has no block.*gradient_checkpointing=false"):
        checkpoint_blocks(torch.nn.Linear(2, 2))

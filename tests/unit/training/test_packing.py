"""Packed rows and shared prefixes: the numbers are those of sequences alone; some models may not have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.unit.training.test_critic_and_reference import rewarded
from tests.unit.training.test_learner import VOCABULARY, Opener, batch, config, pack, weights_of
from trinity_mq.algorithms.evaluator import component_weights
from trinity_mq.algorithms.scoring import HeadOperation, entropy_baselines, token_logprobs
from trinity_mq.config import AlgorithmConfig, TrainerConfig
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.experience import EID, CustomField, Experience
from trinity_mq.experience.ragged import Indexes
from trinity_mq.training.critic import Critic, Targets
from trinity_mq.training.model import attention
from trinity_mq.training.model.attention import model_inputs, use_packed_attention
from trinity_mq.training.model.policy import LearnerError, Policy, TokenScorer, checkpoint_blocks, detect_head_operation
from trinity_mq.training.model.shared_prefixes import prefix_problem
from trinity_mq.training.packing import (
    IMITATED,
    KEPT,
    PAIRED,
    SAMPLED,
    DivisionSettings,
    MicroBatch,
    Prefixes,
    StepTokens,
    divide_shared,
    split,
    train_tokens,
)
from trinity_mq.training.parallel.division import balance, costs, divide
from trinity_mq.training.parallel.division import pack as filled
from trinity_mq.training.update import StepLoss, accumulate

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


SHARING = ("llama", "qwen3", "learned positions", "positions of its own", "slopes instead of positions")
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "padded", "share_prefixes": False},
    "packed": {"packing": "packed"},
    "shared": {"packing": "padded"},
    "auto": {"packing": "auto", "share_prefixes": False},
}


def trained(layout: str = "packed", **settings: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(LAYOUTS[layout] | settings)


def saved(shape: PreTrainedConfig, folder: Path) -> Path:
    """Write a model of this shape with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[*(f"packed, {name}" for name in MODELS), *(f"shared, {name}" for name in SHARING)],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A layout and the folder of a model that may have it."""
    layout, _, name = request.param.partition(", ")
    shape = MODELS[name] if name in MODELS else REFUSED[name][0]
    return layout, saved(shape, tmp_path_factory.mktemp("model"))


def groups(answers: int = 6, prompts: tuple[int, ...] = (9, 4, 12)) -> list[Experience]:
    """Return answers of different lengths to prompts of these lengths."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for task, length in enumerate(prompts):
        prompt = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        for run in range(answers):
            answer = torch.randint(1, VOCABULARY, (1 + (run + task) % 4,), generator=generator).tolist()
            rows.append(
                Experience(
                    eid=EID(batch=0, task=task, run=run),
                    tokens=prompt + answer,
                    prompt_length=length,
                    logprobs=[-2.0 - 0.1 * run] * len(answer),
                    advantages=[1.0 - 0.3 * run] * len(answer),
                    temperature=0.7,
                )
            )
    return rows


def data(layout: str) -> list[Experience]:
    return groups() if layout == "shared" else batch(2)


def tokens_of(experiences: list[Experience]) -> StepTokens:
    return train_tokens(experiences, AlgorithmConfig(), {"rl": 1.0}, 1)


def divided(layout: str, experiences: list[Experience], max_tokens: int = 16384) -> list[MicroBatch]:
    """Return the micro-batches of an optimizer step."""
    division = DivisionSettings(max_tokens, packed=layout == "packed", shares_prefixes=layout == "shared")
    return tokens_of(experiences).micro_batches(range(len(experiences)), division)


def has(layout: str, batches: list[MicroBatch]) -> bool:
    """Say whether micro-batches have a layout."""
    shares, packs = batches[0].prefixes is not None, batches[0].longest_packed > 0
    return (shares, packs) == (layout == "shared", layout == "packed")


def test_a_row_holds_sequences_one_after_the_other() -> None:
    first = Experience(tokens=[10, 11, 12, 13], prompt_length=2, logprobs=[-1.0, -2.0], advantages=[1.0, 1.0])
    second = Experience(tokens=[20, 21], prompt_length=1, logprobs=[-3.0], advantages=[2.0])
    (row,) = divided("packed", [second, first], 100)
    assert row.input_ids.tolist() == [[10, 11, 12, 20]]
    assert (row.lengths.tolist(), row.longest_packed) == ([3, 1], 3)
    assert (row.rows.tolist(), row.columns.tolist()) == ([0, 0, 0], [1, 2, 3])
    assert (row.segment.tolist(), row.targets.tolist(), row.mu.tolist()) == (
        [0, 0, 1],
        [12, 13, 21],
        [-1.0, -2.0, -3.0],
    )
    assert [one.input_ids.tolist() for one in divided("packed", [second, first], 5)] == [[[10, 11, 12]], [[20]]]


def test_only_flash_attention_is_told_where_sequences_begin() -> None:
    (row,) = divided("packed", batch(1, 3), 100)

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


@pytest.mark.parametrize("max_tokens", [1, 30, 16384])
def test_logprobs_are_those_of_sequences_alone(case: tuple[str, Path], max_tokens: int) -> None:
    layout, model = case
    policy, experiences = Policy(config().model, model, 0, trained(layout)), data(layout)
    wanted = alone(model, experiences)
    logprobs = torch.zeros_like(wanted)
    division = replace(policy.division, max_tokens=max_tokens)
    batches = tokens_of(experiences).micro_batches(range(len(experiences)), division)
    assert len(batches) > 1 or max_tokens == 16384
    assert has(layout, batches) or (layout, max_tokens) == ("shared", 1)
    for one in batches:
        logprobs[one.index] = policy.score(one, entropy_gradient=False)[0].detach()
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-5)


def test_gradients_are_those_of_padded_rows(case: tuple[str, Path]) -> None:
    layout, model = case
    loss = StepLoss(AlgorithmConfig(), {"rl": 1.0}, 0.01)
    gradients = []
    for rows, max_tokens in (("padded", 16384), (layout, 16384), (layout, 30)):
        policy = Policy(config().model, model, 0, trained(rows))
        experiences = data(layout)
        division = replace(policy.division, max_tokens=max_tokens)
        batches = tokens_of(experiences).micro_batches(range(len(experiences)), division)
        assert has(rows, batches)
        total = accumulate(policy, batches, loss, {})
        assert (total.padding == 0) == (rows == "packed")
        gradients.append(torch.cat([one.grad.flatten() for one in policy.parameters if one.grad is not None]))
    assert gradients[0].abs().max() > 1e-3
    for one in gradients[1:]:
        torch.testing.assert_close(one, gradients[0], rtol=1e-5, atol=1e-6)


def test_gradients_are_the_same_without_kept_activations(case: tuple[str, Path]) -> None:
    layout, model = case
    loss = StepLoss(AlgorithmConfig(), {"rl": 1.0}, 0.01)
    gradients, kept = [], []
    for is_on in (False, True):
        settings = trained("padded" if layout == "shared" else layout, gradient_checkpointing=is_on)
        policy = Policy(config().model, model, 0, settings)
        batches = tokens_of(batch(2)).micro_batches(range(12), policy.division)
        elements = [0]

        def note(tensor: torch.Tensor, elements: list[int] = elements) -> torch.Tensor:
            elements[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            policy.score(batches[0], entropy_gradient=True)
        kept.append(elements[0])
        accumulate(policy, batches, loss, {})
        gradients.append(torch.cat([one.grad.flatten() for one in policy.parameters if one.grad is not None]))
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-7)
    assert kept[1] < kept[0] / 2


def test_the_critic_takes_the_same_rows(case: tuple[str, Path]) -> None:
    layout, model = case
    results = []
    for rows in ("padded", layout):
        critic = Critic(config().model_copy(update={"trainer": trained(rows)}), model)
        torch.nn.init.normal_(critic.module.head.weight, generator=torch.Generator().manual_seed(0))
        tokens = tokens_of(data(layout))
        batches = tokens.micro_batches(range(len(data(layout))), replace(critic.division, max_tokens=60))
        assert has(rows, batches)
        values = critic.values(batches, tokens.tokens)
        _, metrics = critic.optimizer_step(batches, Targets(values, torch.arange(tokens.tokens).float()))
        gradient = torch.cat([one.grad.flatten() for one in critic.parameters if one.grad is not None])
        results.append((values, gradient, metrics))
    (wanted, slope, others), (values, gradient, metrics) = results
    assert wanted.std() > 0.1
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-6)
    assert metrics == pytest.approx(others, rel=1e-4)


@pytest.mark.parametrize(("layout", "algorithm"), [("packed", "grpo"), ("packed", "ppo"), ("shared", "grpo")])
async def test_train_steps_are_the_same(opened: Opener, layout: str, algorithm: str) -> None:
    """With a critic, a reference and several micro-batches."""
    if algorithm == "ppo":
        base = config(algorithm_type="ppo", repeat_times=1, critic={"lr": 1e-3})
    else:
        base = config(entropy_coef=0.01)
    seen = []
    for rows in ("padded", layout):
        settings = base.model_copy(update={"trainer": trained(rows, max_tokens_per_micro_batch=40)})
        learner = await opened(settings)
        metrics = [await learner.step(rewarded(step) if algorithm == "ppo" else data(layout), step) for step in (1, 2)]
        seen.append((metrics, await weights_of(learner)))
    (padded, weights), (others, other_weights) = seen
    for one, other in zip(padded, others, strict=True):
        assert (other["perf/padding_frac"] == 0) == (layout == "packed")
        assert other["perf/padding_frac"] != one["perf/padding_frac"] > 0
        kept = {key: value for key, value in one.items() if not key.startswith(("time/", "perf/"))}
        assert {key: other[key] for key in kept} == pytest.approx(kept, rel=1e-3, abs=1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(other_weights[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_mix_sequences_are_refused(tmp_path: Path, name: str) -> None:
    shape, why = REFUSED[name]
    saved(shape, tmp_path)
    wanted = rf"trainer\.packing is packed.*{shape.model_type} model.*{why}.*auto or padded"
    with pytest.raises(LearnerError, match=wanted):
        Policy(config().model, tmp_path, 0, trained())
    with capture_logs() as logs:
        policy = Policy(config().model, tmp_path, 0, trained("auto"))
    assert not policy.packs
    assert [(entry["event"], entry["model"]) for entry in logs] == [("rows_are_padded", shape.model_type)]
    assert "no attention for packed rows on cpu" in logs[0]["reason"]
    (padded,) = pack(batch(1), 16384)
    found = policy.score(padded, entropy_gradient=False).logprob
    by_index = torch.zeros_like(found).index_copy(0, padded.index, found)
    torch.testing.assert_close(by_index.detach(), alone(tmp_path, batch(1)), rtol=0, atol=1e-5)


def test_the_first_attention_that_works_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed implementations are replaced: flash attention needs a GPU."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    installed = ["flash_attention_2", "eager"]
    monkeypatch.setattr(attention, "_installed", lambda device, dtype: installed)
    assert use_packed_attention(model, "auto", torch.float32) is None
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    installed.remove("eager")
    problem = use_packed_attention(model, "auto", torch.float32)
    assert "flash_attention_2" in str(problem)
    assert model.config._attn_implementation == "sdpa"
    with capture_logs() as logs:
        policy = Policy(config().model, folder, 0, trained())
    assert policy.packs, "a mask, where that is asked for"
    assert logs == []


def test_a_rank_without_sequences_still_passes_through_the_model(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    tokens = train_tokens(batch(2, 3), algorithm, {"rl": 1.0}, 1)
    for packed in (False, True):
        (empty,) = tokens.micro_batches([0], DivisionSettings(100, packed=packed, rank=1, ranks=2))
        assert (empty.tokens, empty.input_ids.shape, empty.longest_packed) == (0, (1, 1), 0)
        policy = Policy(config().model, folder, 0, trained() if packed else None)
        logprob, entropy, _ = policy.score(empty, entropy_gradient=True)
        (logprob.sum() + entropy.sum()).backward()
        assert all(one.grad is not None and not one.grad.any() for one in policy.parameters)


def test_a_model_without_blocks_is_told_so() -> None:
    with pytest.raises(LearnerError, match=r"Linear has no block.*gradient_checkpointing=false"):
        checkpoint_blocks(torch.nn.Linear(2, 2))


OTHERS = {name: MODELS[name] for name in ("sliding window", "gemma2")} | {
    name: REFUSED[name][0] for name in ("mamba", "convolution")
}


def test_a_prompt_has_one_row_and_answers_begin_with_its_last_token() -> None:
    answers = [
        Experience(tokens=[10, 11, 12, *answer], prompt_length=3, logprobs=[-1.0] * len(answer), advantages=[1.0] * 3)
        for answer in ([20, 21, 22], [30, 31, 32])
    ]
    other = Experience(tokens=[40, 41, 42], prompt_length=1, logprobs=[-1.0, -2.0], advantages=[1.0, 1.0])
    (found,) = divided("shared", [*answers, other, *answers])
    assert found.prefixes is not None
    assert found.prefix_lengths is not None
    assert found.prefix_of is not None
    begins = [
        found.prefixes[number, : found.prefix_lengths[number]].tolist() for number in range(len(found.prefix_lengths))
    ]
    assert sorted(begins) == [[], [10, 11]]
    rows = [
        begins[number] + ids[:length].tolist()
        for number, ids, length in zip(found.prefix_of.tolist(), found.input_ids, found.lengths.tolist(), strict=True)
    ]
    assert sorted(rows) == [*[[10, 11, 12, 20, 21]] * 2, *[[10, 11, 12, 30, 31]] * 2, [40, 41]]
    before = found.input_ids[found.rows, found.columns].tolist()
    assert list(zip(before, found.targets.tolist(), strict=True))[:3] in ([(12, 20), (20, 21), (21, 22)],)
    assert (found.positions, found.padding) == (5 * 3 + 2 * 2, 1 + 2)


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_layers_do_not_see_all_tokens_are_refused(name: str) -> None:
    problem = prefix_problem(AutoModelForCausalLM.from_config(OTHERS[name]).eval(), torch.float32)
    assert problem is not None
    assert "layers" in problem


def test_why_no_prefix_is_shared_is_logged(tmp_path: Path) -> None:
    folder = saved(transformers.MistralConfig(**SHAPE, sliding_window=4), tmp_path)
    with capture_logs() as logs:
        policy = Policy(config().model, folder, 0, trained("shared"))
    assert not policy.division.shares_prefixes
    assert [one["reason"] for one in logs if one["event"] == "prefixes_not_shared"] == [
        "its layers attend to the last 4 tokens alone"
    ]


def test_a_model_of_a_run_with_recomputed_blocks_shares_nothing(folder: Path) -> None:
    assert Policy(config().model, folder, 0, trained("shared")).division.shares_prefixes
    assert not Policy(
        config().model, folder, 0, trained("shared", gradient_checkpointing=True)
    ).division.shares_prefixes
    assert not Policy(config().model, folder, 0).division.shares_prefixes


SEQUENCES = st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 30))


@given(st.lists(SEQUENCES, min_size=1, max_size=40), st.integers(1, 200), st.booleans())
def test_every_unit_is_in_one_micro_batch_within_the_budget(
    sequences: list[tuple[int, int, int]], budget: int, in_pairs: bool
) -> None:
    sizes = {number: prefix for number, _, prefix in sequences}
    if in_pairs:
        sequences = [one for one in sequences for _ in range(2)]
    numbers = np.array([number for number, _, _ in sequences])
    own = np.array([sizes[number] for number in numbers.tolist()])
    whole = own + [rest for _, rest, _ in sequences]
    every = np.arange(len(sequences))
    units = every.reshape(-1, 2) if in_pairs else np.stack([every, np.full(len(every), -1)], 1)
    parts = divide_shared(units, whole, Prefixes(numbers, own), budget)
    if parts is None:
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(units)))
    for part in parts:
        members = units[part][units[part] >= 0]
        prefix = own[members].max()
        kept = len(set(numbers[members].tolist())) + KEPT * len(members)
        cost = len(members) * (whole - own)[members].max() + kept * prefix
        assert cost <= budget or len(part) == 1


AFTER: dict[str, tuple[PreTrainedConfig, HeadOperation]] = {
    "nothing": (transformers.LlamaConfig(**SHAPE), HeadOperation()),
    "softcap": (
        transformers.Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=2.0),
        HeadOperation(softcap=2.0),
    ),
    "scale": (transformers.CohereConfig(**SHAPE, logit_scale=0.5), HeadOperation(scale=0.5)),
    "divisor": (transformers.GraniteConfig(**SHAPE, logits_scaling=4.0), HeadOperation(scale=0.25)),
}


class Lifted(transformers.LlamaForCausalLM):
    """A model that does with its logits what nobody could know."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        found = super().forward(*arguments, **named)
        found.logits = found.logits.abs()
        return found


def scored(scorer: TokenScorer, ids: Tensor) -> tuple[Any, Any]:
    """Return the scores of some tokens, and those of the model's logits."""
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([1, 3, 2])
    targets, temperature = ids[rows, columns + 1], torch.tensor([1.0, 0.5, 2.0])
    inputs = {"input_ids": ids[:, :-1]}
    found = scorer(inputs, (rows, columns), targets, temperature, entropy_gradient=True, with_baseline=True)
    logits = scorer.model(**inputs).logits[rows, columns]
    wanted = token_logprobs(logits, targets, temperature, entropy_gradient=True)
    return found, (*wanted, entropy_baselines(logits, temperature))


@pytest.mark.parametrize("name", [*AFTER, "unknown"])
def test_scores_are_those_of_the_models_logits(name: str) -> None:
    torch.manual_seed(0)
    if name == "unknown":
        model, known = Lifted(transformers.LlamaConfig(**SHAPE)).eval(), None
    else:
        shape, known = AFTER[name]
        model = AutoModelForCausalLM.from_config(shape).eval()
    scorer = TokenScorer(model)
    assert scorer.after == known
    found, wanted = scored(scorer, torch.randint(0, 64, (2, 6)))
    torch.testing.assert_close(tuple(found), wanted, rtol=1e-5, atol=1e-5)
    leaves = list(model.parameters())
    slopes = [torch.autograd.grad(one[0].sum() + one[1].sum(), leaves, allow_unused=True) for one in (found, wanted)]
    assert any(one is not None and one.abs().max() > 0.01 for one in slopes[1])
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


def test_a_setting_that_the_model_does_not_follow_is_not_believed() -> None:
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).eval()
    assert detect_head_operation(model) == HeadOperation()
    model.config.final_logit_softcapping = 30.0
    assert detect_head_operation(model) is None


def test_the_head_sees_no_token(folder: Path) -> None:
    policy = Policy(config().model, folder, 0)
    sizes: list[int] = []
    policy.model.get_output_embeddings().register_forward_hook(lambda module, given, found: sizes.append(len(found)))
    (padded,) = pack(batch(1), 16384)
    policy.score(padded, entropy_gradient=False)
    assert sizes == [0]


def saved_as(kind: type[transformers.LlamaForCausalLM], folder: Path) -> Path:
    """Write a model of a class of our own, which ``AutoModelForCausalLM`` finds by its kind."""
    shape = type(f"{kind.__name__}Config", (transformers.LlamaConfig,), {"model_type": kind.__name__.lower()})
    own = type(kind.__name__, (kind,), {"config_class": shape})
    transformers.AutoConfig.register(shape.model_type, shape, exist_ok=True)
    AutoModelForCausalLM.register(shape, own, exist_ok=True)
    return saved(shape(**SHAPE), folder)


def test_unknown_logits_are_said_once_and_used(tmp_path: Path) -> None:
    saved_as(Lifted, tmp_path)
    with capture_logs() as logs:
        policy = Policy(config().model, tmp_path, 0)
    assert [(entry["event"], entry["model"]) for entry in logs] == [("logits_not_chunked", "Lifted")]
    (padded,) = pack(batch(1), 16384)
    sizes: list[int] = []
    policy.model.get_output_embeddings().register_forward_hook(lambda module, given, found: sizes.append(len(found)))
    found = policy.score(padded, entropy_gradient=False).logprob
    assert sizes == [padded.tokens]
    by_index = torch.zeros_like(found).index_copy(0, padded.index, found)
    torch.testing.assert_close(by_index.detach(), alone(tmp_path, batch(1)), rtol=0, atol=1e-5)


class Headless(transformers.LlamaForCausalLM):
    """A model that does not tell its head."""

    def get_output_embeddings(self) -> None:
        return None


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    saved_as(Headless, tmp_path)
    with pytest.raises(LearnerError, match=r"Headless has no output embeddings"):
        Policy(config().model, tmp_path, 0)


def micro_batches_of(experiences: list[Experience], max_tokens: int, **pieces: Any) -> list[MicroBatch]:
    """Return the micro-batches of one optimizer step over all experiences, in train step 1."""
    config = LossConfig.model_validate(pieces)
    tokens = train_tokens(experiences, config, component_weights(config, 1), 1)
    return tokens.micro_batches(range(len(experiences)), DivisionSettings(max_tokens), config.reduction)


def experience(run: int, prompt: int, response: int, **fields: Any) -> Experience:
    """Token values say whose they are and where: 100 * run + position."""
    values = torch.arange(response, dtype=torch.float32)
    return Experience(
        **{
            "eid": EID(1, 0, run, suffix="s"),
            "tokens": torch.arange(prompt + response, dtype=torch.int32) + 100 * run,
            "prompt_length": prompt,
            "logprobs": -values - run,
            "advantages": values + 10 * run,
            "temperature": 1.0 + run,
            **fields,
        }
    )


def weighted(run: int, prompt: int, response: int, **fields: Any) -> Experience:
    """An experience with a custom field, its run."""
    weight = CustomField("weight", "loss_weight", torch.float32)
    return experience(run, prompt, response, info={"weight": run}, custom_fields=[weight], **fields)


def listed(micro: MicroBatch) -> list[tuple[int, int, float, float, float]]:
    """Return (token, the token that predicts it, logprob, advantage, temperature) of each trained token."""
    before = micro.input_ids[micro.rows, micro.columns]
    columns = (micro.targets, before, micro.mu, micro.advantages, micro.temperature)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_each_token_is_predicted_by_the_one_before_it() -> None:
    (micro,) = micro_batches_of([experience(1, 2, 3), experience(2, 1, 2)], 100)
    assert micro.input_ids.tolist() == [[100, 101, 102, 103], [200, 201, 0, 0]]
    assert listed(micro) == [
        (102, 101, -1.0, 10.0, 2.0),
        (103, 102, -2.0, 11.0, 2.0),
        (104, 103, -3.0, 12.0, 2.0),
        (201, 200, -2.0, 20.0, 3.0),
        (202, 201, -3.0, 21.0, 3.0),
    ]
    assert micro.tokens == 5
    (masked,) = micro_batches_of([experience(1, 2, 4, action_mask=[True, False, False, True], temperature=None)], 100)
    assert listed(masked) == [(102, 101, -1.0, 10.0, 1.0), (105, 104, -4.0, 13.0, 1.0)]


def test_is_deterministic_for_equal_lengths() -> None:
    batches = micro_batches_of([experience(run, 2, 2) for run in range(5)], 8)
    assert [micro.input_ids[:, 0].tolist() for micro in batches] == [[0, 100], [200, 300], [400]]


def test_leaves_out_experiences_without_a_trained_token() -> None:
    masked = experience(1, 3, 2, action_mask=[False, False])
    truncated = Experience(
        tokens=[1, 2, 3], prompt_length=3, logprobs=[0.0], truncate_status="prompt_truncated", reward=0.0
    )
    (micro,) = micro_batches_of([masked, experience(2, 1, 1), truncated], 100)
    assert micro.targets.tolist() == [201]
    assert micro_batches_of([masked, truncated], 100) == []
    assert micro_batches_of([], 100) == []


def changed(**fields: Any) -> Experience:
    """An experience whose fields were changed later."""
    found = experience(1, 2, 3)
    vars(found).update(fields)
    return found


@pytest.mark.parametrize(
    ("experiences", "match"),
    [
        ([experience(1, 2, 3, advantages=None)], r"1/0/1/0/s has no advantages.*operator"),
        ([experience(1, 2, 3, logprobs=None)], r"1/0/1/0/s has no logprobs.*engine"),
        ([experience(1, 2, 3, temperature=0.0)], r"temperature 0:.*above 0"),
        ([changed(advantages=torch.zeros(2))], "advantages has 2 values, wanted one per response token"),
        ([changed(prompt_length=3)], "wanted one per response token"),
        ([Experience(tokens=[1, 2], chosen=[3], rejected=[4])], "dpo"),
        ([weighted(1, 2, 2), experience(2, 2, 2)], "the same"),
        (
            [Experience(tokens=[1, 2, 3], prompt_length=1, info={"is_expert": True})],
            r"is an answer to imitate.*algorithm\.weights\.ce",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(experiences: list[Experience], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        micro_batches_of(experiences, 100)


def test_distillation_needs_the_teachers_logprobs() -> None:
    with pytest.raises(ValueError, match=r"has no teacher_logprobs"):
        micro_batches_of([experience(1, 1, 2)], 100, weights={"rl": 0.0, "ref_kl": 1.0})


def test_mini_batches_share_out_everything_evenly_and_repeatably() -> None:
    parts = split(7, 3, "0/5/0")
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert sorted(number for part in parts for number in part) == list(range(7))
    assert split(7, 3, "0/5/0") == parts
    assert split(7, 3, "0/5/1") != parts
    assert [len(part) for part in split(2, 4, "")] == [1, 1], "never empty"
    assert split(2, 1, "") == [[0, 1]], "a single one keeps its order"
    assert split(0, 1, "") == split(0, 3, "") == []


def test_moves_to_a_device_whole() -> None:
    both = [weighted(run, 2, 3) for run in (1, 2)]
    for one in both:
        one.info["engine"] = f"engine-{one.eid.run}"
    (micro,) = micro_batches_of(both, 100)
    moved = vars(micro.to(torch.device("meta")))
    assert moved.pop("longest_packed") == 0
    columns = [*moved.pop("custom").values(), *moved.pop("engines").values()]
    columns += [value for value in moved.values() if value is not None]
    assert {str(column.device) for column in columns} == {"meta"}


def test_custom_fields_are_there_for_each_trained_token() -> None:
    mask = [True, False, True]
    given = [weighted(1, 2, 2), weighted(2, 1, 8), weighted(3, 1, 3, action_mask=mask), weighted(4, 1, 4)]
    batches = micro_batches_of(given, 10)
    assert len(batches) > 1
    for micro in batches:
        assert micro.custom["loss_weight"].tolist() == (micro.targets // 100).tolist()
    assert sum(micro.tokens for micro in batches) == 16


def test_answers_to_imitate_and_pairs_are_reduced_by_themselves() -> None:
    expert = Experience(eid=EID(1, 1, 0), tokens=[1, 2, 3, 4], prompt_length=1, info={"is_expert": True})
    pairs = [Experience(eid=EID(1, 2, run), tokens=[1, 2], chosen=[3, 4], rejected=[5]) for run in range(2)]
    weights = {"rl": 1.0, "ce": 1.0, "pair": 1.0}
    batches = micro_batches_of([experience(1, 2, 5), expert, *pairs], 8, weights=weights)
    scales: dict[int, set[float]] = {}
    for micro in batches:
        for role, scale in zip(micro.role.tolist(), micro.scale.tolist(), strict=True):
            scales.setdefault(role, set()).add(round(scale, 6))
        paired = micro.sequence[micro.role == PAIRED].unique().tolist()
        assert len(paired) % 2 == 0, "the answers of a pair stay together"
    assert scales == {SAMPLED: {0.2}, IMITATED: {round(1 / 3, 6)}, PAIRED: {0.5}}


UNITS = st.lists(st.tuples(st.integers(2, 300), st.one_of(st.just(0), st.integers(2, 300))), max_size=60)
"""Lengths of single sequences, and of pairs."""


def table(units: list[tuple[int, int]]) -> Indexes:
    return np.array(units, dtype=np.int64).reshape(-1, 2)


@given(UNITS, st.integers(1, 5), st.integers(1, 700), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_every_sequence_is_in_one_micro_batch_within_the_budget(
    units: list[tuple[int, int]], ranks: int, budget: int, packed: bool
) -> None:
    lengths = table(units)
    parts = divide(lengths, budget, packed=packed, ranks=ranks)
    assert len(parts) == ranks
    assert len(set(map(len, parts))) == 1, "ranks take part in each other's passes"
    batches = [micro for part in parts for micro in part]
    assert sorted(unit for micro in batches for unit in micro.tolist()) == list(range(len(units)))
    for micro in batches:
        mine = lengths[micro]
        tokens = mine.sum() if packed else (mine > 0).sum() * mine.max(initial=0)
        assert tokens <= budget or len(micro) == 1
    for part in parts:
        sizes = [len(micro) for micro in part]
        assert sizes == sorted(sizes, key=lambda size: size == 0), "empty ones come last"
    busiest = max(sum(len(micro) > 0 for micro in part) for part in parts)
    assert len(parts[0]) == busiest, "no more empty ones than it takes"


@given(UNITS, st.integers(1, 5), st.integers(16, 4096))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_ranks_differ_by_at_most_one_unit(units: list[tuple[int, int]], ranks: int, hidden_size: int) -> None:
    each = costs(table(units), hidden_size)
    loads = [each[part].sum() for part in balance(each, ranks)]
    largest = each.max(initial=0.0)
    assert max(loads) - min(loads) <= largest * (1 + 1e-9)
    assert max(loads) <= (each.sum() / ranks + largest) * (1 + 1e-9)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 200))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_rows_are_packed_tightly(lengths: list[int], budget: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    rows = filled(sizes, budget)
    loads = [int(sizes[row].sum()) for row in rows]
    small = sorted(load for load in loads if load <= budget)
    assert sum(small[:2]) > budget or len(small) < 2, "two rows that fit into one would have been one"
    assert max(lengths) == sizes[rows[0]].max(), "if memory is short, the first row shows it"

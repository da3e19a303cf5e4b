"""Mixture-of-experts models: the engine reports the experts of each token, and the trainer trains through them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.unit.training.test_learner import Opener
from trinity_mq.config import AlgorithmConfig, Config, ModelConfig, TinyModelConfig, TrainerConfig
from trinity_mq.engines.generation.request import Completion, GenerationRequest
from trinity_mq.engines.server.openai.requests import CompletionBody
from trinity_mq.engines.server.openai.responses import text_choice
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import Experience
from trinity_mq.experience.batch import decode, encode
from trinity_mq.models.errors import EngineRefused, ModelError
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.models.recording.merging import merge_turns
from trinity_mq.models.recording.responses import experiences_of
from trinity_mq.models.routers import UNKNOWN, Routers, RouterShape
from trinity_mq.operations.validate import check_router_replay
from trinity_mq.training.model.policy import LearnerError, Policy
from trinity_mq.training.packing import StepTokens, train_tokens
from trinity_mq.training.update import StepLoss, accumulate

LAYERS, TOP_K, EXPERTS = 2, 2, 8
SHAPES = RouterShape(LAYERS, TOP_K, EXPERTS)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, num_experts=EXPERTS, moe_intermediate_size=16),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=EXPERTS),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, head_dim=16, num_local_experts=EXPERTS, layer_types=["full_attention"] * LAYERS
    ),
    # groups of two experts: the choice of a group is another ``topk``, also of two
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SHAPE, **LATENT, n_routed_experts=EXPERTS, n_group=4, topk_group=2, first_k_dense_replace=0
    ),
}
TINY = TinyModelConfig(num_experts=EXPERTS, num_experts_per_tok=TOP_K, initializer_range=0.3, intermediate_size=32)
MODEL = ModelConfig(
    tiny=TINY, max_model_len=64, max_prompt_tokens=32, max_response_tokens=16, router_replay=True, dtype="bfloat16"
)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model_folder(MODEL, tmp_path_factory.mktemp("experts") / "model", 0)


def policy(folder: Path, *, replay: bool = True, dtype: str = "float32", **trainer: Any) -> Policy:
    settings = TrainerConfig.model_validate({"packing": "padded", "share_prefixes": False, **trainer})
    return Policy(MODEL.model_copy(update={"router_replay": replay, "dtype": dtype}), folder, 0, settings)


def generator(folder: Path, dtype: str) -> TextGenerator:
    made = TextGenerator.build(MODEL.model_copy(update={"dtype": dtype}), folder, num_threads=1)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    made.apply(made.check({name: weight.to(getattr(torch, dtype)) for name, weight in saved.named_parameters()}))
    return made


def sampled(made: TextGenerator, texts: list[str], n: int = 4) -> tuple[list[list[int]], list[list[Completion]]]:
    prompts = [made.codec.encode(text) for text in texts]
    requests = [
        GenerationRequest(prompt, 12, n=n, seed=number, stop_ids=frozenset({1}))
        for number, prompt in enumerate(prompts)
    ]
    return prompts, made.generate(requests)


def answered(made: TextGenerator, texts: list[str]) -> list[Experience]:
    """Return the experiences of an engine's answers, read as a runner reads them."""
    prompts, completions = sampled(made, texts)
    body = CompletionBody.model_validate({"prompt": "1", "return_token_ids": True})
    experiences = []
    for prompt, answers in zip(prompts, completions, strict=True):
        choices = [text_choice(index, answer, body, (0, 0), made.codec) for index, answer in enumerate(answers)]
        experiences += experiences_of(json.loads(json.dumps({"prompt_token_ids": prompt, "choices": choices})), 1.0)
    return experiences


@pytest.mark.parametrize("family", FAMILIES)
def test_prescribed_experts_compute_a_token(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    ids = torch.randint(1, 64, (3, 5))
    plain = model(input_ids=ids).logits
    routers = Routers(model)
    assert torch.equal(model(input_ids=ids).logits, plain)
    own = routers.chosen(3)
    assert (own.shape, own.dtype) == ((3, 5, LAYERS, TOP_K), torch.uint8)
    assert routers.places == [0, 1]
    routers.prescribe(own)
    assert torch.equal(model(input_ids=ids).logits, plain)
    others = (own.long() + 1) % EXPERTS
    others[1] = UNKNOWN
    routers.prescribe(others)
    logits = model(input_ids=ids).logits
    assert torch.equal(routers.chosen(3)[::2].long(), others[::2])
    torch.testing.assert_close(logits[1], plain[1], rtol=0, atol=1e-4)  # the row without a prescription
    assert (logits[::2] - plain[::2]).abs().max() > 0.1
    logits.square().sum().backward()
    assert all(router.weight.grad.any() for name, router in model.named_modules() if name.endswith(("gate", "router")))


def test_an_engine_reports_the_experts_of_all_but_the_last_token(moe_folder: Path) -> None:
    made = generator(moe_folder, "float32")
    prompts, completions = sampled(made, ["1+2=", "3", "9-4,5="])
    lengths = set()
    for prompt, answers in zip(prompts, completions, strict=True):
        for completion in answers:
            tokens = [*prompt, *completion.token_ids]
            model = AutoModelForCausalLM.from_pretrained(moe_folder).eval()
            routers = Routers(model)
            with torch.no_grad():
                model(input_ids=torch.tensor([tokens[:-1]]))
            assert completion.routed_experts is not None
            assert completion.routed_experts.shape == (len(tokens) - 1, LAYERS, TOP_K)
            assert completion.routed_experts.data == routers.chosen(1).numpy().tobytes()
            lengths.add(len(completion.token_ids))
    assert len(lengths) > 1, "some ended earlier than others"


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"packing": "packed"},
        {"max_tokens_per_micro_batch": 30},
        {"gradient_checkpointing": True},
        {"share_prefixes": True},
    ],
    ids=str,
)
def test_with_the_engines_experts_the_mismatch_is_rounding(moe_folder: Path, trainer: dict[str, Any]) -> None:
    """The engine's routers choose with noise; its weights are those of the trainer."""
    experiences = answered(noisy(generator(moe_folder, "float32")), ["1+2=", "3", "9-4,5="])
    experiences = decode(encode(experiences))
    replayed, alone = (mismatch(policy(moe_folder, replay=replay, **trainer), experiences) for replay in (True, False))
    assert replayed < 1e-5 < 0.05 < alone


def test_gradients_are_those_of_the_engines_experts(moe_folder: Path) -> None:
    experiences = answered(noisy(generator(moe_folder, "float32")), ["1+2=", "3"])
    gradients = []
    for trainer in ({}, {"gradient_checkpointing": True}, {"packing": "packed"}, {"max_tokens_per_micro_batch": 30}):
        model = policy(moe_folder, **trainer)
        batches = tokens_of(experiences).micro_batches(range(len(experiences)), model.division)
        accumulate(model, batches, StepLoss(AlgorithmConfig(), {"rl": 1.0}, 0.0), {})
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters if weight.grad is not None]))
    assert gradients[0].abs().max() > 1e-3
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-6)


def test_the_canary_and_tokens_without_experts_take_the_trainers_own(moe_folder: Path) -> None:
    experiences = answered(noisy(generator(moe_folder, "float32")), ["1+2="])
    model, plain = policy(moe_folder), policy(moe_folder, replay=False)
    before = model.sequence_logprobs([3, 4, 5, 6, 7])
    mismatch(model, experiences)
    assert model.sequence_logprobs([3, 4, 5, 6, 7]) == before == plain.sequence_logprobs([3, 4, 5, 6, 7])
    experiences[0].routed_experts = None
    tokens = tokens_of(experiences)
    assert tokens.experts is not None
    assert 0.7 < tokens.replayed < 0.8
    first = experiences[0].tokens.shape[0] - experiences[0].prompt_length
    own, wanted = (scores(one, tokens)[:first] for one in (model, plain))
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5)


async def test_a_step_counts_the_tokens_with_experts(moe_folder: Path, opened: Opener) -> None:
    experiences = answered(noisy(generator(moe_folder, "float32")), ["1+2=", "3"])
    for number, experience in enumerate(experiences):
        experience.advantages = torch.full_like(experience.logprobs, 1.0 - number % 3)  # type: ignore[arg-type]
    experiences[0].routed_experts = None
    model = MODEL.model_copy(update={"dtype": "float32"}).model_dump()
    learner = await opened(Config.model_validate({"model": model}), model=moe_folder)
    metrics = await learner.step(experiences, 1)
    assert 0.7 < metrics["mismatch/replayed_frac"] < 1
    assert metrics["actor/optimizer_steps"] == 1


def test_turns_keep_the_experts_that_sampled_them() -> None:
    def turn(tokens: list[int], prompt_length: int, expert: int) -> Experience:
        routed = torch.full((len(tokens) - 1, LAYERS, TOP_K), expert, dtype=torch.uint8)
        size = len(tokens) - prompt_length
        return Experience(
            tokens=tokens, prompt_length=prompt_length, logprobs=[-1.0] * size, routed_experts=routed, temperature=1.0
        )

    turns = [turn([3, 4, 5], 2, 1), turn([3, 4, 5, 6, 7, 8], 4, 2)]
    [merged] = merge_turns(turns)
    assert merged.routed_experts is not None
    assert merged.routed_experts[:, 0, 0].tolist() == [1, 1, 2, 2, 2]
    turns[0].routed_experts = None
    assert merge_turns(turns)[0].routed_experts is None


@pytest.mark.parametrize(
    "experts",
    [
        {"shape": [5, 2, 2], "data": "AAAAAAAAAAAAAAAAAAAAAAAAAAA="},
        {"shape": [3, 2, 2], "data": "AAAA"},
        {"shape": [3, 2], "data": "AAAAAAAA"},
        {"shape": [3, -2, -2], "data": "AAAAAAAAAAAAAAAA"},
        {"shape": [3, 2, 2], "data": "not base64!"},
        {"shape": "3", "data": 7},
        {"shape": [1e400, 1, 1], "data": ""},
        [],
        7,
    ],
)
def test_experts_that_cannot_be_read_are_refused(experts: Any) -> None:
    choice = {"text": "1", "token_ids": [4, 1], "token_logprobs": [-1.0, -1.0], "finish_reason": "stop"}
    answer = {"prompt_token_ids": [3, 4], "choices": [choice | {"routed_experts": experts}]}
    with pytest.raises(EngineRefused, match=r"routed_experts that cannot be read .* wanted the shape \[3, layers"):
        experiences_of(answer, 1.0)


def test_experts_of_another_model_are_refused(moe_folder: Path) -> None:
    first, second = answered(generator(moe_folder, "float32"), ["1"])[:2]
    assert second.routed_experts is not None
    for experts in (second.routed_experts[:, :1], torch.full_like(second.routed_experts, EXPERTS)):
        second.routed_experts = experts
        with pytest.raises(
            ValueError, match=rf"experience {second.eid.uid} has routed_experts of .* 2 of 8 experts in 2"
        ):
            mismatch(policy(moe_folder), [first, second])
        mismatch(policy(moe_folder, replay=False), [first, second])  # without replay they do not matter


def test_models_without_known_routers_are_refused(tmp_path: Path) -> None:
    dense = ensure_model_folder(MODEL.model_copy(update={"tiny": TinyModelConfig()}), tmp_path / "model", 0)
    with pytest.raises(LearnerError, match="no router of a known kind"):
        policy(dense)
    with pytest.raises(ModelError, match="no router of a known kind"):
        TextGenerator.build(MODEL, dense, num_threads=1)
    with pytest.raises(ModelError, match="no router of a known kind"):
        check_router_replay(Config.model_validate({"model": MODEL.model_dump() | {"tiny": {}}}))
    [line] = check_router_replay(Config.model_validate({"model": MODEL.model_dump()}))
    assert line == "router replay: 2 layers, 2 experts for each token"
    wide = transformers.Qwen3MoeConfig(**SHAPE, num_experts=257, moe_intermediate_size=1)
    with torch.device("meta"), pytest.raises(ModelError, match="257 experts in a layer, wanted at most 256"):
        Routers(AutoModelForCausalLM.from_config(wide))


def noisy(made: TextGenerator) -> TextGenerator:
    """Return the generator with routers that often choose other experts, as near ties under other kernels do."""
    routers = [module for module in made.model.modules() if type(module).__name__.endswith("TopKRouter")]
    read, noise = made._routers, torch.Generator().manual_seed(3)
    assert read is not None

    def prescribe(module: Any, arguments: tuple[Tensor, ...]) -> None:
        shape = (arguments[0].reshape(-1, arguments[0].shape[-1]).shape[0], LAYERS)
        experts = torch.rand(*shape, EXPERTS, generator=noise).topk(TOP_K).indices
        experts[torch.rand(shape, generator=noise) < 0.5] = UNKNOWN
        read.prescribe(experts[:, None])

    routers[0].register_forward_pre_hook(prescribe)
    return made


def tokens_of(experiences: list[Experience], routed: RouterShape | None = SHAPES) -> StepTokens:
    for number, experience in enumerate(experiences):
        assert experience.logprobs is not None
        experience.advantages = torch.full_like(experience.logprobs, 1.0 - number % 3)
    return train_tokens(experiences, AlgorithmConfig(), {"rl": 1.0}, 1, routed)


def scores(model: Policy, tokens: StepTokens) -> Tensor:
    logprobs = torch.zeros(tokens.tokens)
    count = len(tokens.first)
    with torch.no_grad():
        for batch in tokens.micro_batches(range(count), model.division):
            logprobs[batch.index] = model.score(batch, entropy_gradient=False)[0]
    return logprobs


def mismatch(model: Policy, experiences: list[Experience]) -> float:
    """Return the largest difference between the logprobs of trainer and engine."""
    tokens = tokens_of(experiences, model.routed)
    return float((scores(model, tokens) - tokens.columns["mu"]).abs().max())

"""Sequences that share what they begin with: the numbers are those of sequences alone; some models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from tests.unit.training.test_learner import VOCABULARY, Opener, batch, config, folder, opened, weights_of
from tests.unit.training.test_packed_rows import MODELS, REFUSED, SHAPE, alone, saved
from trinity_mq.config import AlgorithmConfig, TrainerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.training.critic import Critic
from trinity_mq.training.model.policy import Policy
from trinity_mq.training.model.shared_prefixes import prefix_problem
from trinity_mq.training.packing import KEPT, MicroBatch, Prefixes, StepTokens, divide_shared, train_tokens
from trinity_mq.training.update import StepLoss, accumulate

__all__ = ["folder", "opened"]

SHARING = {name: MODELS[name] for name in ("llama", "qwen3", "learned positions")} | {
    name: REFUSED[name][0] for name in ("positions of its own", "slopes instead of positions")
}
WINDOWS = {name: MODELS[name] for name in ("sliding window", "gemma2")}
OTHERS = WINDOWS | {name: REFUSED[name][0] for name in ("mamba", "convolution")}


@pytest.fixture(scope="module", params=SHARING)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(SHARING[request.param], tmp_path_factory.mktemp("model"))


def trained(**settings: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"packing": "padded", **settings})


def groups(answers: int = 6, prompts: tuple[int, ...] = (9, 4, 12)) -> list[Experience]:
    """Return answers of different lengths to prompts of these lengths."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for task, length in enumerate(prompts):
        prompt = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        for run in range(answers):
            answer = torch.randint(1, VOCABULARY, (1 + (run + task) % 4,), generator=generator).tolist()
            found.append(
                Experience(
                    eid=EID(batch=0, task=task, run=run),
                    tokens=prompt + answer,
                    prompt_length=length,
                    logprobs=[-2.0 - 0.1 * run] * len(answer),
                    advantages=[1.0 - 0.3 * run] * len(answer),
                    temperature=0.7,
                )
            )
    return found


def tokens_of(experiences: list[Experience]) -> StepTokens:
    return train_tokens(experiences, AlgorithmConfig(), {"rl": 1.0}, 1)


def shared(experiences: list[Experience], max_tokens: int = 16384) -> list[MicroBatch]:
    return tokens_of(experiences).micro_batches(range(len(experiences)), max_tokens, shares_prefixes=True)


def test_a_prompt_has_one_row_and_answers_begin_with_its_last_token() -> None:
    answers = [
        Experience(tokens=[10, 11, 12, *answer], prompt_length=3, logprobs=[-1.0] * len(answer), advantages=[1.0] * 3)
        for answer in ([20, 21, 22], [30, 31, 32])
    ]
    other = Experience(tokens=[40, 41, 42], prompt_length=1, logprobs=[-1.0, -2.0], advantages=[1.0, 1.0])
    (found,) = shared([*answers, other, *answers])
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


def test_rows_are_whole_where_sharing_saves_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    alone = [
        Experience(
            tokens=torch.randint(1, VOCABULARY, (12,), generator=generator).tolist(),
            prompt_length=4,
            logprobs=[-1.0] * 8,
            advantages=[1.0] * 8,
        )
        for _ in range(4)
    ]
    assert all(one.prefixes is None for one in shared(alone))
    assert all(one.prefixes is not None for one in shared(groups()))


@pytest.mark.parametrize("max_tokens", [1, 30, 16384])
def test_logprobs_are_those_of_sequences_alone(model_folder: Path, max_tokens: int) -> None:
    policy = Policy(config().model, model_folder, 0, trained())
    assert policy.division.shares_prefixes
    experiences = groups()
    wanted = alone(model_folder, experiences)
    found = torch.zeros_like(wanted)
    batches = shared(experiences, max_tokens)
    assert len(batches) > 1 or max_tokens == 16384
    for one in batches:
        found[one.index] = policy.score(one, entropy_gradient=False)[0].detach()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_gradients_are_those_of_whole_rows(model_folder: Path) -> None:
    algorithm = AlgorithmConfig()
    loss = StepLoss(algorithm, {"rl": 1.0}, 0.01)
    found = []
    for share, max_tokens in ((False, 16384), (True, 16384), (True, 40)):
        policy = Policy(config().model, model_folder, 0, trained(share_prefixes=share))
        tokens = tokens_of(groups())
        batches = tokens.micro_batches(
            range(18), max_tokens, algorithm.reduction, shares_prefixes=policy.division.shares_prefixes
        )
        assert (batches[0].prefixes is not None) == share
        accumulate(policy, batches, loss, {})
        found.append(torch.cat([one.grad.flatten() for one in policy.parameters if one.grad is not None]))
    assert found[0].abs().max() > 1e-3
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-5, atol=1e-6)


def test_the_critic_shares_prefixes(model_folder: Path) -> None:
    found = []
    for share in (False, True):
        critic = Critic(config().model_copy(update={"trainer": trained(share_prefixes=share)}), model_folder)
        torch.nn.init.normal_(critic.module.head.weight, generator=torch.Generator().manual_seed(0))
        tokens = tokens_of(groups())
        batches = critic.division.of(tokens, range(18))
        assert (batches[0].prefixes is not None) == share
        found.append(critic.values(batches, tokens.tokens))
    assert found[0].std() > 0.1
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


async def test_train_steps_are_the_same(opened: Opener) -> None:
    seen = []
    for share in (False, True):
        learner = await opened(config(entropy_coef=0.01).model_copy(update={"trainer": trained(share_prefixes=share)}))
        metrics = [await learner.step(groups(), step) for step in (1, 2)]
        seen.append((metrics, await weights_of(learner)))
    (whole, weights), (shared_ones, others) = seen
    assert shared_ones[0]["perf/padding_frac"] != whole[0]["perf/padding_frac"]
    for one, other in zip(whole, shared_ones, strict=True):
        kept = {key: value for key, value in one.items() if not key.startswith(("time/", "perf/"))}
        assert {key: other[key] for key in kept} == pytest.approx(kept, rel=1e-3, abs=1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_layers_do_not_see_all_tokens_are_refused(name: str) -> None:
    problem = prefix_problem(AutoModelForCausalLM.from_config(OTHERS[name]).eval(), torch.float32)
    assert problem is not None
    assert "layers" in problem


def test_why_nothing_is_shared_is_logged(tmp_path: Path) -> None:
    folder = saved(transformers.MistralConfig(**SHAPE, sliding_window=4), tmp_path)
    with capture_logs() as logs:
        policy = Policy(config().model, folder, 0, trained())
    assert not policy.division.shares_prefixes
    assert [one["reason"] for one in logs if one["event"] == "prefixes_not_shared"] == [
        "its layers attend to the last 4 tokens alone"
    ]


def test_a_model_of_a_run_with_recomputed_blocks_shares_nothing(folder: Path) -> None:
    assert Policy(config().model, folder, 0, trained()).division.shares_prefixes
    assert not Policy(config().model, folder, 0, trained(gradient_checkpointing=True)).division.shares_prefixes
    assert not Policy(config().model, folder, 0).division.shares_prefixes


lengths = st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 30))


@given(st.lists(lengths, min_size=1, max_size=40), st.integers(1, 200), st.booleans())
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


def test_prefixes_are_equal_where_their_tokens_are() -> None:
    ids = torch.tensor([1, 2, 3, 1, 2, 4, 1, 3, 3])
    starts, sizes = np.array([0, 3, 6]), np.array([2, 2, 2])
    assert Prefixes.of(ids, starts, sizes).number.tolist() == [0, 0, 1]
    assert Prefixes.of(ids, starts, np.array([2, 1, 1])).number.tolist() == [0, 1, 1]


def test_other_experiences_keep_their_numbers(folder: Path) -> None:
    """Sequences of which only few have a prompt in common take part as the others do."""
    policy = Policy(config().model, folder, 0, trained())
    experiences = [*groups(), *batch(3)]
    whole, parts = ([0.0] * tokens_of(experiences).tokens for _ in range(2))
    for found, batches in (
        (whole, tokens_of(experiences).micro_batches(range(len(experiences)), 16384)),
        (parts, shared(experiences)),
    ):
        for one in batches:
            for index, value in zip(one.index.tolist(), policy.score(one, entropy_gradient=False)[0], strict=True):
                found[index] = value.item()
    assert parts == pytest.approx(whole, abs=1e-5)

"""The canary on real tiny models: an engine that holds what it was given is never accused, one that kept the old is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trinity_agents.trainer.loop import CANARY
from trinity_mq.config import ModelConfig, TinyModelConfig
from trinity_mq.models.engines.generation.request import ScoreRequest
from trinity_mq.models.engines.torch.generator import TextGenerator
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.sync.gate.canary import Canary, arrived_share
from trinity_mq.training.policy import Policy


class Pair:
    """A trainer's policy and an engine's model."""

    def __init__(self, folder: Path, dtype: str, spread: float) -> None:
        torch.manual_seed(0)
        tiny = TinyModelConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=2, initializer_range=spread)
        config = ModelConfig.model_validate({"tiny": tiny.model_dump(), "dtype": dtype})
        made = ensure_model_folder(config, folder / "model", 0)
        self.policy, self.engine = Policy(config, made, 0), TextGenerator.build(config, made, num_threads=1)
        self._optimizer = torch.optim.AdamW(self.policy.parameters, lr=1e-3)

    def step(self) -> list[float]:
        """Change the policy by one optimizer step; returns its canary."""
        tokens = torch.randint(0, self.engine.vocabulary, (8, 16))
        self.policy.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self.policy.sequence_logprobs(CANARY)

    def sync(self) -> None:
        """Give the engine the policy's weights."""
        self.engine.apply(self.engine.check(dict(self.policy.weights())))

    def answer(self) -> list[float]:
        """Return the engine's canary."""
        return self.engine.score([ScoreRequest(CANARY)])[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spread", [0.05, 0.2])
def test_a_sound_engine_is_never_accused(tmp_path: Path, dtype: str, spread: float) -> None:
    pair, canary = Pair(tmp_path, dtype, spread), Canary(dtype)
    for _ in range(40):
        ours = pair.step()
        pair.sync()
        assert canary.problem("e", "1", pair.answer(), ours) is None


@pytest.mark.parametrize(
    ("dtype", "spread", "rounds"), [("float32", 0.05, 1), ("float32", 0.2, 1), ("bfloat16", 0.05, 3)]
)
def test_an_engine_that_keeps_its_weights_is_found_as_soon_as_the_change_is_more_than_rounding(
    tmp_path: Path, dtype: str, spread: float, rounds: int
) -> None:
    pair, canary = Pair(tmp_path, dtype, spread), Canary(dtype)
    for _ in range(5):
        ours = pair.step()
        pair.sync()
        assert canary.problem("e", "1", pair.answer(), ours) is None
    found = [canary.problem("e", "1", pair.answer(), pair.step()) for _ in range(rounds)]
    assert found[-1] is not None
    assert "logprobs" in found[-1]
    pair.sync()
    assert canary.problem("e", "1", pair.answer(), pair.policy.sequence_logprobs(CANARY)) is None, "freed"


def test_a_share_is_one_for_the_new_weights_and_nothing_for_the_old() -> None:
    wanted = [0.1, -0.2, 0.3]
    assert arrived_share(wanted, wanted, 0.001) == pytest.approx(1.0)
    assert arrived_share([0.0] * 3, wanted, 0.001) == 0.0
    assert arrived_share([0.05, -0.1, 0.15], wanted, 0.001) == pytest.approx(0.5)
    assert arrived_share([0.0] * 3, wanted, 0.05) is None, "too small to say: |b| is 0.37, 8 d is 0.4"
    assert arrived_share([], [], 0.001) is None


def test_small_changes_add_up() -> None:
    canary, ours = Canary("bfloat16"), [-1.0, -2.0, -3.0]
    assert canary.problem("e", "1", [-1.0, -2.0, -3.0], ours) is None
    drift = [[value + 0.04 * step for value in ours] for step in range(1, 5)]
    found = [canary.problem("e", "1", [-1.0, -2.0, -3.0], now) for now in drift]
    assert found[0] is found[1] is None
    assert "moved by 0%" in str(found[2])
    assert canary.problem("e", "2", [-1.0, -2.0, -3.0], ours) is None, "another process is judged anew"


@pytest.mark.parametrize("theirs", [None, "x", [], [0.0], [0.0, "x"], [0.0, float("nan")], [0.0, 3.0], [[0.0], 0.0]])
def test_whatever_else_comes_is_a_problem_and_no_crash(theirs: object) -> None:
    assert Canary("float32").problem("e", "1", theirs, [0.0, 0.0]) is not None

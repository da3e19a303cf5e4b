"""The canary on real tiny models: an engine that holds what it was given is never accused, one that kept the old is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_mq.config import ModelConfig, TinyModelConfig
from trinity_mq.engines.generation.request import ScoreRequest
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.sync.gate.canary import FIRST_IDS, PROMPT, Canary, arrived_share, canary_tokens
from trinity_mq.training.model.policy import Policy


class Pair:
    """A trainer's policy and an engine's model."""

    def __init__(self, folder: Path, dtype: str, spread: float, lr: float = 1e-3, **shape: Any) -> None:
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2} | shape
        tiny = TinyModelConfig(initializer_range=spread, **shape)
        config = ModelConfig.model_validate({"tiny": tiny.model_dump(), "dtype": dtype})
        made = ensure_model_folder(config, folder / "model", 0)
        self.policy, self.engine = Policy(config, made, 0), TextGenerator.build(config, made, num_threads=1)
        self._optimizer = torch.optim.AdamW(self.policy.parameters, lr=lr)

    def step(self) -> list[float]:
        """Change the policy by one optimizer step; returns its canary."""
        # without padding, whose embedding is 0: the gradient of 24 norms of 0 is not finite
        tokens = torch.randint(2, self.engine.vocabulary, (8, 16))
        self.policy.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self.policy.sequence_logprobs(FIRST_IDS)

    def sync(self) -> None:
        """Give the engine the policy's weights."""
        self.engine.apply(self.engine.check(dict(self.policy.weights())))

    def answer(self) -> list[float]:
        """Return the engine's canary."""
        return self.engine.score([ScoreRequest(FIRST_IDS)])[0]


DEEP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 24, "num_attention_heads": 2, "head_dim": 16}
"""Deep enough that in bfloat16 every version has rounding errors of its own, four times as large as a step of 1e-4."""


@pytest.mark.parametrize(
    ("dtype", "spread", "lr", "rounds", "shape"),
    [
        *(
            pytest.param(dtype, spread, 1e-3, 40, {}, id=f"{dtype}, {spread}")
            for dtype in ("float32", "bfloat16")
            for spread in (0.05, 0.2)
        ),
        pytest.param("bfloat16", 0.2, 1e-4, 20, DEEP, id="deep"),
        pytest.param(
            "bfloat16",
            0.1,
            1e-5,
            30,
            {**DEEP, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12},
            id="weights that came in bfloat16 stay as they are there for some steps",
        ),
    ],
)
def test_a_sound_engine_is_never_accused_of_its_rounding_errors(
    tmp_path: Path, dtype: str, spread: float, lr: float, rounds: int, shape: dict[str, int]
) -> None:
    pair, canary = Pair(tmp_path, dtype, spread, lr=lr, **shape), Canary(dtype)
    if lr == 1e-5:
        with torch.no_grad():
            for parameter in pair.policy.parameters:
                parameter.copy_(parameter.bfloat16())
    for _ in range(rounds):
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
    assert canary.problem("e", "1", pair.answer(), pair.policy.sequence_logprobs(FIRST_IDS)) is None, "freed"


def test_a_share_is_one_for_the_new_weights_and_nothing_for_the_old() -> None:
    wanted = [0.1, -0.2, 0.3]
    assert arrived_share(wanted, wanted, 0.001) == pytest.approx(1.0)
    assert arrived_share([0.0] * 3, wanted, 0.001) == 0.0
    assert arrived_share([0.0] * 3, wanted, 0.05) is None, "too small to say: |b| is 0.37, 8 d is 0.4"
    assert arrived_share([], [], 0.001) is None
    expected, rounding = [*wanted, 0.2] * 4, [0.2, 0.1, -0.1, 0.15] * 4
    moved = [a + b for a, b in zip(expected, rounding, strict=True)]
    assert arrived_share(moved, expected, 0.01) == pytest.approx(1.0)
    assert arrived_share(moved, expected, 0.01, 0.5) is None
    assert arrived_share(moved, expected, 0.01, 0.04) == pytest.approx(1.0), "residuals that no rounding explains"


class TestTheCanaryPrompt:
    def codec(self, folder: Path, characters: str) -> TextCodec:
        config = ModelConfig(tiny=TinyModelConfig(characters=characters))
        return TextCodec.load(ensure_model_folder(config, folder / "model", 0))

    def test_it_is_a_text_where_the_vocabulary_can_write_it(self, tmp_path: Path) -> None:
        codec = self.codec(tmp_path, "".join(sorted(set(PROMPT))))
        assert codec.decode([canary_tokens(codec)]) == [PROMPT]

    def test_it_is_of_the_first_ids_where_not(self, tmp_path: Path) -> None:
        assert canary_tokens(self.codec(tmp_path, "0123456789")) == FIRST_IDS


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

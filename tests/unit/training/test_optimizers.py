"""Optimizers: what they move, that they learn, saved states; and the schedules, as the measured recipe has them."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.unit.algorithms.vectors import VECTORS
from tests.unit.training.test_packing import MODELS
from trinity_mq.config import OptimizerConfig
from trinity_mq.training.model.policy import LearnerError
from trinity_mq.training.optimizers import (
    WeightNorms,
    check_installed,
    decay_factor,
    learning_rate,
    make_optimizer,
    make_step,
    restore_state,
    set_learning_rate,
)


@pytest.mark.parametrize("scheduler", ["constant", "cosine"])
def test_the_schedules_of_the_vector(scheduler: str) -> None:
    """Its ``linear`` begins after the warm-up; ours begins with the first step, as it was measured."""
    vector = VECTORS["lr_schedule"]
    given = vector["args"]
    config = OptimizerConfig(
        lr=1.0, lr_warmup_steps=given["warmup"], min_lr_ratio=given["min_lr_ratio"], lr_scheduler_type=scheduler
    )
    found = [learning_rate(config, step, given["total"]) for step in vector["inputs"]["steps"]]
    assert found == pytest.approx(vector["expected"][scheduler], abs=1e-12)


@pytest.mark.parametrize(("scheduler", "total"), [("constant", 300), ("linear", None), ("cosine", None)])
def test_a_constant_rate_or_an_unknown_end_does_not_decay(scheduler: str, total: int | None) -> None:
    config = OptimizerConfig(lr=1e-3, lr_warmup_steps=4, lr_scheduler_type=scheduler)
    assert decay_factor(config, 250, total) == 1
    assert [learning_rate(config, step, total) for step in (1, 4, 250)] == [2.5e-4, 1e-3, 1e-3]


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["linear", "cosine", "wsd", "constant"]),
    st.integers(0, 20),
    st.integers(1, 60),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_every_schedule_rises_then_falls_and_stays_at_its_end(
    scheduler: Any, warmup: int, total: int, least: float, share: float
) -> None:
    config = OptimizerConfig(
        lr=1.0, lr_warmup_steps=warmup, min_lr_ratio=least, lr_scheduler_type=scheduler, lr_decay_ratio=share
    )
    factors = [decay_factor(config, step, total) for step in range(1, total + 5)]
    assert factors == sorted(factors, reverse=True)
    assert all(least - 1e-9 <= factor <= 1 for factor in factors)
    end = 1.0 if scheduler == "constant" else least
    if warmup < total or scheduler != "cosine":  # else it begins where it ends
        assert factors[total - 1 :] == pytest.approx([end] * 5)
    rates = [learning_rate(config, step, total) for step in range(1, total + 5)]
    warm = [min(1.0, step / warmup) if warmup else 1.0 for step in range(1, total + 5)]
    assert rates == pytest.approx([factor * rise for factor, rise in zip(factors, warm, strict=True)])


def test_wsd_is_constant_up_to_its_share_of_the_end() -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_steps=5, min_lr_ratio=0.2, lr_scheduler_type="wsd", lr_decay_ratio=0.25)
    rates = [learning_rate(config, step, 40) for step in range(1, 43)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:30] == [1.0] * 25
    assert rates[30:] == pytest.approx([1 - 0.08 * step for step in range(1, 11)] + [0.2, 0.2])


# -- optimizers


class Net(nn.Module):
    """Two layers with a norm between them, as small as can be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 16)
        self.first, self.norm, self.second = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(self.embed(ids)))))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


IDS = torch.arange(11)


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(IDS), IDS % 7)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **how: Any) -> list[WeightNorms]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        found.append(make_step(optimizer, **how))
    return found


def weights_of(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=1e-2, weight_decay=0.1),
    "offloaded": OptimizerConfig(lr=1e-2, weight_decay=0.1, offload=True),
    "muon": OptimizerConfig(optimizer_type="muon", lr=1e-2, weight_decay=0.1),
    "offloaded muon": OptimizerConfig(optimizer_type="muon", lr=1e-2, weight_decay=0.1, offload=True),
    "sgd": OptimizerConfig(optimizer_type="sgd", lr=0.3),
    "sgd with momentum": OptimizerConfig(optimizer_type="sgd", lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw_8bit": OptimizerConfig(optimizer_type="adamw_8bit", lr=1e-2, weight_decay=0.1),
}


def made(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        check_installed(config)
    except LearnerError as error:
        pytest.skip(str(error))
    return make_optimizer(model, config)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    model, config = Net(), OPTIMIZERS[name]
    before = loss_of(model).item()
    learn(model, made(model, config), 100, offload=config.offload)
    assert before > 1.9
    assert loss_of(model).item() < 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_to_the_bit(name: str) -> None:
    config = OPTIMIZERS[name]
    straight, model = Net(), Net()
    learn(straight, made(straight, config), 6, offload=config.offload)
    first = made(model, config)
    set_learning_rate(first, config.lr)
    learn(model, first, 3, offload=config.offload)
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "weights": model.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    resumed = Net()
    resumed.load_state_dict(saved["weights"])
    second = made(resumed, config)
    restore_state(second, saved["optimizer"], resumed, config)
    learn(resumed, second, 3, offload=config.offload)
    assert equal(weights_of(resumed), weights_of(straight))


def test_the_state_of_an_earlier_release_fits_and_the_settings_are_the_new_ones() -> None:
    """It had one group of all weights in the order of the model; norms and biases decayed with it."""
    config = OPTIMIZERS["adamw"]
    straight, model = Net(), Net()
    learn(straight, made(straight, config.model_copy(update={"weight_decay": 0.0})), 6)
    earlier = torch.optim.AdamW(model.parameters(), 1e-2, config.betas, weight_decay=0.0, fused=True)
    learn(model, earlier, 3)
    optimizer = make_optimizer(model, config.model_copy(update={"weight_decay": 0.0, "betas": (0.5, 0.5)}))
    restore_state(optimizer, earlier.state_dict(), model, config)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.5, 0.5)}
    for group in optimizer.param_groups:
        group["betas"] = config.betas
    learn(model, optimizer, 3)
    assert equal(weights_of(model), weights_of(straight))


def test_a_state_of_something_else_is_refused() -> None:
    model = Net()
    saved = make_optimizer(model, OPTIMIZERS["sgd"]).state_dict()
    with pytest.raises(LearnerError, match="is muon, and the checkpoint was trained with sgd"):
        restore_state(made(model, OPTIMIZERS["muon"]), saved, model, OPTIMIZERS["muon"])
    with pytest.raises(ValueError, match="the saved state has 9 weights and the model 2"):
        restore_state(make_optimizer(model.head, OPTIMIZERS["sgd"]), saved, model.head, OPTIMIZERS["sgd"])


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd with momentum", "adamw_8bit"])
@pytest.mark.parametrize("part", [1, 200, 2**20])
def test_a_step_in_parts_is_the_step(name: str, part: int) -> None:
    plain, model = Net(), Net()
    whole, optimizer = made(plain, OPTIMIZERS[name]), made(model, OPTIMIZERS[name])
    for _ in range(3):
        before = weights_of(plain)
        whole.zero_grad()
        loss_of(plain).backward()
        whole.step()
        (norms,) = learn(model, optimizer, 1, part=part)
        assert equal(weights_of(model), weights_of(plain))
        after = weights_of(plain)
        moved = torch.cat([(new - old).flatten() for new, old in zip(after, before, strict=True)])
        assert norms.update == pytest.approx(moved.double().norm().item(), rel=1e-5)
        assert norms.weight == pytest.approx(torch.cat([one.flatten() for one in after]).norm().item(), rel=1e-5)
    assert all(one.grad is not None for one in model.parameters()), "gradients stay for whoever looks at them"


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "adamw_8bit"])
def test_norms_and_biases_do_not_decay(kind: Any) -> None:
    model = Net()
    optimizer = made(model, OptimizerConfig(optimizer_type=kind, lr=0.1, weight_decay=0.5))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    make_step(optimizer)
    small = {name for name, one in before.items() if one.ndim < 2}
    assert small == {"first.bias", "norm.weight", "norm.bias", "second.bias", "head.bias"}
    for name, one in model.named_parameters():
        factor = 1.0 if name in small else 0.95
        torch.testing.assert_close(one.detach(), before[name] * factor, rtol=1e-5, atol=1e-7, msg=name)


VOCABULARY = {"lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight", "transformer.wpe.weight"}


@pytest.mark.parametrize("name", ["llama", "qwen3", "learned positions"])
def test_muon_moves_the_matrices_of_the_blocks_alone(name: str) -> None:
    model = AutoModelForCausalLM.from_config(MODELS[name])
    optimizer = made(model, OPTIMIZERS["muon"])
    named = dict(model.named_parameters())
    moved, others = (
        {name for group in optimizer.param_groups if ("ns_steps" in group) == is_moved for name in group["param_names"]}
        for is_moved in (True, False)
    )
    if name == "learned positions":
        matrices = {"c_attn", "c_proj", "c_fc"}
    else:
        matrices = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {one.rpartition(".")[0].rpartition(".")[2] for one in moved} == matrices
    assert all(named[one].ndim == 2 for one in moved)
    assert moved | others == set(named)
    assert not moved & others
    assert ("lm_head.weight" in named) == (not model.config.tie_word_embeddings)
    assert {one for one in others if named[one].ndim == 2} == VOCABULARY & named.keys()


def test_muon_steps_are_orthogonal_and_the_rest_is_adamw() -> None:
    """The scale of arXiv 2502.16982: 0.2 sqrt(max(rows, columns)) for singular values near 1."""
    config = OptimizerConfig(optimizer_type="muon", lr=1e-3)
    model, plain = Net(), Net()
    optimizer = made(model, config)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    adamw = make_optimizer(plain, OptimizerConfig(lr=1e-3))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel()))
        other.grad = one.grad.clone()
    for each in (optimizer, adamw):
        make_step(each)
    for name, one in model.named_parameters():
        if name not in {"first.weight", "second.weight"}:
            assert torch.equal(one, dict(plain.named_parameters())[name]), name
            continue
        values = torch.linalg.svdvals((before[name] - one.detach()) / (1e-3 * 0.2 * 8))
        assert values.min() > 0.6, "five steps of Newton-Schulz bring singular values near 1, not to it"
        assert values.max() < 1.3


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    for package in ("bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LearnerError, match=r"install torch>=2\.9"):
        make_optimizer(Net(), OPTIMIZERS["muon"])
    with pytest.raises(LearnerError, match="neither bitsandbytes nor torchao is installed"):
        make_optimizer(Net(), OPTIMIZERS["adamw_8bit"])


def test_settings_without_an_effect_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"momentum is 0\.9, which adamw does not have"):
        OptimizerConfig(momentum=0.9)
    with pytest.raises(ValidationError, match="offload is true with optimizer_type adamw_8bit"):
        OptimizerConfig(optimizer_type="adamw_8bit", offload=True)
    assert OptimizerConfig.model_validate({"optimizer_type": "adam"}).optimizer_type == "adamw"

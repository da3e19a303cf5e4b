"""Scores and packed rows on a CUDA device: the numbers of a CPU, and of padded rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from trinity_mq.algorithms.scoring import head_scores, token_logprobs
from trinity_mq.config import AlgorithmConfig, ModelConfig, TrainerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.training.model.policy import Policy
from trinity_mq.training.packing import DivisionSettings, train_tokens
from trinity_mq.training.update import StepLoss, accumulate

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test compiles flex attention


@pytest.mark.parametrize("chunk", [5 * 997, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_from_hidden_states_are_those_of_a_cpu(dtype: torch.dtype, chunk: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, 997, bias=False)
    hidden, targets, heat = torch.randn(50, 64), torch.randint(0, 997, (50,)), torch.rand(50) + 0.5
    exact = nn.Linear(64, 997, bias=False)
    exact.weight = nn.Parameter(head.weight.detach().to(dtype).float())
    states = hidden.to(dtype).float().requires_grad_()
    wanted = token_logprobs(exact(states), targets, heat, entropy_gradient=True)
    (wanted[0].sum() + 0.1 * wanted[1].sum()).backward()
    head.cuda()
    given = hidden.cuda().requires_grad_()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = head_scores(given, head, targets.cuda(), heat.cuda(), entropy_gradient=True, chunk=chunk)
    assert found.logprob.dtype == torch.float32
    (found.logprob.sum() + 0.1 * found.entropy.sum()).backward()
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close([one.cpu() for one in found[:2]], list(wanted), **close)
    if dtype == torch.bfloat16:  # the gradient by the logits is a factor of products too
        close = {"rtol": 2e-2, "atol": 2e-2}
    assert given.grad is not None
    assert states.grad is not None
    assert head.weight.grad is not None
    torch.testing.assert_close(given.grad.cpu(), states.grad, **close)
    torch.testing.assert_close(head.weight.grad.cpu(), exact.weight.grad, **close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_have_the_gradient_of_padded_ones(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=997,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    experiences = [
        Experience(
            eid=EID(1, 0, run),
            tokens=torch.randint(0, 997, (3 * run + 9,)),
            prompt_length=3,
            logprobs=[-6.9] * (3 * run + 6),
            advantages=[(-1.0) ** run] * (3 * run + 6),
        )
        for run in range(24)
    ]
    loss = StepLoss(AlgorithmConfig(), {"rl": 1.0}, 0.01)
    tokens = train_tokens(experiences, loss.config, loss.weights, 1)
    found = []
    for trainer in (TrainerConfig(packing="padded"), TrainerConfig(), TrainerConfig(packing="packed")):
        model = ModelConfig(model_path=str(tmp_path), device="cuda", dtype=dtype)  # type: ignore[arg-type]
        policy = Policy(model, tmp_path, 0, trainer)
        assert policy.packs == (trainer.packing != "padded"), "flex attention comes with torch"
        for max_tokens in (300, 700):
            for parameter in policy.parameters:
                parameter.grad = None
            batches = tokens.micro_batches(range(len(experiences)), DivisionSettings(max_tokens, packed=policy.packs))
            accumulate(policy, batches, loss, {})
            found.append(torch.cat([one.grad.flatten() for one in policy.parameters if one.grad is not None]))
    assert found[0].abs().max() > 1e-3
    for one in found[1:]:
        assert nn.functional.cosine_similarity(one, found[0], 0) > (0.9999 if dtype == "float32" else 0.99)
        assert one.norm().item() == pytest.approx(found[0].norm().item(), rel=0.001 if dtype == "float32" else 0.05)

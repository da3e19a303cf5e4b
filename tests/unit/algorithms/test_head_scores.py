"""Scores from hidden states in chunks, against the scores of all logits at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trinity_mq.algorithms.scoring import HeadOperation, Scores, entropy_baselines, head_scores, token_logprobs

TOKENS, WIDTH, VOCABULARY = 23, 8, 37
TRANSFORMS = {
    "plain": HeadOperation(),
    "scaled": HeadOperation(scale=0.25),
    "capped": HeadOperation(softcap=3.0),
    "both": HeadOperation(scale=1.5, softcap=2.0),
}


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Return hidden states, a head, targets and temperatures."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_()
    return hidden, head, torch.randint(0, VOCABULARY, (TOKENS,)), torch.rand(TOKENS) + 0.5


def from_logits(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: Tensor,
    after: HeadOperation,
    *,
    entropy_gradient: bool,
) -> Scores:
    logits = after(head(hidden))
    found = token_logprobs(logits, targets, temperature, entropy_gradient=entropy_gradient)
    return Scores(*found, entropy_baselines(logits, temperature))


def gradients(scores: Scores, leaves: list[Tensor], *, entropy: bool) -> list[Tensor]:
    """Return the gradients of a sum in which each token has another weight."""
    weights = torch.linspace(-1, 1, len(scores.logprob), dtype=scores.logprob.dtype)
    total = (weights * scores.logprob).sum() + ((weights.square() * scores.entropy).sum() if entropy else 0.0)
    return list(torch.autograd.grad(total, leaves))


class Adapted(nn.Module):
    """A head with a low-rank adapter beside it, as LoRA puts one there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, VOCABULARY, bias=False, dtype=base.weight.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.base(hidden) + self.up(self.down(hidden))
        return found


@pytest.mark.parametrize("chunk", [1, 5 * VOCABULARY, 2**20])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("kind", ["plain", "with a bias", "adapted"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_scores_and_gradients_are_those_of_all_logits(
    dtype: torch.dtype, tolerance: float, transform: str, kind: str, entropy_gradient: bool, chunk: int
) -> None:
    """Of a head of another kind too, which is called for each chunk."""
    hidden, base, targets, temperature = inputs(dtype, bias=kind == "with a bias")
    head = Adapted(base) if kind == "adapted" else base
    sizes: list[int] = []
    head.register_forward_hook(lambda module, arguments, output: sizes.append(len(output)))
    after, leaves = TRANSFORMS[transform], [hidden, *head.parameters()]
    wanted = from_logits(hidden, head, targets, temperature, after, entropy_gradient=entropy_gradient)
    found = head_scores(
        hidden, head, targets, temperature, after, entropy_gradient=entropy_gradient, with_baseline=True, chunk=chunk
    )
    assert kind != "adapted" or max(sizes[1:]) <= max(chunk // VOCABULARY, 1)
    assert found.logprob.dtype == found.entropy.dtype == dtype
    assert found.entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    slopes = [gradients(one, leaves, entropy=entropy_gradient) for one in (found, wanted)]
    assert all(one.abs().max() > 0.01 for one in slopes[1])
    torch.testing.assert_close(*slopes, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["linear", "adapted"])
def test_under_autocast_inputs_are_rounded_and_nothing_else(kind: str) -> None:
    """The products of bfloat16 factors, in float32; a head of another kind rounds its logits too."""
    hidden, base, targets, temperature = inputs(torch.float32)
    head = base if kind == "linear" else Adapted(base)
    with torch.autocast("cpu", torch.bfloat16):
        found = head_scores(hidden, head, targets, temperature, entropy_gradient=True, chunk=200)
    assert found.logprob.dtype == torch.float32
    slopes = gradients(found, [hidden, base.weight], entropy=True)
    assert {one.dtype for one in slopes} == {torch.float32}
    if kind == "linear":
        exact = nn.Linear(WIDTH, VOCABULARY, bias=False)
        exact.weight = nn.Parameter(base.weight.detach().bfloat16().float())
        states = hidden.detach().bfloat16().float().requires_grad_()
        leaves, close = [states, exact.weight], {"rtol": 1e-5, "atol": 1e-6}
    else:
        exact, states, leaves, close = head, hidden, [hidden, base.weight], {"rtol": 0.05, "atol": 0.05}
    wanted = from_logits(states, exact, targets, temperature, HeadOperation(), entropy_gradient=True)
    torch.testing.assert_close(found[:2], wanted[:2], **close)
    torch.testing.assert_close(slopes, gradients(wanted, leaves, entropy=True), **close)


def test_the_gradient_of_a_narrow_weight_is_summed_in_float32() -> None:
    """Each of 1000 chunks adds a half; in bfloat16 the sum would end at 128, where a half is lost by rounding."""
    tokens = 1000
    head = nn.Linear(1, 2, bias=False).bfloat16()
    nn.init.zeros_(head.weight)
    hidden = torch.full((tokens, 1), 1.0, dtype=torch.bfloat16)
    found = head_scores(
        hidden, head, torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens), entropy_gradient=False, chunk=2
    )
    found.logprob.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad[:, 0].tolist() == [500, -500]


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_logit_of_minus_infinity_has_no_part_in_the_entropy(entropy_gradient: bool) -> None:
    hidden, head, targets, temperature = inputs(bias=True)
    masked = torch.arange(VOCABULARY) >= VOCABULARY - 4
    targets = targets % (VOCABULARY - 4)
    shorter = nn.Linear(WIDTH, VOCABULARY - 4, dtype=torch.float64)
    shorter.load_state_dict({name: value[~masked] for name, value in head.state_dict().items()})
    with torch.no_grad():
        head.bias[masked] = -math.inf
    found = head_scores(
        hidden, head, targets, temperature, entropy_gradient=entropy_gradient, with_baseline=True, chunk=100
    )
    wanted = from_logits(hidden, shorter, targets, temperature, HeadOperation(), entropy_gradient=entropy_gradient)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    slopes = [
        gradients(one, [hidden, *layer.parameters()], entropy=entropy_gradient)
        for one, layer in ((found, head), (wanted, shorter))
    ]
    torch.testing.assert_close(slopes[0][0], slopes[1][0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slopes[0][1][~masked], slopes[1][1], rtol=1e-9, atol=1e-9)
    assert not slopes[0][1][masked].any()


def test_no_more_than_a_chunk_of_logits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the backward pass keeps and of what is computed, nothing has more elements than the inputs or a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            found = output if isinstance(output, tuple | list) else (output,)
            largest.extend(one.numel() for one in found if isinstance(one, Tensor))
            return output

    hidden, head, targets, temperature = inputs()
    chunk = 10 * VOCABULARY
    for entropy_gradient in (False, True):
        with Watch():
            found = head_scores(
                hidden, head, targets, temperature, entropy_gradient=entropy_gradient, with_baseline=True, chunk=chunk
            )
            (found.logprob.sum() + found.entropy.sum()).backward()
    assert max(largest) == chunk < TOKENS * VOCABULARY

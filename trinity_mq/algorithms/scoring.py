"""Logprobs of chosen tokens, and entropies of the distributions they come from. Computed from logits, or in chunks from
the hidden states before a model's head, so that the logits of all tokens never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Maximum number of logits in a chunk, by device. A chunk holds two to three float32 tensors of this size. On a GPU,
smaller chunks would make a large head wait for its weight.
"""
_pretended: ContextVar[str | None] = ContextVar("pretended", default=None)


@contextmanager
def pretended_device(kind: str) -> Iterator[None]:
    """Score tokens in the ``with`` block as on a device of type ``kind``, whatever the device of the tensors. Only for
    tensors without data (``FakeTensorMode``), whose memory is measured.
    """
    token = _pretended.set(kind)
    try:
        yield
    finally:
        _pretended.reset(token)


def _device(tensor: Tensor) -> str:
    return _pretended.get() or tensor.device.type


class Scores(NamedTuple):
    """Scores of tokens under a policy, float32 ``[tokens]`` each, in nats."""

    logprob: Tensor
    entropy: Tensor
    entropy_baseline: Tensor | None = None
    """Baseline of the entropy's change, see :func:`entropy_baselines`; None if not requested."""


@dataclass(frozen=True)
class HeadOperation:
    """Converts the products of a model's head into its logits: ``logits = softcap tanh(scale products / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None
    """Bound of the logits. None: no bound, ``logits = scale products``."""

    def __call__(self, products: Tensor) -> Tensor:
        """Return the logits of ``products``, any shape."""
        logits = products if self.scale == 1 else products * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def gradient(self, logits: Tensor, by_logits: Tensor) -> Tensor:
        """Return the gradient with respect to the products, from ``logits`` and their gradient ``by_logits``. May
        overwrite ``by_logits``.
        """
        if self.softcap is not None:
            by_logits = by_logits.mul_(1 - (logits / self.softcap).square_())
        return by_logits if self.scale == 1 else by_logits.mul_(self.scale)


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return logprobs of ``targets`` and entropies under ``softmax(logits / temperature)``, in nats.

    Args:
        logits: ``[tokens, vocabulary]``. The computation uses float32, or float64 for float64 logits.
        targets: int64 ``[tokens]``.
        temperature: Sampling temperature, float32 ``[tokens]``, above 0.
        entropy_gradient: Whether the entropies have a gradient. If not, their graph is not kept.

    Returns:
        Two tensors ``[tokens]`` with the type of the computation.
    """
    distribution = (_precise(logits) / temperature[:, None]).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * _finite(distribution)).sum(-1)
    return logprobs, entropy


@torch.no_grad()
def entropy_baselines(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return ``sum_i p_i^2 (H + log p_i)`` over the vocabulary for each token, ``[tokens]``.

    This is the expectation over ``p`` of ``S_i = p_i (H + log p_i)``, the baseline of the entropy's change: a policy
    gradient step on the logits, ``a (onehot_k - p)``, changes the entropy by ``-a (S_k - sum_i p_i S_i)`` to first
    order (arXiv 2602.03392, theorem 3.3).

    Args:
        logits: ``[tokens, vocabulary]``. The computation uses float32, or float64 for float64 logits.
        temperature: float32 ``[tokens]``, above 0.
    """
    distribution = (_precise(logits) / temperature[:, None]).log_softmax(-1)
    probability, distribution = distribution.exp(), _finite(distribution)
    entropy = -(probability * distribution).sum(-1, keepdim=True)
    return (probability.square() * (entropy + distribution)).sum(-1)


def head_scores(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: Tensor,
    after: HeadOperation | None = None,
    *,
    entropy_gradient: bool,
    with_baseline: bool = False,
    chunk: int | None = None,
) -> Scores:
    """Return :func:`token_logprobs` and :func:`entropy_baselines` of a head's logits, and hold only a chunk of the
    logits at a time. The backward pass recomputes them.

    A plain linear layer is computed here instead of called: its inputs are rounded to the autocast type. The products,
    all later values and the sum of the weight's gradient over chunks are float32. Any other head, such as a head with
    an adapter, is called once per chunk.

    Args:
        hidden: Input of the head, ``[tokens, width]``.
        head: Layer that computes logits from the input.
        targets: int64 ``[tokens]``.
        temperature: float32 ``[tokens]``, above 0.
        after: Operation of the model on the head's products; None: no operation.
        entropy_gradient: Whether the entropies have a gradient.
        with_baseline: Whether to return the entropy baselines, which have no gradient.
        chunk: Maximum number of logits at a time; None: ``CHUNK`` of the device.
    """
    after = after or HeadOperation()
    chunk = chunk or CHUNK.get(_device(hidden), CHUNK["cuda"])
    if type(head) is nn.Linear:
        settings = _Settings(after, entropy_gradient, with_baseline, max(1, chunk // head.out_features))
        apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _LinearScores.apply
        columns = apply(hidden, head.weight, head.bias, targets, temperature, settings)
        return Scores(*columns) if with_baseline else Scores(*columns[:2])

    def scores(part: Tensor, tokens_part: Tensor, heat: Tensor) -> tuple[Tensor, ...]:
        logits = after(_precise(head(part)))
        both = token_logprobs(logits, tokens_part, heat, entropy_gradient=entropy_gradient)
        return (*both, entropy_baselines(logits, heat)) if with_baseline else both

    width = getattr(head, "out_features", None) or head(hidden[:1].detach()).shape[-1]
    tokens = max(1, chunk // width)
    inputs = [torch.split(tensor, tokens) for tensor in (hidden, targets, temperature)]
    parts = [checkpoint(scores, *arguments, use_reentrant=False) for arguments in zip(*inputs, strict=True)]
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class _Settings:
    after: HeadOperation
    entropy_gradient: bool
    with_baseline: bool
    tokens: int
    """Number of tokens in a chunk."""


class _LinearScores(torch.autograd.Function):
    """Logprobs, entropies and entropy baselines, ``[tokens]`` each, of a linear head's logits.

    With ``z`` the logits over the temperature, ``p = softmax(z)`` and ``H`` the entropy, the derivatives with respect
    to ``z_i`` are ``[i is the target] - p_i`` for the logprob and ``-p_i (log p_i + H)`` for the entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        logprob, entropy, baseline, normaliser = (
            hidden.new_empty(len(hidden), dtype=_precise_type(dtype)) for _ in range(4)
        )
        with torch.autocast(device, enabled=False):
            head = _Head(_operand(weight, dtype), bias, settings.after)
            for rows in _chunks(len(hidden), settings.tokens):
                z = head(_operand(hidden[rows], dtype)).div_(temperature[rows, None])
                normaliser[rows] = z.logsumexp(-1)
                z -= normaliser[rows, None]
                logprob[rows] = z.gather(1, targets[rows, None])[:, 0]
                p, log_p = z.exp(), _finite_(z)
                if settings.with_baseline:
                    entropy[rows] = -(p * log_p).sum(-1)
                    baseline[rows] = log_p.add_(entropy[rows, None]).mul_(p.square_()).sum(-1)
                else:
                    entropy[rows] = -p.mul_(log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, normaliser, entropy)
        ctx.settings, ctx.dtype = settings, dtype
        ctx.mark_non_differentiable(*([baseline] if settings.entropy_gradient else [baseline, entropy]))
        return logprob, entropy, baseline

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprob: Tensor, by_entropy: Tensor, by_baseline: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, targets, temperature, normaliser, entropy = ctx.saved_tensors
        settings, dtype = ctx.settings, ctx.dtype
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        precise = _precise_type(dtype)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        of_weight = torch.zeros_like(weight, dtype=precise) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=precise) if for_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            operand = _operand(weight, dtype)
            head = _Head(operand, bias, settings.after)
            for rows in _chunks(len(hidden), settings.tokens):
                inputs = _operand(hidden[rows], dtype)
                heat, outer = temperature[rows, None], by_logprob[rows, None]
                logits = head(inputs)
                log_p = logits / heat if settings.after.softcap is not None else logits.div_(heat)
                log_p -= normaliser[rows, None]
                gradient = log_p.exp()
                if settings.entropy_gradient:
                    change = by_entropy[rows, None]
                    gradient *= _finite_(log_p).add_(entropy[rows, None]).mul_(-change).sub_(outer)
                else:
                    gradient *= -outer
                gradient.scatter_add_(1, targets[rows, None], outer)
                gradient = settings.after.gradient(logits, gradient.div_(heat))
                if of_bias is not None:
                    of_bias += gradient.sum(0)
                gradient = _narrow(gradient, dtype)
                if of_hidden is not None:
                    of_hidden[rows] = _product(gradient, operand).to(hidden.dtype)
                if of_weight is not None:
                    _add_product(of_weight, gradient.T, inputs)
        return of_hidden, of_weight, of_bias, None, None, None


@dataclass(frozen=True)
class _Head:
    weight: Tensor
    """Operand of a product, see :func:`_operand`."""
    bias: Tensor | None
    after: HeadOperation

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return new logits, ``[tokens, vocabulary]``."""
        products = _product(inputs, self.weight.T)
        return self.after(products if self.bias is None else products.add_(self.bias))


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, tokens, size))


def _precise_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type for the computation of distributions: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(_precise_type(logits.dtype))


def _operand(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a factor of a product rounded to ``dtype``. A CPU cannot multiply narrow factors into a float32 result, so
    the rounded factor is widened again there.
    """
    rounded = factor.to(dtype)
    return rounded if _device(rounded) == "cuda" else _precise(rounded)


def _narrow(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient rounded to ``dtype`` for products with such operands on a GPU, or unchanged on a CPU."""
    return gradient.to(dtype) if _device(gradient) == "cuda" else gradient


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product of two operands in float32 (float64 for float64), even if the operands are narrower."""
    precise = _precise_type(left.dtype)
    return torch.mm(left, right) if left.dtype == precise else torch.mm(left, right, out_dtype=precise)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product of two operands to ``total``, float32 (float64 for float64)."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right)


def _finite(distribution: Tensor) -> Tensor:
    """Return logprobs with a finite value instead of -inf: such a token has probability 0, and 0 * -inf would be
    NaN.
    """
    return distribution.clamp_min(torch.finfo(distribution.dtype).min)


def _finite_(distribution: Tensor) -> Tensor:
    """Apply :func:`_finite` in place."""
    return distribution.clamp_min_(torch.finfo(distribution.dtype).min)

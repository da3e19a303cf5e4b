"""The class forms of Trinity-RFT's algorithms: base classes for losses, KL terms, entropy terms, advantages and whole
algorithms of the user's own, and the registries whose decorators give them names.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from trinity_mq.algorithms.masked import aggregate_loss
from trinity_mq.experience import Experience
from trinity_mq.runtime.plugins import Registry
from trinity_mq.telemetry import aggregate_metrics

POLICY_LOSS_FN = Registry({}, "POLICY_LOSS_FN")
"""Losses, by the value of ``algorithm.policy_loss_fn``; see :class:`PolicyLossFn`."""
ADVANTAGE_FN = Registry({}, "ADVANTAGE_FN")
"""Advantage functions, by the value of ``algorithm.advantage_fn``; see :class:`AdvantageFn`."""
KL_FN = Registry({}, "KL_FN")
"""KL terms, by the value of ``algorithm.kl_loss_fn``; see :class:`KLFn`."""
ENTROPY_LOSS_FN = Registry({}, "ENTROPY_LOSS_FN")
"""Entropy terms, by the value of ``algorithm.entropy_loss_fn``; see :class:`EntropyLossFn`."""
ALGORITHM_TYPE = Registry({}, "ALGORITHM_TYPE")
"""Algorithms, by the value of ``algorithm.algorithm_type``; see :class:`AlgorithmType`."""

VERL_NAMES = {
    "log_prob": "logprob",
    "old_log_probs": "old_logprob",
    "ref_log_prob": "ref_logprob",
    "response_mask": "action_mask",
}
"""Names of a loss's arguments by the names of these tensors in veRL."""


class PolicyLossFn(ABC):
    """A loss over all tokens of an optimizer step. The parameters of ``__call__`` name its tensors,
    ``[sequences, tokens]`` each, padded on the right: ``logprob`` (with gradient), ``old_logprob`` (the anchor of the
    ratio), ``ref_logprob``, ``action_mask`` (bool), ``advantages``, ``rollout_log_probs``, ``teacher_logprobs``; also
    ``expert_mask`` (bool ``[sequences]``) and custom fields of the experiences. Only trained tokens are in the tensors.

    Args:
        backend: Name of the trainer; kept as an attribute, and not used.
    """

    def __init__(self, backend: str = "trinity_mq") -> None:
        self.backend = backend

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let ``__call__`` accept veRL's names of its arguments, and ignore arguments that it does not name."""
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__:
            cls.__call__ = _with_known_arguments(cls.__call__)  # type: ignore[method-assign]

    @abstractmethod
    def __call__(self, logprob: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, a scalar with gradient, and metrics by name."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the constructor's arguments that hold without ``policy_loss_fn_args``."""
        return {}


def _with_known_arguments(call: Callable[..., Any]) -> Callable[..., Any]:
    names = {name for name in inspect.signature(call).parameters if name not in {"self", "kwargs"}}

    @functools.wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        translated = {name if name in names else VERL_NAMES.get(name, name): value for name, value in kwargs.items()}
        return call(self, *args, **{name: value for name, value in translated.items() if name in names})

    return called


class KLFn(ABC):
    """A KL term between the policy and a reference, computed from logprobs.

    Args:
        adaptive: Whether :meth:`update_kl_coef` changes ``kl_coef``. Only subclasses call this method.
        kl_coef: Weight of the term.
        target_kl: Target of the KL if ``adaptive``, in nats per token.
        horizon: Number of samples over which the weight changes by at most a fifth, if ``adaptive``.

    Raises:
        ValueError: ``adaptive`` without a target or a horizon.
    """

    def __init__(
        self,
        adaptive: bool = False,
        kl_coef: float = 0.001,
        target_kl: float | None = None,
        horizon: float | None = None,
    ) -> None:
        if adaptive and (target_kl is None or horizon is None):
            raise ValueError(f"target_kl is {target_kl} and horizon {horizon}: adaptive needs both")
        self.adaptive, self.kl_coef, self.target_kl, self.horizon = adaptive, kl_coef, target_kl, horizon

    def update_kl_coef(self, current_kl: float, batch_size: int) -> None:
        """Multiply ``kl_coef`` by ``1 + clip(kl / target - 1, -.2, .2) batch_size / horizon`` (arXiv 1909.08593,
        section 2.2), if the weight is adaptive.
        """
        if self.adaptive and self.target_kl is not None and self.horizon is not None:
            error = max(-0.2, min(0.2, current_kl / self.target_kl - 1))
            self.kl_coef *= 1 + error * batch_size / self.horizon

    def calculate_kl_loss(
        self,
        logprob: Tensor,
        ref_logprob: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        old_logprob: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the weighted KL term, a scalar, and the metrics ``kl_loss`` (without the weight) and ``kl_coef``."""
        kl = aggregate_loss(self.calculate_kl(logprob, ref_logprob, old_logprob), response_mask, loss_agg_mode)
        return kl * self.kl_coef, {"kl_loss": kl.detach().item(), "kl_coef": self.kl_coef}

    @abstractmethod
    def calculate_kl(self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None) -> Tensor:
        """Return the KL of each token, in the shape of ``logprob``."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the constructor's arguments that hold without ``kl_loss_fn_args``."""
        return {"adaptive": False, "kl_coef": 0.001}


class EntropyLossFn(ABC):
    """An entropy term. The loss of a step is the policy loss minus this term."""

    @abstractmethod
    def __call__(self, entropy: Tensor, action_mask: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the weighted term, a scalar with gradient, and metrics.

        Args:
            entropy: Entropy at each token in nats, ``[sequences, tokens]``, with gradient.
            action_mask: bool ``[sequences, tokens]``.
            kwargs: ``loss_agg_mode``, and the tensors of :class:`PolicyLossFn` by name, except ``logprob``.
        """

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the constructor's arguments that hold without ``entropy_loss_fn_args``."""
        return {"entropy_coef": 0.0}


class AdvantageFn(ABC):
    """Computes the advantages of all experiences of a batch."""

    @abstractmethod
    def __call__(self, exps: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the experiences with their advantages, and metrics.

        Args:
            exps: A list of :class:`~trinity_mq.experience.Experience` if :meth:`compute_in_trainer` is False: set
                their ``advantages``. Otherwise an object in the form of veRL's ``DataProto``: ``exps.batch`` has
                ``token_level_rewards``, ``response_mask`` and, if all experiences have logprobs, ``old_log_probs``,
                ``[sequences, tokens]`` each, and ``exps.non_tensor_batch["uid"]`` has the task of each sequence. Set
                ``exps.batch["advantages"]``.
            kwargs: Empty.
        """

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the constructor's arguments that hold without ``advantage_fn_args``."""
        return {}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Return whether ``exps`` has the form of ``DataProto``."""
        return True


class GroupAdvantage(AdvantageFn):
    """Computes advantages group by group."""

    @abstractmethod
    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Return the groups by their ids."""

    @abstractmethod
    def calculate_group_advantage(
        self, group_id: str, exps: list[Experience]
    ) -> tuple[list[Experience], dict[str, Any]]:
        """Set the advantages of a group, and remove dropped experiences from ``exps``. Return ``exps`` and metrics."""

    def __call__(self, exps: list[Experience], **kwargs: Any) -> tuple[list[Experience], dict[str, Any]]:
        """Return the experiences of all groups, and means, maxima and minima of the groups' metrics."""
        return self.process(exps)

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Return the experiences of all groups, and means, maxima and minima of the groups' metrics."""
        groups = self.group_experiences(exps) if exps else {}
        metrics = [self.calculate_group_advantage(group_id, group)[1] for group_id, group in groups.items()]
        staying = [experience for group in groups.values() for experience in group]
        return staying, dict(aggregate_metrics(metrics, prefix="group_advantages"))

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Return False: groups are lists of experiences."""
        return False


class AlgorithmType(ABC):
    """A whole algorithm: the names of its functions. ``default_config`` and ``schema`` of a class that a module in
    ``plugin_dirs`` registers are read without executing the module. The other attributes are accepted and ignored,
    because they follow from the functions. ``check_config`` is accepted and not called.
    """

    use_critic: bool
    use_reference: bool
    compute_advantage_in_trainer: bool
    can_balance_batch: bool
    schema: str

    @classmethod
    @abstractmethod
    def default_config(cls) -> dict[str, Any]:
        """Return a literal: settings of the section ``algorithm`` that hold unless the user sets them."""

"""Optimizers of the policy: construction, learning rate schedule, the step itself, and restored states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trinity_mq.config.algorithm import OptimizerConfig
from trinity_mq.training.model.policy import LearnerError
from trinity_mq.training.parallel.sharding import gathered, sharded_states

KIND = "optimizer_type"
"""Key of parameter groups, and therefore of a saved state, that names the optimizer type."""
DECAY_NORMS_AND_BIASES = False
"""Whether ``weight_decay`` also applies to weights of less than two dimensions. Such weights, norms and biases, have
few elements: their decay only changes the function of the model. Saved states load with either value."""
MUON_MOMENTUM = 0.95
PART = 2**26
"""Parameters updated at a time. Besides the optimizer state a step needs a copy of these parameters: 256 MiB in
float32.
"""


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters of ``model``. The learning rate is set before each step.

    Raises:
        LearnerError: A required package is not installed.
    """
    check_installed(config)
    matrices, others = divide_parameters(model, config)
    groups = _by_decay(others, config)
    match config.optimizer_type:
        case "muon":
            return MuonWithAdamW(_by_decay(matrices, config), groups, config)
        case "sgd":
            return torch.optim.SGD(groups, config.lr, momentum=config.momentum or 0.0, fused=True)
        case "adamw_8bit":
            eight_bit: Any = _eight_bit()
            made: torch.optim.Optimizer = eight_bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
            return made
        case _:
            return torch.optim.AdamW(groups, config.lr, config.betas, config.eps, fused=True)


def check_installed(config: OptimizerConfig) -> None:
    """Check that the optimizer can be created with the installed packages.

    Raises:
        LearnerError: A required package is not installed; the message says what to install.
    """
    if config.optimizer_type == "muon" and not hasattr(torch.optim, "Muon"):
        raise LearnerError(
            f"algorithm.optimizer.optimizer_type is muon, which came with torch 2.9, and here is {torch.__version__}: "
            "install torch>=2.9, or take adamw"
        )
    if config.optimizer_type == "adamw_8bit" and not (find_spec("bitsandbytes") or find_spec("torchao")):
        raise LearnerError(
            "algorithm.optimizer.optimizer_type is adamw_8bit, and neither bitsandbytes nor torchao is installed: "
            "install one of them (the extra adamw-8bit brings bitsandbytes), or take adamw"
        )


def _eight_bit() -> Any:
    if find_spec("bitsandbytes"):
        from bitsandbytes.optim import AdamW8bit
    else:
        from torchao.optim import AdamW8bit
    return AdamW8bit


Named = list[tuple[str, nn.Parameter]]


def divide_parameters(model: nn.Module, config: OptimizerConfig) -> tuple[Named, Named]:
    """Return the parameters for Muon and all other parameters. With another optimizer the first list is empty.

    Muon updates the matrices whose rows and columns are both hidden features. Embeddings and the head (possibly the
    same matrix) are excluded (https://kellerjordan.github.io/posts/muon).
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if config.optimizer_type != "muon":
        return [], named
    outer: list[Any] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for ask in ("get_input_embeddings", "get_output_embeddings"):
        outer.append(getattr(model, ask, lambda: None)())
    vocabulary = {id(parameter) for module in outer if module is not None for parameter in module.parameters()}
    inner = {name for name, parameter in named if parameter.ndim == 2 and id(parameter) not in vocabulary}
    return [item for item in named if item[0] in inner], [item for item in named if item[0] not in inner]


def _by_decay(named: Named, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return parameter groups: one for weights that decay and one for weights that do not. Empty groups are omitted."""
    decays = [item for item in named if DECAY_NORMS_AND_BIASES or item[1].ndim > 1]
    stays = [item for item in named if not (DECAY_NORMS_AND_BIASES or item[1].ndim > 1)]
    return [
        {"params": params, "weight_decay": decay, KIND: config.optimizer_type}  # names enter saved states
        for params, decay in ((decays, config.weight_decay), (stays, 0.0))
        if params
    ]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, with one state and one list of parameter groups.

    Muon's steps are scaled to AdamW's usual size, ``0.2 sqrt(max(rows, columns))`` times an orthogonal matrix. Both
    then use the same learning rate and weight decay (arXiv 2502.16982, section 2.2).
    """

    def __init__(self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], config: OptimizerConfig) -> None:
        """Combine the parameter groups of both optimizers; either list may be empty."""
        momentum = MUON_MOMENTUM if config.momentum is None else config.momentum
        self._parts: list[tuple[torch.optim.Optimizer, slice]] = []
        super().__init__([*matrices, *others], {"lr": config.lr})
        bounds = slice(0, len(matrices)), slice(len(matrices), None)
        if matrices:
            muon = torch.optim.Muon(self._tensors(bounds[0]), config.lr, 0.0, momentum, adjust_lr_fn="match_rms_adamw")
            self._parts.append((muon, bounds[0]))
        if others:
            adamw = torch.optim.AdamW(self._tensors(bounds[1]), config.lr, config.betas, config.eps, fused=True)
            self._parts.append((adamw, bounds[1]))
        for part, where in self._parts:
            for group in self.param_groups[where]:
                group.update({name: value for name, value in part.defaults.items() if name not in group})
        self._share()

    def _tensors(self, where: slice) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups[where] for parameter in group["params"]]

    def _share(self) -> None:
        for part, where in self._parts:
            part.param_groups, part.state = self.param_groups[where], self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step. ``closure`` is ignored."""
        for part, _ in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, as in every torch optimizer."""
        super().load_state_dict(state_dict)
        self._share()


# -- the learning rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next steps to ``rate``."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao stores the rate as a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def decay_factor(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Return the factor by which the decay scales the rate; 1 for a constant rate or an unknown number of train steps.

    With ``m`` the ``min_lr_ratio``, ``linear`` is ``max(m, 1 - step / total_steps)``; ``cosine`` is ``m + (1 - m) (1 +
    cos(pi x)) / 2`` with ``x`` from 0 at the end of the warm-up to 1 at ``total_steps`` (arXiv 1608.03983, equation 5,
    without restarts); ``wsd`` is ``1 - (1 - m) x`` with ``x`` from 0 to 1 over the last ``lr_decay_ratio`` of the train
    steps, 0 before (arXiv 2404.06395, section 4).

    Args:
        config: Schedule settings.
        step: Train step, from 1.
        total_steps: Train steps of the run.
    """
    if config.lr_scheduler_type == "constant" or total_steps is None:
        return 1.0
    minimum = config.min_lr_ratio
    if config.lr_scheduler_type == "linear":
        return max(minimum, 1 - step / total_steps)
    if config.lr_scheduler_type == "wsd":
        decay_steps = config.lr_decay_ratio * total_steps
        return 1 - (1 - minimum) * _within_1((step - (total_steps - decay_steps)) / decay_steps)
    passed = (step - config.lr_warmup_steps) / max(total_steps - config.lr_warmup_steps, 1)
    return minimum + (1 - minimum) * (1 + math.cos(math.pi * _within_1(passed))) / 2


def _within_1(share: float) -> float:
    return min(max(share, 0.0), 1.0)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Return the rate of train step ``step`` (from 1): ``lr`` x decay x warm-up ``min(1, step / lr_warmup_steps)``."""
    warm_up = min(1.0, step / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0
    return config.lr * decay_factor(config, step, total_steps) * warm_up


# -- the step


@dataclass(frozen=True)
class WeightNorms:
    """Euclidean norms over all weights that a step updated."""

    update: float
    """Norm of the change: new weights minus old weights."""
    weight: float
    """Norm of the new weights."""


@torch.no_grad()
def make_step(optimizer: torch.optim.Optimizer, *, offload: bool = False, part: int = PART) -> WeightNorms:
    """Update the weights by their gradients, and measure the change.

    The step runs for a part of the parameters at a time. So neither the copy of the old weights nor an offloaded state
    is ever on the device as a whole. The result is the same as one step over all parameters, because an optimizer
    treats each parameter separately.

    Args:
        optimizer: Optimizer to step. Parameters without a gradient are not changed.
        offload: Whether the state lies in host memory between steps; without effect on a CPU.
        part: Maximum number of parameters in a part. A larger tensor forms a part by itself.
    """
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    ]
    gradients = [parameter.grad for parameter in parameters]
    squares: list[Tensor] = []
    try:
        for parameter in parameters:
            parameter.grad = None
        for where in _parts([parameter.numel() for parameter in parameters], part):
            chosen = parameters[where]
            before = [parameter.detach().clone() for parameter in chosen]
            for parameter, gradient in zip(chosen, gradients[where], strict=True):
                parameter.grad = gradient
            with _state_on_device(optimizer, chosen) if offload else nullcontext():
                optimizer.step()
            for parameter in chosen:
                parameter.grad = None
            change = [after - old for after, old in zip(chosen, before, strict=True)]
            norms = [gathered(get_total_norm(change)), gathered(get_total_norm(chosen))]
            squares.append(torch.stack(norms).double().square())
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    # tolist() waits for the device, including the copies of the state to host memory
    update, weight = torch.stack(squares).sum(0).sqrt().tolist() if squares else (0.0, 0.0)
    return WeightNorms(update, weight)


def _parts(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Yield slices of neighbours whose sizes add up to at most ``most``. A larger single size gets its own slice."""
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > most:
            yield slice(start, number)
            start, total = number, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


@contextmanager
def _state_on_device(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hold the state of ``parameters`` on their device in the ``with`` block, and in host memory afterwards.

    The copies are asynchronous; the device's stream orders them.
    """
    hosts: dict[tuple[nn.Parameter, str], Tensor] = {}
    for parameter in parameters:
        for name, value in optimizer.state[parameter].items():
            if _is_moment(value) and value.device != parameter.device:
                hosts[parameter, name] = value
    for (parameter, name), value in hosts.items():
        optimizer.state[parameter][name] = value.to(parameter.device, non_blocking=True)
    yield
    for parameter in parameters:
        state = optimizer.state[parameter]
        for name, value in state.items():
            if _is_moment(value) and value.is_cuda:
                host = hosts.get((parameter, name))
                state[name] = (_empty_pinned(value) if host is None else host).copy_(value, non_blocking=True)


def _is_moment(value: Any) -> bool:
    """Return whether a state entry is worth a transfer. A step count is not, and fused steps need it on the device."""
    return isinstance(value, Tensor) and value.numel() > 1


def _empty_pinned(like: Tensor) -> Tensor:
    """Return an empty tensor in page-locked host memory, which a device accesses without the processor."""
    return torch.empty_like(like, device="cpu", pin_memory=torch.cuda.is_available())


# -- saved states


def restore_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], model: nn.Module, config: OptimizerConfig
) -> None:
    """Restore a result of ``optimizer.state_dict()``, with weights matched by name. Settings come from the
    configuration. A state of an earlier release has no names; it holds all weights in the order of the model.

    Args:
        optimizer: Optimizer that :func:`make_optimizer` made for ``model``.
        saved: State to restore.
        model: The policy.
        config: Optimizer settings. With ``offload`` the state goes to host memory.

    Raises:
        LearnerError: The state belongs to another optimizer type.
        KeyError, ValueError: The state does not match the weights of the model.
    """
    kinds = {str(group.get(KIND, "adamw")) for group in saved["param_groups"]}
    if kinds - {config.optimizer_type}:
        raise LearnerError(
            f"algorithm.optimizer.optimizer_type is {config.optimizer_type}, and the checkpoint was trained with "
            f"{', '.join(sorted(kinds))}, whose state it cannot load: set that optimizer_type again, or start over "
            "with --fresh"
        )
    places: dict[str, int] = {}
    for group in saved["param_groups"]:
        places |= zip(group.get("param_names") or dict(model.named_parameters()), group["params"], strict=True)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    if places.keys() != set(names):
        raise ValueError(f"the saved state has {len(places)} weights and the model {len(names)}, or their names differ")
    saved_states = saved["state"]
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole_states = {
        number: saved_states[places[name]] for number, name in enumerate(names) if places[name] in saved_states
    }
    states = sharded_states(whole_states, weights)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    packed = optimizer.state_dict()["param_groups"]
    if not config.offload:
        optimizer.load_state_dict({"state": states, "param_groups": packed})
    else:
        for number, state in states.items():
            optimizer.state[weights[number]] = {
                name: _placed_between_steps(value, weights[number]) for name, value in state.items()
            }
    for group, group_settings in zip(optimizer.param_groups, settings, strict=True):
        group.update(group_settings)


def _placed_between_steps(value: Any, parameter: Tensor) -> Any:
    """Return a state entry in its place between steps with ``offload``."""
    if not _is_moment(value):
        return value.to(parameter.device) if isinstance(value, Tensor) else value
    return _empty_pinned(value).copy_(value)

"""A learner whose state leaves the device between steps learns what it would learn without leaving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.unit.training.test_learner import Opener
from tests.unit.training.test_sharded_learner import apart, comparable, experiences, flats_of, settings
from trinity_mq.engines.torch.parking import ParkedTensors
from trinity_mq.runtime.errors import DeviceMemoryError
from trinity_mq.training.learner import TorchLearner


@pytest.fixture
def optimizers() -> Iterator[set[torch.optim.Optimizer]]:
    """All optimizers that have made a step."""
    found: set[torch.optim.Optimizer] = set()
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: found.add(optimizer))
    yield found
    handle.remove()


def memory_of(learner: TorchLearner, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of all tensors that last between two steps."""
    models = [learner.policy.model]
    models += [learner.reference.policy.model] if learner.reference and not learner.reference.is_shared else []
    models += [] if learner.critic is None else [learner.critic.module]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    tensors += [tensor for model in models for tensor in (one.grad for one in model.parameters()) if tensor is not None]
    weights = {id(weight) for model in models for weight in model.parameters()}
    states = [state for one in optimizers for weight, state in one.state.items() if id(weight) in weights]
    tensors += [value for state in states for value in state.values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("case", ["grpo", "ppo", "lora"])
async def test_steps_between_which_the_state_leaves_the_device_are_the_same_bit_for_bit(
    opened: Opener, tmp_path: Path, optimizers: set[torch.optim.Optimizer], case: str
) -> None:
    stays, leaves = await opened(settings(case)), await opened(settings(case))
    for step in (1, 2, 3):
        wanted = await stays.step(experiences(case, step), step)
        metrics = await leaves.step(experiences(case, step), step)
        assert comparable(metrics) == comparable(wanted)
        kept = {name: tensor.clone() for name, tensor in await leaves.host_weights()}
        before = memory_of(leaves, optimizers)
        await leaves.leave_device()
        assert memory_of(leaves, optimizers) == 0 < before
        assert [name for name, _, _ in await leaves.manifest()] == list(kept)
        await leaves.return_to_device()
        assert apart(await flats_of(leaves), await flats_of(stays)) == 0.0
        assert all(torch.equal(tensor, kept[name]) for name, tensor in await leaves.host_weights())
    for learner, name in ((stays, "stays"), (leaves, "leaves")):
        (tmp_path / name).mkdir()
        await (await learner.stage())(tmp_path / name)
    resumed = await opened(settings(case), checkpoint=tmp_path / "leaves")
    assert apart(await flats_of(resumed), await flats_of(stays)) == 0.0


async def test_a_device_that_others_fill_is_told_with_advice(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_parked: ParkedTensors) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    learner = await opened(settings("grpo"))
    await learner.leave_device()
    with monkeypatch.context() as patch:
        patch.setattr(ParkedTensors, "unpark", fail)
        with pytest.raises(DeviceMemoryError, match="out of memory in return to the device"):
            await learner.return_to_device()
    await learner.return_to_device()
    await learner.step(experiences("grpo", 1), 1)

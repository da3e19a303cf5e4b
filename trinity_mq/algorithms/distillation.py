"""On-policy distillation: a teacher's opinion of each sampled token becomes that token's advantage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import Ragged

Flags = npt.NDArray[np.bool_]


def distillation_advantages(
    batch: ExperienceBatch, config: AlgorithmConfig
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every token the teacher's log probability minus the student's (reverse KL per token, on the student's own
    samples: arXiv 2306.13649; as an advantage: https://thinkingmachines.ai/blog/on-policy-distillation/).

    The advantage of token ``t`` is ``-config.kl_coef * (logprobs[t] - teacher_logprobs[t])`` where the action mask is
    True, else 0; both in nats, at the temperature of the sample. No reward, no other token and no other run has a part
    in it: nothing is centred or scaled, and groups may be of any size.

    Dropped, with all their experiences, and counted: runs in which one of the two is no finite number.

    Args:
        batch: A whole batch, in any order.
        config: The factor ``kl_coef``.

    Returns:
        The experiences that stay, in the order given, with ``advantages`` as float32 ``[response]``; and the metrics.
        ``advantage/kl/*`` are over runs, each one's mean over its trained tokens of ``logprobs - teacher_logprobs``
        (the k1 estimator of KL(student || teacher) in nats, http://joschu.net/blog/kl-approx.html), and absent if
        nothing is trained on.

    Raises:
        ValueError: An experience without action mask (dpo), or with a token to train on and no logprobs of the student
            or the teacher for it.
    """
    if not len(batch):
        return batch, {"rollout/nonfinite_logprobs": 0.0}
    masks = batch.lengths("action_mask")
    _refuse(batch, masks < 0, "action_mask", "distillation is for single_turn and multi_turn experiences")
    trained = batch.dense("action_mask").to(torch.bool)
    owner = np.repeat(np.arange(len(batch)), masks)
    counts = np.bincount(owner[trained.numpy()], minlength=len(batch))
    student = _aligned(batch, "logprobs", counts > 0, "the engine returns them with its samples")
    teacher = _aligned(
        batch,
        "teacher_logprobs",
        counts > 0,
        "the workflow asks a teacher for them: use on_policy_distill_workflow with a model of "
        "explorer.auxiliary_models, call add_teacher_logprobs of trinity_mq.workflows.builtin.distill in your own "
        "workflow, or take algorithm.algorithm_type=grpo",
    )
    distances = torch.where(trained, student - teacher, 0.0)
    _, runs = np.unique(np.array(batch.ids("rid")), return_inverse=True)
    odd = np.unique(runs[owner[~torch.isfinite(distances).numpy()]])
    kept = ~np.isin(runs, odd)
    metrics = {"rollout/nonfinite_logprobs": float(len(odd)), **_by_run(distances, owner, runs, counts, kept)}
    advantages = Ragged.packed(distances * -config.kl_coef + 0.0, masks)  # + 0.0: no -0.0 where nothing is trained on
    return batch.replace(advantages=advantages).select(kept), metrics


def _by_run(
    distances: Tensor,
    owner: npt.NDArray[np.int64],
    runs: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    kept: Flags,
) -> dict[str, float]:
    """Return the spread over the runs that stay of their mean distance; a run of many steps counts as one."""
    sums = np.bincount(runs[owner], weights=distances.double().numpy())
    tokens = np.bincount(runs, weights=counts)
    staying = np.bincount(runs, weights=kept) > 0
    means = sums[staying & (tokens > 0)] / tokens[staying & (tokens > 0)]
    if not len(means):
        return {}
    return {f"advantage/kl/{name}": float(getattr(means, name)()) for name in ("mean", "max", "min")}


def _aligned(batch: ExperienceBatch, name: str, wanted: Flags, maker: str) -> Tensor:
    """Return a field of all experiences, float32, as long as their action masks together; 0 where it is not wanted.

    Raises:
        ValueError: It is wanted of an experience that has none.
    """
    lengths = batch.lengths(name)
    _refuse(batch, wanted & (lengths < 0), name, maker)
    masks = batch.lengths("action_mask")
    if (lengths == masks).all():
        return batch.dense(name).float()
    flat = torch.zeros(int(masks.sum()))
    if (lengths >= 0).any():
        flat[torch.from_numpy(np.repeat(lengths >= 0, masks))] = batch.dense(name).float()
    return flat


def _refuse(batch: ExperienceBatch, wrong: Flags, name: str, why: str) -> None:
    if wrong.any():
        number = int(wrong.argmax())
        raise ValueError(
            f"experience {batch.ids('uid')[number]} ({batch.values('experience_type')[number]}) has no {name}, wanted "
            f"one per response token; {why}"
        )

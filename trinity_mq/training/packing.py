"""Packs experiences into tensors: mini-batches, and padded micro-batches within a token budget."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_mq.experience import Experience, ExperienceBatch, gather_custom_fields
from trinity_mq.experience.ragged import Indexes


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass.

    Sequences are padded on the right, so under causal attention no real token sees padding: neither an attention mask
    nor position ids are needed, and the attention kernel takes its fast path. What is trained on is listed token by
    token; the others, and so all padding, are simply not there.
    """

    input_ids: Tensor
    """int64 ``[sequences, longest - 1]``: the last token of a sequence predicts nothing."""
    rows: Tensor
    """int64 ``[tokens]``: the sequence of each trained token."""
    columns: Tensor
    """int64 ``[tokens]``: the position that predicts it, one before its own."""
    targets: Tensor
    """int64 ``[tokens]``."""
    old_logprobs: Tensor
    """float32 ``[tokens]``, of the policy that sampled."""
    advantages: Tensor
    """float32 ``[tokens]``."""
    temperature: Tensor
    """float32 ``[tokens]``."""
    custom: dict[str, Tensor] = field(default_factory=dict)
    """``[tokens, ...]`` each: the custom fields, by destination, of the experience that a token is of."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.targets.shape[0]

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on ``device``."""
        custom = {name: column.to(device) for name, column in self.custom.items()}
        others = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "custom"}
        return MicroBatch(custom=custom, **{name: column.to(device) for name, column in others.items()})


def split(experiences: Sequence[Experience], count: int, seed: str) -> list[ExperienceBatch]:
    """Divide a batch into mini-batches whose sizes differ by at most one.

    Args:
        experiences: The batch.
        count: Optimizer steps to make of it; fewer only if there are fewer experiences.
        seed: Decides who goes where, so that a step done again is the same step. A single mini-batch keeps its order.

    Returns:
        Mini-batches, none of them empty.
    """
    batch = ExperienceBatch.of(experiences)
    if count == 1:
        return [batch] if len(batch) else []
    order = list(range(len(batch)))
    random.Random(seed).shuffle(order)
    return [batch.select(part) for part in (order[start::count] for start in range(count)) if part]


def pack(experiences: Sequence[Experience], max_tokens: int) -> list[MicroBatch]:
    """Pack experiences into padded micro-batches, longest first (if memory is short it shows at once).

    Neighbours in length go together, so little is padding. Experiences without a trained token are left out.

    Args:
        experiences: With ``logprobs``, ``advantages`` and ``action_mask``; no temperature means 1.
        max_tokens: Largest ``sequences x longest`` of a micro-batch; a longer single sequence is one of its own.

    Raises:
        ValueError: An experience that cannot be trained on; names it and what it lacks. Or custom fields that
            :func:`gather_custom_fields` refuses.
    """
    if not experiences:
        return []
    batch = ExperienceBatch.of(experiences)
    trained = batch.select(_trained_tokens(batch) > 0)
    if not len(trained):
        return []
    _check(trained)
    custom = gather_custom_fields(trained)
    lengths = trained.lengths("tokens")
    order = np.argsort(-lengths, kind="stable")
    result, start = [], 0
    while start < len(order):
        end = start + max(1, max_tokens // int(lengths[order[start]]))
        chosen = order[start:end]
        result.append(_micro_batch(trained.select(chosen), {name: column[chosen] for name, column in custom.items()}))
        start = end
    return result


def _trained_tokens(experiences: ExperienceBatch) -> Indexes:
    """Return how many True values each action mask has."""
    lengths = experiences.lengths("action_mask")
    if (lengths < 0).any():
        experience = experiences[int((lengths < 0).argmax())]
        raise ValueError(
            f"experience {experience.eid.uid} ({experience.experience_type}) has no action_mask, wanted bool "
            "[response]; only single_turn and multi_turn experiences can be trained on"
        )
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner[experiences.dense("action_mask").numpy()], minlength=len(lengths))


def _check(experiences: ExperienceBatch) -> None:
    """Check that every experience has what training needs; that lengths agree is checked wherever a batch is made."""
    responses, prompts = experiences.lengths("action_mask"), experiences.prompt_lengths()
    # a truncated prompt leaves no real response, and nothing trained on unless a mask says so
    _refuse(
        experiences,
        prompts + responses != experiences.lengths("tokens"),
        "has an action mask of another length than its response: only a real response can be trained on",
    )
    for name, maker in (
        ("logprobs", "the engine returns them with its samples"),
        ("advantages", "the algorithm's advantage function sets them in the operator"),
    ):
        _refuse(
            experiences,
            experiences.lengths(name) < 0,
            f"has no {name}, wanted one per response token; {maker}",
        )
    heats = np.array([1.0 if heat is None else heat for heat in experiences.values("temperature")])
    _refuse(
        experiences,
        heats <= 0,
        "was sampled at temperature 0: greedy samples have no logprobs to learn from; set a temperature above 0 for "
        "training rollouts",
    )


def _refuse(experiences: ExperienceBatch, wrong: npt.NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        raise ValueError(f"experience {experiences.ids('uid')[int(wrong.argmax())]} {why}")


def _micro_batch(experiences: ExperienceBatch, custom: Mapping[str, Tensor]) -> MicroBatch:
    """Build the tensors of one micro-batch, whose custom fields are ``custom``, without touching single tokens in
    Python.
    """
    prompts = torch.from_numpy(experiences.prompt_lengths())
    responses = torch.from_numpy(experiences.lengths("action_mask"))
    sizes = torch.from_numpy(experiences.lengths("tokens"))
    temperatures = torch.tensor([1.0 if heat is None else heat for heat in experiences.values("temperature")])
    tokens = torch.zeros(len(experiences), int(sizes.max()), dtype=torch.int64)
    tokens[torch.arange(tokens.shape[1]) < sizes[:, None]] = experiences.dense("tokens").long()
    rows = torch.repeat_interleave(torch.arange(len(experiences)), responses)
    first = torch.repeat_interleave(responses.cumsum(0) - responses, responses)
    positions = prompts[rows] + torch.arange(rows.shape[0]) - first
    keep = experiences.dense("action_mask")
    rows, positions = rows[keep], positions[keep]
    return MicroBatch(
        input_ids=tokens[:, :-1].contiguous(),
        rows=rows,
        columns=positions - 1,
        targets=tokens[rows, positions],
        old_logprobs=experiences.dense("logprobs").float()[keep],
        advantages=experiences.dense("advantages").float()[keep],
        temperature=temperatures[rows],
        custom={name: column[rows] for name, column in custom.items()},
    )

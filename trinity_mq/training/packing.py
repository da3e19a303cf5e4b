"""From experiences to tensors: mini-batches, and padded micro-batches within a token budget."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_mq.experience import Experience


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

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.targets.shape[0]

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on ``device``."""
        return MicroBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def split(experiences: Sequence[Experience], count: int, seed: str) -> list[list[Experience]]:
    """Divide a batch into mini-batches whose sizes differ by at most one.

    Args:
        experiences: The batch.
        count: Optimizer steps to make of it; fewer only if there are fewer experiences.
        seed: Decides who goes where, so that a step done again is the same step. A single mini-batch keeps its order.

    Returns:
        Mini-batches, none of them empty.
    """
    order = list(experiences)
    if count == 1:
        return [order] if order else []
    random.Random(seed).shuffle(order)
    return [part for part in (order[start::count] for start in range(count)) if part]


def pack(experiences: Sequence[Experience], max_tokens: int) -> list[MicroBatch]:
    """Pack experiences into padded micro-batches, longest first (if memory is short it shows at once).

    Neighbours in length go together, so little is padding. Experiences without a trained token are left out.

    Args:
        experiences: With ``logprobs``, ``advantages`` and ``action_mask``; no temperature means 1.
        max_tokens: Largest ``sequences x longest`` of a micro-batch; a longer single sequence is one of its own.

    Raises:
        ValueError: An experience that cannot be trained on; names it and what it lacks.
    """
    trained = [one for one, tokens in zip(experiences, _trained_tokens(experiences), strict=True) if tokens]
    for experience in trained:
        _check(experience)
    trained.sort(key=lambda experience: -experience.tokens.shape[0])
    result, start = [], 0
    while start < len(trained):
        end = start + max(1, max_tokens // trained[start].tokens.shape[0])
        result.append(_micro_batch(trained[start:end]))
        start = end
    return result


def _mask(experience: Experience) -> Tensor:
    if experience.action_mask is None:
        raise ValueError(
            f"experience {experience.eid.uid} ({experience.experience_type}) has no action_mask, wanted bool "
            "[response]; only single_turn and multi_turn experiences can be trained on"
        )
    return experience.action_mask


def _trained_tokens(experiences: Sequence[Experience]) -> list[int]:
    """Return how many True values each action mask has."""
    if not experiences:
        return []
    masks = [_mask(experience) for experience in experiences]
    lengths = torch.tensor([mask.shape[0] for mask in masks])
    owner = torch.repeat_interleave(torch.arange(len(masks)), lengths)
    return torch.bincount(owner[torch.cat(masks)], minlength=len(masks)).tolist()


def _check(experience: Experience) -> None:
    response = _mask(experience).shape[0]
    where = f"experience {experience.eid.uid}"
    if experience.prompt_length + response != experience.tokens.shape[0] or experience.prompt_length < 1:
        raise ValueError(
            f"{where} has {experience.tokens.shape[0]} tokens, but prompt_length {experience.prompt_length} and an "
            f"action mask of {response}: they must add up, and a response needs a token before it"
        )
    for name, values, maker in (
        ("logprobs", experience.logprobs, "the engine returns them with its samples"),
        ("advantages", experience.advantages, "the algorithm's advantage function sets them in the operator"),
    ):
        if values is None:
            raise ValueError(f"{where} has no {name}, wanted one per response token; {maker}")
        if values.shape[0] != response:
            raise ValueError(f"{where} has {values.shape[0]} {name}, wanted one per response token: {response}")
    if experience.temperature is not None and experience.temperature <= 0:
        raise ValueError(
            f"{where} was sampled at temperature {experience.temperature}: greedy samples have no logprobs to learn "
            "from; set a temperature above 0 for training rollouts"
        )


def _micro_batch(experiences: list[Experience]) -> MicroBatch:
    """Build the tensors of one micro-batch without touching single tokens in Python."""
    masks = [_mask(experience) for experience in experiences]
    prompts = torch.tensor([experience.prompt_length for experience in experiences])
    responses = torch.tensor([mask.shape[0] for mask in masks])
    temperatures = torch.tensor([1.0 if e.temperature is None else e.temperature for e in experiences])
    tokens = pad_sequence([experience.tokens for experience in experiences], batch_first=True).long()
    rows = torch.repeat_interleave(torch.arange(len(experiences)), responses)
    first = torch.repeat_interleave(responses.cumsum(0) - responses, responses)
    positions = prompts[rows] + torch.arange(rows.shape[0]) - first
    keep = torch.cat(masks)
    rows, positions = rows[keep], positions[keep]
    return MicroBatch(
        input_ids=tokens[:, :-1].contiguous(),
        rows=rows,
        columns=positions - 1,
        targets=tokens[rows, positions],
        old_logprobs=torch.cat([e.logprobs for e in experiences if e.logprobs is not None]).float()[keep],
        advantages=torch.cat([e.advantages for e in experiences if e.advantages is not None]).float()[keep],
        temperature=temperatures[rows],
    )

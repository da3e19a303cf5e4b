"""Packs experiences into tensors: the trained tokens of a train step, and micro-batches within a token budget.

A sampled answer is one sequence, an answer to imitate is one sequence, and a pair of answers is two sequences. The loss
scale of each token comes from the counts of the whole optimizer step, so the losses of micro-batches only need to be
summed.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_mq.algorithms.estimators.runs import numbered
from trinity_mq.algorithms.reduction import sequence_scales
from trinity_mq.config.algorithm.needs import components, needs
from trinity_mq.config.algorithm.pieces import LossConfig, Reduction
from trinity_mq.experience import (
    Experience,
    ExperienceBatch,
    gather_custom_fields,
    split_dpo_experience_to_single_turn,
)
from trinity_mq.experience.ragged import Indexes, Ragged
from trinity_mq.experience.rules import DPO, ENGINE
from trinity_mq.models.routers import UNKNOWN, RouterShape
from trinity_mq.training.parallel.division import divide, pad

KEPT = 0.25
"""Memory cost of a prefix position for each sequence that reads it, as a fraction of the cost of a position in the
sequence's own row. Such a sequence keeps the position's keys and values: two of at least eight tensors of this size
that a layer keeps for the backward pass."""
WORTHWHILE = 0.9
"""Prefixes are shared if the work is at most this fraction of the work with one row per whole sequence."""


@dataclass(frozen=True)
class Prefixes:
    """The prefix of each sequence: the tokens before the token that predicts its first trained token."""

    number: Indexes
    """``[sequences]``: prefix number; equal for equal prefixes."""
    lengths: Indexes
    """``[sequences]``: number of tokens of the prefix; may be 0."""

    @classmethod
    def of(cls, ids: Tensor, starts: Indexes, lengths: Indexes) -> Prefixes:
        """Return the prefixes of all sequences, with the same number for equal tokens.

        Args:
            ids: int64: tokens of all sequences.
            starts: ``[sequences]``: start of each sequence in ``ids``.
            lengths: ``[sequences]``: number of tokens of each prefix.
        """
        tokens, numbers = ids.numpy(), dict[bytes, int]()
        prefix_numbers = [
            numbers.setdefault(tokens[start : start + length].tobytes(), len(numbers))
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return cls(np.array(prefix_numbers, dtype=np.int64), lengths)


def divide_shared(units: Indexes, lengths: Indexes, prefixes: Prefixes, max_tokens: int) -> list[Indexes] | None:
    """Return micro-batches, as indexes of units, whose sequences share prefixes. Return None if this does not save a
    tenth of the work, compared with one row per whole sequence. The work is the number of positions, padding included.

    The micro-batches hold neighbours in one of two orders: by shared prefix, or by the length of the rest of the
    sequence. The order with less work is used.

    Args:
        units: ``[units, 2]``: a sequence, and a second sequence that has to stay with it, or -1.
        lengths: ``[sequences]``: tokens of each whole sequence.
        prefixes: Prefixes of the sequences.
        max_tokens: Maximum number of tokens in a micro-batch, padding included. A prefix counts once, plus :data:`KEPT`
            of it for each sequence with this prefix. A longer unit gets its own micro-batch.
    """
    first = units[:, 0]
    exists = units >= 0
    whole = np.where(exists, lengths[units], 0)
    rests = np.where(exists, lengths[units] - prefixes.lengths[units], 0)
    plain = pad(whole, max_tokens)
    work = sum(int(exists[part].sum()) * int(whole[part].max()) for part in plain)
    longest = np.zeros(int(prefixes.number.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(longest, prefixes.number[first], whole.max(1))
    by_prefix = np.lexsort((-rests.max(1), prefixes.number[first], -longest[prefixes.number[first]]))
    by_rest = np.argsort(-rests.max(1), kind="stable")
    divisions = [_fill(order, units, rests, prefixes, max_tokens) for order in (by_prefix, by_rest)]
    parts, needed = min(divisions, key=lambda division: division[1])
    return parts if needed <= WORTHWHILE * work else None


def _fill(
    order: Indexes, units: Indexes, rests: Indexes, prefixes: Prefixes, max_tokens: int
) -> tuple[list[Indexes], int]:
    """Return micro-batches of neighbours in ``order``, and their total number of positions."""
    parts: list[Indexes] = []
    work = start = 0
    rows = longest = prefix = 0
    prefixes_in_batch: set[int] = set()
    exists = units >= 0
    prefix_lengths = np.where(exists, prefixes.lengths[units], 0).max(1).tolist()
    numbers = np.where(exists, prefixes.number[units], prefixes.number[units[:, :1]]).tolist()
    sizes, rest = exists.sum(1).tolist(), rests.max(1).tolist()
    for place, unit in enumerate(order.tolist()):
        first_prefix, second_prefix = numbers[unit]
        prefix_count = (
            len(prefixes_in_batch)
            + (first_prefix not in prefixes_in_batch)
            + (second_prefix != first_prefix and second_prefix not in prefixes_in_batch)
        )
        wide, tall, height = max(longest, rest[unit]), max(prefix, prefix_lengths[unit]), rows + sizes[unit]
        if rows and height * wide + (prefix_count + KEPT * height) * tall > max_tokens:
            parts.append(order[start:place])
            work += rows * longest + len(prefixes_in_batch) * prefix
            start, prefixes_in_batch, height = place, set(), sizes[unit]
            wide, tall = rest[unit], prefix_lengths[unit]
        rows, longest, prefix = height, wide, tall
        prefixes_in_batch.update((first_prefix, second_prefix))
    parts.append(order[start:])
    return parts, work + rows * longest + len(prefixes_in_batch) * prefix


SAMPLED, IMITATED, PAIRED = 0, 1, 2
"""Roles of sequences: sampled by the policy, written by an expert, or part of a pair (chosen, then rejected)."""
ROLES = {"rl": SAMPLED, "ref_kl": SAMPLED, "ce": IMITATED, "pair": PAIRED}
"""Role of the sequences that each loss component trains on."""
EXPERT = "is_expert"
"""Key of ``info`` that marks an answer to imitate."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward and backward pass.

    In the padded layout each sequence has a row, padded on the right. Under causal attention no real token sees
    padding, so the model needs neither an attention mask nor position ids, and attention can use its fast kernel. In
    the packed layout all sequences follow each other in a single row, and
    :func:`trinity_mq.training.model.attention.model_inputs` marks where each sequence begins. With ``prefixes``, the
    rows are padded and omit the tokens that several sequences begin with; these prefixes have rows of their own.
    Trained tokens are listed one by one; other tokens and padding are not listed.

    A rank without remaining work gets a micro-batch without sequences: a single position of padding.
    """

    input_ids: Tensor
    """int64 ``[rows, positions]``. The last token of a sequence is omitted because it predicts nothing."""
    lengths: Tensor
    """int64 ``[sequences]``: number of positions of each sequence in ``input_ids``."""
    rows: Tensor
    """int64 ``[tokens]``: the row of each trained token."""
    columns: Tensor
    """int64 ``[tokens]``: position in this row that predicts the token, just before the token's own position."""
    segment: Tensor
    """int64 ``[tokens]``: number of the token's sequence within this micro-batch, rising from 0. Each sequence has at
    least one trained token.
    """
    targets: Tensor
    """int64 ``[tokens]``: ids of the trained tokens."""
    temperature: Tensor
    """float32 ``[tokens]``: sampling temperature; 1 for answers that the policy did not sample."""
    index: Tensor
    """int64 ``[tokens]``: index of the token in :class:`StepTokens`."""
    sequence: Tensor
    """int64 ``[tokens]``: index of the token's sequence in :class:`StepTokens`."""
    role: Tensor
    """int64 ``[tokens]``: ``SAMPLED``, ``IMITATED`` or ``PAIRED``."""
    mu: Tensor
    """float32 ``[tokens]``: logprobs of the sampling policy; 0 where a token has none."""
    advantages: Tensor
    """float32 ``[tokens]``; 0 where a token has none."""
    scale: Tensor
    """float32 ``[tokens]``: factor of the token's loss, from the reduction."""
    staleness: Tensor
    """int64 ``[tokens]``: train steps between the weights that sampled the token and the weights before this step; 0 if
    unknown.
    """
    teacher: Tensor | None = None
    """float32 ``[tokens]``: the teacher's logprobs; None where no component needs them."""
    custom: dict[str, Tensor] = field(default_factory=dict)
    """``[tokens, ...]`` each: custom fields of the token's experience, by destination."""
    engines: dict[str, Tensor] = field(default_factory=dict)
    """bool ``[tokens]`` each: whether the engine with this id sampled the token. Empty unless the experiences name
    several engines.
    """
    longest_packed: int = 0
    """Positions of the longest sequence in a packed row; 0 if the rows are padded."""
    prefixes: Tensor | None = None
    """int64 ``[prefixes, positions]``, padded on the right: shared prefixes, which ``input_ids`` omits. None:
    ``input_ids`` omits nothing.
    """
    prefix_lengths: Tensor | None = None
    """int64 ``[prefixes]``: number of positions of each prefix, without padding."""
    prefix_of: Tensor | None = None
    """int64 ``[rows]``: index of each row's prefix."""
    experts: Tensor | None = None
    """int16 ``[rows, positions, layers, top-k]``: experts that the engine chose for the tokens of ``input_ids``; -1 for
    tokens without experts and padding. None: no experience has experts, or experts are ignored.
    """

    @property
    def tokens(self) -> int:
        """Number of trained tokens."""
        return self.targets.shape[0]

    @property
    def positions(self) -> int:
        """Number of positions that the model computes, padding included."""
        return self.input_ids.numel() + (0 if self.prefixes is None else self.prefixes.numel())

    @property
    def padding(self) -> int:
        """Number of positions that are padding."""
        prefixes = 0 if self.prefix_lengths is None else int(self.prefix_lengths.sum())
        return self.positions - int(self.lengths.sum()) - prefixes

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``."""
        moved: dict[str, Any] = {}
        for column_field in fields(self):
            value = getattr(self, column_field.name)
            if isinstance(value, dict):
                value = {name: column.to(device) for name, column in value.items()}
            moved[column_field.name] = value.to(device) if isinstance(value, Tensor) else value
        return MicroBatch(**moved)


@dataclass(frozen=True)
class DivisionSettings:
    """How a model divides an optimizer step into micro-batches."""

    max_tokens: int
    """Maximum number of tokens in a micro-batch, padding included. A longer single sequence or pair gets its own
    micro-batch.
    """
    packed: bool = False
    """Whether the sequences of a micro-batch form one row."""
    shares_prefixes: bool = False
    """Whether padded rows may omit prefixes that sequences share, where this saves enough work. Requires a single
    rank.
    """
    rank: int = 0
    """Rank whose micro-batches are computed, from 0."""
    ranks: int = 1
    """Number of processes that share the optimizer step."""
    hidden_size: int = 1024
    """Width of the model. It determines the cost of attention in the division of the work."""


@dataclass(frozen=True)
class StepTokens:
    """The sequences of a train step and their trained tokens, flat. The tokens of a sequence are contiguous, and so are
    the two sequences of a pair. Experiences without a trained token have no sequence.
    """

    ids: Tensor
    """int64: tokens of all sequences, concatenated."""
    starts: Indexes
    """``[sequences]``: start of each sequence in ``ids``."""
    lengths: Indexes
    """``[sequences]``: number of tokens of each sequence."""
    counts: Indexes
    """``[sequences]``: number of trained tokens, at least 1."""
    first: Indexes
    """``[experiences]``: index of the first sequence of each experience; -1 for an experience without a sequence."""
    task: Indexes
    """``[sequences]``: number of the sequence's task."""
    role: Indexes
    """``[sequences]``: ``SAMPLED``, ``IMITATED`` or ``PAIRED``."""
    position: Tensor
    """int64 ``[tokens]``: position of a trained token in its sequence."""
    columns: Mapping[str, Tensor]
    """``[tokens]`` each: columns that :class:`MicroBatch` copies unchanged."""
    custom: Mapping[str, Tensor]
    """``[tokens, ...]`` each: custom fields, as in :attr:`MicroBatch.custom`."""
    engines: Mapping[str, Tensor]
    """bool ``[tokens]`` each: tokens of each engine, as in :attr:`MicroBatch.engines`."""
    experts: Tensor | None = None
    """int16 ``[len(ids), layers, top-k]``: experts of each token of ``ids``; see :attr:`MicroBatch.experts`."""

    @property
    def tokens(self) -> int:
        """Number of trained tokens."""
        return self.position.shape[0]

    @property
    def replayed(self) -> float:
        """Fraction of the tokens that the model reads for which the engine's experts are known."""
        read = int((self.lengths - 1).sum())
        return 0.0 if self.experts is None or not read else float((self.experts[:, 0, 0] != UNKNOWN).sum()) / read

    def experiences(self, roles: Collection[int]) -> Indexes:
        """Return the indexes of the experiences whose sequences have one of these roles, ascending."""
        there = np.flatnonzero(self.first >= 0)
        return there[np.isin(self.role[self.first[there]], list(roles))]

    def micro_batches(
        self, experiences: Sequence[int] | Indexes, division: DivisionSettings, reduction: Reduction | None = None
    ) -> list[MicroBatch]:
        """Divide an optimizer step into micro-batches, longest first, so that a lack of memory shows at once. Return
        the micro-batches of the rank in ``division``; an empty list if the step has no trained token.

        The two answers of a pair stay together. All ranks get the same number of micro-batches, so the last
        micro-batches may have no sequences; see :func:`trinity_mq.training.parallel.division.divide`.

        Args:
            experiences: Indexes of the experiences in the optimizer step, over all ranks.
            division: How to divide the step.
            reduction: Computes the scales from the counts of these experiences. None: the mean over tokens.
        """
        units = self._units(np.asarray(experiences, dtype=np.int64))
        if not len(units):
            return []
        members = units[units >= 0]
        scale = np.zeros(len(self.counts))
        scale[members] = self._scales(members, reduction or Reduction())
        if division.shares_prefixes and not division.packed and division.ranks == 1:
            prefixes = self._prefixes()
            shared = divide_shared(units, self.lengths, prefixes, division.max_tokens)
            if shared is not None:
                chosen = (units[part].reshape(-1) for part in shared)
                return [self._micro_batch(part[part >= 0], scale, prefixes=prefixes) for part in chosen]
        lengths = np.where(units >= 0, self.lengths[units], 0)
        parts = divide(
            lengths,
            division.max_tokens,
            packed=division.packed,
            ranks=division.ranks,
            hidden_size=division.hidden_size,
        )[division.rank]
        chosen = (units[part].reshape(-1) for part in parts)
        return [self._micro_batch(part[part >= 0], scale, packed=division.packed) for part in chosen]

    def whole_step(self, experiences: Sequence[int] | Indexes, reduction: Reduction) -> MicroBatch:
        """Return all tokens of an optimizer step, which must have a trained token, as one row without experts."""
        tokens = replace(self, experts=None)
        [batch] = tokens.micro_batches(experiences, DivisionSettings(len(self.ids), packed=True), reduction)
        return batch

    def _prefixes(self) -> Prefixes:
        """Return the prefix of each sequence. It ends before the token that predicts the first trained token."""
        first = self.position[torch.from_numpy(self.counts.cumsum() - self.counts)].numpy()
        return Prefixes.of(self.ids, self.starts, first - 1)

    def _units(self, experiences: Indexes) -> Indexes:
        """Return the indivisible units, ``[units, 2]``: the sequence of an experience and -1, or both sequences of a
        pair.
        """
        first = self.first[experiences]
        first = first[first >= 0]
        return np.stack([first, np.where(self.role[first] == PAIRED, first + 1, -1)], 1)

    def _scales(self, members: Indexes, reduction: Reduction) -> npt.NDArray[np.float64]:
        """Return the scale of each of the sequences ``members``. Each role is reduced separately; pairs are
        averaged.
        """
        role, scale = self.role[members], np.zeros(len(members))
        for single_role in (SAMPLED, IMITATED):
            chosen = members[role == single_role]
            scale[role == single_role] = sequence_scales(self.counts[chosen], self.task[chosen], reduction)
        pairs = int((role == PAIRED).sum()) // 2
        scale[role == PAIRED] = 1 / max(pairs, 1)
        return scale

    def _micro_batch(
        self,
        sequences: Indexes,
        scale: npt.NDArray[np.float64],
        *,
        packed: bool = False,
        prefixes: Prefixes | None = None,
    ) -> MicroBatch:
        """Return the tensors of one micro-batch, without a Python loop over tokens."""
        counts = self.counts[sequences]
        segment = np.repeat(np.arange(len(sequences)), counts)
        before = self.counts.cumsum() - self.counts
        index = torch.from_numpy(
            np.repeat(before[sequences] - (counts.cumsum() - counts), counts) + np.arange(len(segment))
        )
        skipped = np.zeros_like(sequences) if prefixes is None else prefixes.lengths[sequences]
        starts, lengths = self.starts[sequences] + skipped, self.lengths[sequences] - skipped - 1
        part, sequence_ids = torch.from_numpy(segment), torch.from_numpy(sequences)
        position = self.position[index] - torch.from_numpy(skipped)[part]
        if packed or not len(sequences):
            begin = lengths.cumsum() - lengths
            where = torch.from_numpy(np.repeat(starts - begin, lengths) + np.arange(int(lengths.sum())))
            input_ids = self.ids[where][None] if len(where) else torch.zeros(1, 1, dtype=torch.int64)
            experts = None if self.experts is None else self.experts[where][None]
            if experts is not None and not len(where):
                experts = experts.new_full((1, 1, *experts.shape[2:]), UNKNOWN)
            rows, columns = torch.zeros_like(part), torch.from_numpy(begin)[part] + position - 1
        else:
            input_ids = _padded(self.ids, starts, lengths, 0)
            experts = None if self.experts is None else _padded(self.experts, starts, lengths, UNKNOWN)
            rows, columns = part, position - 1
        return MicroBatch(
            input_ids=input_ids,
            lengths=torch.from_numpy(lengths),
            rows=rows,
            columns=columns,
            segment=part,
            targets=self.ids[torch.from_numpy(starts)[part] + position],
            index=index,
            sequence=sequence_ids[part],
            role=torch.from_numpy(self.role[sequences])[part],
            scale=torch.from_numpy(scale[sequences]).float()[part],
            custom={name: column[index] for name, column in self.custom.items()},
            engines={name: column[index] for name, column in self.engines.items()},
            longest_packed=int(lengths.max(initial=1)) if packed and len(sequences) else 0,
            experts=experts,
            **{name: column[index] for name, column in self.columns.items()},
            **({} if prefixes is None else self._prefix_rows(sequences, prefixes)),
        )

    def _prefix_rows(self, sequences: Indexes, prefixes: Prefixes) -> dict[str, Tensor]:
        """Return the micro-batch columns for the prefixes of its sequences."""
        _, chosen, number = np.unique(prefixes.number[sequences], return_index=True, return_inverse=True)
        lengths = prefixes.lengths[sequences[chosen]]
        return {
            "prefixes": _padded(self.ids, self.starts[sequences[chosen]], lengths, 0),
            "prefix_lengths": torch.from_numpy(lengths),
            "prefix_of": torch.from_numpy(number),
        }


def _padded(values: Tensor, starts: Indexes, lengths: Indexes, padding: int) -> Tensor:
    """Return rows of a column of all tokens, padded on the right, ``[rows, longest, ...]``."""
    places = np.arange(int(lengths.max(initial=1)))
    where = torch.from_numpy(np.minimum(starts[:, None] + places, len(values) - 1))
    rows = values[where]
    rows[torch.from_numpy(places >= lengths[:, None])] = padding
    return rows


def split(size: int, count: int, seed: str) -> list[list[int]]:
    """Divide the experiences of a batch, by index, into mini-batches whose sizes differ by at most 1.

    Args:
        size: Number of experiences in the batch.
        count: Number of mini-batches; fewer only if there are fewer experiences.
        seed: Determines the shuffle, so that a retried step has the same mini-batches. A single mini-batch keeps its
            order.

    Returns:
        The mini-batches, all non-empty.
    """
    order = list(range(size))
    if count == 1:
        return [order] if order else []
    random.Random(seed).shuffle(order)
    return [part for part in (order[start::count] for start in range(count)) if part]


def train_tokens(
    experiences: Sequence[Experience],
    config: LossConfig,
    weights: Mapping[str, float],
    step: int,
    routed: RouterShape | None = None,
) -> StepTokens:
    """Return the trained tokens of a train step.

    A pair of answers gets the role ``PAIRED``. An experience is imitated if its ``info`` says ``is_expert``; so is
    every other experience if the loss has ``ce`` but no component for samples. Experiences whose components have no
    weight in this step, or without a trained token, are omitted.

    Args:
        experiences: Experiences with the fields that their components need. Samples need ``logprobs``, a temperature
            above 0 (None means 1), ``advantages`` for ``rl``, ``teacher_logprobs`` for ``ref_kl``, and ``versions``
            where the loss uses the age of tokens. The other experiences need only tokens.
        config: Configuration of the loss.
        weights: Component weights in this train step.
        step: Number of the train step, from 1. Staleness is relative to the weights before this step.
        routed: Shape of the model's routers, if tokens pass through the experts of their experience. None: experts of
            experiences are ignored.

    Raises:
        ValueError: An experience cannot be trained on; the message names it and the field that is missing or wrong. Or
            :func:`gather_custom_fields` rejects the custom fields.
    """
    batch = ExperienceBatch.of(experiences)
    role = _roles(batch, config)
    active = np.isin(role, [ROLES[name] for name, weight in weights.items() if weight])
    plain = np.flatnonzero(active & (role != PAIRED))
    plain = plain[trained_tokens(batch.select(plain)) > 0]
    pairs = np.flatnonzero(active & (role == PAIRED))
    halves = ExperienceBatch.of(split_dpo_experience_to_single_turn(batch.select(pairs).to_shared_list()))
    whole = (trained_tokens(halves).reshape(-1, 2) > 0).all(1)
    pairs, halves = pairs[whole], halves.select(np.repeat(whole, 2))
    _check_lengths(batch.select(plain))
    _check_samples(batch.select(plain[role[plain] == SAMPLED]), needs(config, weights), weights)
    answers = ExperienceBatch.concat([batch.select(plain), halves])
    first = np.full(len(batch), -1, dtype=np.int64)
    first[plain] = np.arange(len(plain))
    first[pairs] = len(plain) + 2 * np.arange(len(pairs))
    return _flat(answers, np.concatenate([role[plain], np.full(len(halves), PAIRED)]), first, weights, step, routed)


def mask_nonfinite_logprobs(batch: ExperienceBatch, config: LossConfig) -> tuple[ExperienceBatch, int]:
    """Mask out tokens whose logprob is not finite. Return the batch with an action mask of False where the engine's or
    the teacher's logprob of a sampled token is not finite, and the number of masked tokens. These tokens count in no
    loss and no denominator.

    Raises:
        ValueError: No loss component applies to one of the experiences.
    """
    lengths = batch.lengths("action_mask")
    sampled = (_roles(batch, config) == SAMPLED) & (lengths >= 0)
    if not sampled.any():
        return batch, 0
    mask = batch.dense("action_mask").bool()
    is_finite = torch.ones_like(mask)
    for name in ("logprobs", "teacher_logprobs"):
        is_finite &= _column(batch, name, np.maximum(lengths, 0), sampled).isfinite()
    out = int((mask & ~is_finite).sum())
    return (batch.replace(action_mask=Ragged.packed(mask & is_finite, lengths)) if out else batch), out


def _roles(batch: ExperienceBatch, config: LossConfig) -> Indexes:
    """Return the role of each experience.

    Raises:
        ValueError: No loss component applies to one of the experiences.
    """
    loss_components = components(config)
    pair = np.array([kind == DPO for kind in batch.values("experience_type")], dtype=bool)
    expert = np.array([bool((info or {}).get(EXPERT)) for info in batch.values("info")], dtype=bool)
    samples = loss_components & {"rl", "ref_kl"}
    if not samples and "ce" in loss_components:
        expert[:] = True
    role = np.where(pair, PAIRED, np.where(expert, IMITATED, SAMPLED))
    for flags, needed, what in (
        (pair, {"pair"}, "a pair of answers (dpo)"),
        (~pair & expert, {"ce"}, "an answer to imitate (info.is_expert)"),
        (~pair & ~expert, {"rl", "ref_kl"}, "a sampled answer"),
    ):
        if not loss_components & needed:
            _refuse(
                batch,
                flags,
                f"is {what}, and the loss has weights for {', '.join(sorted(loss_components))} only; give "
                f"{' or '.join(f'algorithm.weights.{name}' for name in sorted(needed))} a weight, or leave it out",
            )
    return role


def trained_tokens(experiences: ExperienceBatch) -> Indexes:
    """Return the number of True values in the action mask of each experience."""
    lengths = experiences.lengths("action_mask")
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner[experiences.dense("action_mask").numpy()], minlength=len(lengths))


def _check_lengths(answers: ExperienceBatch) -> None:
    """Check that each answer has a real response. Every construction of a batch already checks that field lengths
    agree.
    """
    # a truncated prompt leaves no real response, so such an answer has trained tokens only if its mask says so
    _refuse(
        answers,
        answers.prompt_lengths() + answers.lengths("action_mask") != answers.lengths("tokens"),
        "has an action mask of another length than its response: only a real response can be trained on",
    )


def _check_samples(samples: ExperienceBatch, needed: Collection[str], weights: Mapping[str, float]) -> None:
    """Check that every sample has the fields that the loss needs."""
    for name, required, maker in (
        ("logprobs", True, "the engine returns them with its samples"),
        ("advantages", bool(weights.get("rl")), "the algorithm's advantage function sets them in the operator"),
        (
            "teacher_logprobs",
            "teacher" in needed,
            "add_teacher_logprobs of trinity_mq.workflows.builtin.distill sets them in the workflow",
        ),
    ):
        _refuse(
            samples,
            (samples.lengths(name) < 0) & required,
            f"has no {name}, wanted one per response token; {maker}",
        )
    temperatures = np.array([1.0 if heat is None else heat for heat in samples.values("temperature")])
    _refuse(
        samples,
        temperatures <= 0,
        "was sampled at temperature 0: greedy samples have no logprobs to learn from; set a temperature above 0 for "
        "training rollouts",
    )
    _refuse(
        samples,
        np.array([not rows for rows in samples.values("versions")], dtype=bool) & ("staleness" in needed),
        "has no versions, and the loss weighs tokens by their staleness; the engines of this project return versions "
        "with their samples. For samples of other engines take the anchor mu or old, and no staleness correction",
    )


def _refuse(experiences: ExperienceBatch, wrong: Flags, why: str) -> None:
    if wrong.any():
        raise ValueError(f"experience {experiences.ids('uid')[int(wrong.argmax())]} {why}")


def _flat(
    answers: ExperienceBatch,
    role: Indexes,
    first: Indexes,
    weights: Mapping[str, float],
    step: int,
    routed: RouterShape | None,
) -> StepTokens:
    """Return the tensors of all sequences in ``answers``, without a Python loop over tokens.

    Args:
        answers: One sequence each, with at least one trained token. The halves of a pair are adjacent.
        role: Role of each sequence.
        first: Index of the first sequence of each experience in the batch.
        weights: Component weights.
        step: Number of the train step.
        routed: Shape of the model's routers. None: experts are ignored.
    """
    sampled = role == SAMPLED
    responses = np.maximum(answers.lengths("action_mask"), 0)
    keep = answers.dense("action_mask") if len(answers) else torch.zeros(0, dtype=torch.bool)
    owner = np.repeat(np.arange(len(answers)), responses)
    place = np.arange(len(owner)) - (responses.cumsum() - responses)[owner]
    position = torch.from_numpy(answers.prompt_lengths()[owner] + place)[keep]
    lengths = np.maximum(answers.lengths("tokens"), 0)
    trained = torch.from_numpy(owner)[keep]
    temperatures = [
        heat if heat and is_sampled else 1.0
        for heat, is_sampled in zip(answers.values("temperature"), sampled, strict=True)
    ]
    columns = {
        "temperature": torch.tensor(temperatures)[trained],
        "mu": _column(answers, "logprobs", responses, sampled)[keep],
        "advantages": _column(answers, "advantages", responses, sampled)[keep],
        "staleness": _staleness(answers, responses, step)[keep],
    }
    if weights.get("ref_kl"):
        columns["teacher"] = _column(answers, "teacher_logprobs", responses, sampled)[keep]
    chosen = np.flatnonzero(sampled)
    return StepTokens(
        ids=answers.dense("tokens").long() if len(answers) else torch.zeros(0, dtype=torch.int64),
        starts=lengths.cumsum() - lengths,
        lengths=lengths,
        counts=np.bincount(trained.numpy(), minlength=len(answers)),
        first=first,
        task=numbered(answers.ids("tid")),
        role=role,
        position=position,
        columns=columns,
        custom={
            name: column.new_zeros(len(answers), *column.shape[1:]).index_copy(0, torch.from_numpy(chosen), column)[
                trained
            ]
            for name, column in (gather_custom_fields(answers.select(chosen)) if len(chosen) else {}).items()
        },
        engines=_by_engine(answers, sampled, trained),
        experts=None if routed is None else _experts(answers, lengths, routed),
    )


def _experts(answers: ExperienceBatch, lengths: Indexes, routed: RouterShape) -> Tensor | None:
    """Return the experts of all tokens, int16 ``[tokens, layers, top-k]``, :data:`UNKNOWN` where an answer has none;
    None if no answer has experts.

    Args:
        answers: One sequence each.
        lengths: ``[sequences]``: tokens of each sequence.
        routed: Shape of the model's routers.

    Raises:
        ValueError: An answer has the experts of another model.
    """
    column = answers.column("routed_experts")
    for part in column:
        owner, rows = np.repeat(np.arange(len(part.lengths)), np.maximum(part.lengths, 0)), part.dense()
        wrong = np.full(len(owner), rows.shape[1:] != routed[:2])
        if not wrong.any():
            wrong = (rows.amax((1, 2)) >= routed.experts).numpy()
        _refuse(
            answers,
            np.bincount(owner[wrong], minlength=len(answers)) > 0,
            f"has routed_experts of {' x '.join(map(str, rows.shape[1:]))} experts a token, and the model chooses "
            f"{routed.top_k} of {routed.experts} experts in {routed.layers} layers: train on experiences of this "
            "model, or set model.router_replay=false",
        )
    recorded = np.maximum(answers.lengths("routed_experts"), 0)
    there = np.flatnonzero(recorded)
    if not len(there):
        return None
    counts = recorded[there]
    starts = (lengths.cumsum() - lengths)[there]
    where = np.repeat(starts - (counts.cumsum() - counts), counts) + np.arange(int(counts.sum()))
    experts = torch.full((int(lengths.sum()), *routed[:2]), UNKNOWN, dtype=torch.int16)
    column_rows = answers.select(there).dense("routed_experts")
    return experts.index_copy_(0, torch.from_numpy(where), column_rows.to(torch.int16))


def _by_engine(answers: ExperienceBatch, sampled: Flags, trained: Tensor) -> dict[str, Tensor]:
    """Return which tokens each engine sampled, bool ``[tokens]`` by engine id; empty if there is only one engine.

    Args:
        answers: One sequence each.
        sampled: Whether the policy sampled the sequence, ``[sequences]``.
        trained: Index of the sequence of each trained token.
    """
    infos = zip(answers.values("info"), sampled, strict=True)
    engines = [str((info or {}).get(ENGINE, "")) if is_sampled else "" for info, is_sampled in infos]
    names = sorted(set(engines) - {""})
    if len(names) < 2:
        return {}
    owner = np.array(engines)
    return {name: torch.from_numpy(owner == name)[trained] for name in names}


def _column(answers: ExperienceBatch, name: str, responses: Indexes, chosen: Flags) -> Tensor:
    """Return a response field of all answers, float32 ``[response tokens]``. The values are 0 except for the answers
    that ``chosen`` selects and that have the field.
    """
    result = torch.zeros(int(responses.sum()))
    there = np.flatnonzero(chosen & (answers.lengths(name) >= 0))
    if len(there):
        flags = np.zeros(len(answers), dtype=bool)
        flags[there] = True
        result[torch.from_numpy(np.repeat(flags, responses))] = answers.select(there).dense(name).float()
    return result


def _staleness(answers: ExperienceBatch, responses: Indexes, step: int) -> Tensor:
    """Return the train steps between the weights that sampled each response token and the weights before train step
    ``step``, int64 ``[response tokens]``; 0 where the version is unknown.
    """
    starts: list[int] = []
    behind: list[int] = []
    begin = 0
    for rows, length in zip(answers.values("versions"), responses.tolist(), strict=True):
        for start, _, sampled in rows or [(0, 0, step - 1)]:
            starts.append(begin + start)
            behind.append(max(step - 1 - sampled, 0))
        begin += length
    return torch.from_numpy(np.repeat(np.array(behind, dtype=np.int64), np.diff([*starts, begin])))

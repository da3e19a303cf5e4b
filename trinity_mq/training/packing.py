"""Packs experiences into tensors: the trained tokens of a train step, and micro-batches within a token budget.

A sampled answer is one sequence, an answer to imitate another, a pair of answers two. What each token's loss is scaled
by follows from the counts of the whole optimizer step, so losses of micro-batches are only added up.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from trinity_mq.training.parallel.division import divide
from trinity_mq.training.prefixes import Prefixes, divide_shared

SAMPLED, IMITATED, PAIRED = 0, 1, 2
"""Roles of sequences: sampled by the policy, by an expert, or an answer of a pair (chosen, then rejected)."""
ROLES = {"rl": SAMPLED, "ref_kl": SAMPLED, "ce": IMITATED, "pair": PAIRED}
"""Roles of the sequences that each component of a loss is about."""
EXPERT = "is_expert"
"""Key of ``info`` that marks an answer to imitate."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass.

    Padded, each sequence has a row, filled up on the right, so under causal attention no real token sees padding:
    neither an attention mask nor position ids are needed, and the attention kernel takes its fast path. Packed, all
    sequences are one after the other in a single row, and
    :func:`trinity_mq.training.model.attention.model_inputs` says where each begins. With ``prefixes``, the rows are
    padded and without the tokens that sequences begin with in common, which have rows of their own. What is trained on
    is listed token by token; the others, and so all padding, are simply not there.

    One without sequences, for a rank that has nothing left to do, is a single position of padding.
    """

    input_ids: Tensor
    """int64 ``[rows, positions]``; the last token of a sequence is left out, since it predicts nothing."""
    lengths: Tensor
    """int64 ``[sequences]``: how many of these positions each has."""
    rows: Tensor
    """int64 ``[tokens]``: the row of each trained token."""
    columns: Tensor
    """int64 ``[tokens]``: the position in this row that predicts it, one before its own."""
    segment: Tensor
    """int64 ``[tokens]``: the sequence of each trained token, rising from 0; each sequence has some."""
    targets: Tensor
    """int64 ``[tokens]``."""
    temperature: Tensor
    """float32 ``[tokens]``: the sampler's; 1 for answers that the policy did not sample."""
    index: Tensor
    """int64 ``[tokens]``: its number in :class:`TrainTokens`."""
    sequence: Tensor
    """int64 ``[tokens]``: the number of its sequence there."""
    role: Tensor
    """int64 ``[tokens]``: ``SAMPLED``, ``IMITATED`` or ``PAIRED``."""
    mu: Tensor
    """float32 ``[tokens]``: logprobs of the policy that sampled, 0 where there is none."""
    advantages: Tensor
    """float32 ``[tokens]``, 0 where there is none."""
    scale: Tensor
    """float32 ``[tokens]``: what the reduction multiplies its loss by."""
    staleness: Tensor
    """int64 ``[tokens]``: train steps between the weights that sampled it and those before this step; 0 if unknown."""
    teacher: Tensor | None = None
    """float32 ``[tokens]``: the teacher's logprobs where a component needs them."""
    custom: dict[str, Tensor] = field(default_factory=dict)
    """``[tokens, ...]`` each: the custom fields, by destination, of the experience that a token is of."""
    engines: dict[str, Tensor] = field(default_factory=dict)
    """bool ``[tokens]`` each: whether the engine of that id sampled it; none where a single one sampled all."""
    longest_packed: int = 0
    """Positions of the longest sequence of a packed row; 0: the rows are padded."""
    prefixes: Tensor | None = None
    """int64 ``[prefixes, positions]``, filled up on the right: what sequences begin with, and ``input_ids`` leaves out;
    None: nothing is left out."""
    prefix_lengths: Tensor | None = None
    """int64 ``[prefixes]``: how many of these positions each has."""
    prefix_of: Tensor | None = None
    """int64 ``[rows]``: the prefix of each row."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.targets.shape[0]

    @property
    def positions(self) -> int:
        """Positions that the model computes, padding included."""
        return self.input_ids.numel() + (0 if self.prefixes is None else self.prefixes.numel())

    @property
    def padding(self) -> int:
        """Positions that are padding."""
        prefixes = 0 if self.prefix_lengths is None else int(self.prefix_lengths.sum())
        return self.positions - int(self.lengths.sum()) - prefixes

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on ``device``."""
        moved: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, dict):
                value = {name: column.to(device) for name, column in value.items()}
            moved[one.name] = value.to(device) if isinstance(value, Tensor) else value
        return MicroBatch(**moved)


@dataclass(frozen=True)
class Division:
    """The division of an optimizer step that a model wants; the arguments of :meth:`TrainTokens.micro_batches`."""

    max_tokens: int
    packed: bool = False
    shares_prefixes: bool = False
    rank: int = 0
    ranks: int = 1
    hidden_size: int = 1024

    def of(
        self, tokens: TrainTokens, experiences: Sequence[int] | Indexes, reduction: Reduction | None = None
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches; all ranks have the same number of them, some perhaps empty."""
        return tokens.micro_batches(
            experiences,
            self.max_tokens,
            reduction,
            packed=self.packed,
            shares_prefixes=self.shares_prefixes,
            rank=self.rank,
            ranks=self.ranks,
            hidden_size=self.hidden_size,
        )


@dataclass(frozen=True)
class TrainTokens:
    """The sequences of a train step and their trained tokens, flat: those of a sequence next to each other, a pair's
    two sequences too. Experiences without a trained token have no sequence.
    """

    ids: Tensor
    """int64: the tokens of all sequences, one after the other."""
    starts: Indexes
    """``[sequences]``: where each begins in ``ids``."""
    lengths: Indexes
    """``[sequences]``: its tokens."""
    counts: Indexes
    """``[sequences]``: its trained tokens, at least 1."""
    first: Indexes
    """``[experiences]``: the first sequence of each, -1 where it has none."""
    task: Indexes
    """``[sequences]``: a number for the task of each."""
    role: Indexes
    """``[sequences]``: ``SAMPLED``, ``IMITATED`` or ``PAIRED``."""
    position: Tensor
    """int64 ``[tokens]``: the place of a trained token in its sequence."""
    columns: Mapping[str, Tensor]
    """``[tokens]`` each: the columns of :class:`MicroBatch` that are copied as they are."""
    custom: Mapping[str, Tensor]
    """``[tokens, ...]`` each."""
    engines: Mapping[str, Tensor]
    """bool ``[tokens]`` each."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.position.shape[0]

    def experiences(self, roles: Collection[int]) -> Indexes:
        """Return the numbers of the experiences that have sequences of these roles, rising."""
        there = np.flatnonzero(self.first >= 0)
        return there[np.isin(self.role[self.first[there]], list(roles))]

    def micro_batches(
        self,
        experiences: Sequence[int] | Indexes,
        max_tokens: int,
        reduction: Reduction | None = None,
        *,
        packed: bool = False,
        shares_prefixes: bool = False,
        rank: int = 0,
        ranks: int = 1,
        hidden_size: int = 1024,
    ) -> list[MicroBatch]:
        """Cut an optimizer step into micro-batches, longest first (if memory is short it shows at once).

        The two answers of a pair stay together. Ranks get the same number of micro-batches, so the last ones may have
        no sequences; see :func:`trinity_mq.training.parallel.division.divide`.

        Args:
            experiences: The numbers of those in the optimizer step, of all ranks.
            max_tokens: Largest number of tokens in a micro-batch, padding included; a longer single sequence, or pair,
                is one of its own.
            reduction: Makes the scales from the counts of these experiences; None: the mean over tokens.
            packed: Whether the sequences of a micro-batch are one row.
            shares_prefixes: Whether padded rows may leave out what sequences begin with in common, where that is
                worthwhile; of a single rank only.
            rank: Whose micro-batches are returned, from 0.
            ranks: Processes that share the optimizer step.
            hidden_size: Width of the model: how much its attention costs, when the work is shared.
        """
        units = self._units(np.asarray(experiences, dtype=np.int64))
        if not len(units):
            return []
        members = units[units >= 0]
        scale = np.zeros(len(self.counts))
        scale[members] = self._scales(members, reduction or Reduction())
        if shares_prefixes and not packed and ranks == 1:
            prefixes = self._prefixes()
            shared = divide_shared(units, self.lengths, prefixes, max_tokens)
            if shared is not None:
                chosen = (units[part].reshape(-1) for part in shared)
                return [self._micro_batch(part[part >= 0], scale, prefixes=prefixes) for part in chosen]
        lengths = np.where(units >= 0, self.lengths[units], 0)
        parts = divide(lengths, max_tokens, packed=packed, ranks=ranks, hidden_size=hidden_size)[rank]
        chosen = (units[part].reshape(-1) for part in parts)
        return [self._micro_batch(part[part >= 0], scale, packed=packed) for part in chosen]

    def _prefixes(self) -> Prefixes:
        """Return what each sequence begins with, up to the token before the one that predicts its first trained
        token.
        """
        first = self.position[torch.from_numpy(self.counts.cumsum() - self.counts)].numpy()
        return Prefixes.of(self.ids, self.starts, first - 1)

    def _units(self, experiences: Indexes) -> Indexes:
        """Return what cannot be divided, ``[units, 2]``: the sequence of an experience and -1, or its pair."""
        first = self.first[experiences]
        first = first[first >= 0]
        return np.stack([first, np.where(self.role[first] == PAIRED, first + 1, -1)], 1)

    def _scales(self, members: Indexes, reduction: Reduction) -> npt.NDArray[np.float64]:
        """Return the scale of each of the sequences ``members``: each role is reduced by itself, pairs are averaged."""
        role, scale = self.role[members], np.zeros(len(members))
        for one in (SAMPLED, IMITATED):
            chosen = members[role == one]
            scale[role == one] = sequence_scales(self.counts[chosen], self.task[chosen], reduction)
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
        """Return the tensors of one micro-batch without touching single tokens in Python."""
        counts = self.counts[sequences]
        segment = np.repeat(np.arange(len(sequences)), counts)
        before = self.counts.cumsum() - self.counts
        index = torch.from_numpy(
            np.repeat(before[sequences] - (counts.cumsum() - counts), counts) + np.arange(len(segment))
        )
        skipped = np.zeros_like(sequences) if prefixes is None else prefixes.lengths[sequences]
        starts, lengths = self.starts[sequences] + skipped, self.lengths[sequences] - skipped - 1
        part, own = torch.from_numpy(segment), torch.from_numpy(sequences)
        position = self.position[index] - torch.from_numpy(skipped)[part]
        if packed or not len(sequences):
            begin = lengths.cumsum() - lengths
            where = torch.from_numpy(np.repeat(starts - begin, lengths) + np.arange(int(lengths.sum())))
            input_ids = self.ids[where][None] if len(where) else torch.zeros(1, 1, dtype=torch.int64)
            rows, columns = torch.zeros_like(part), torch.from_numpy(begin)[part] + position - 1
        else:
            input_ids = self._padded(starts, lengths)
            rows, columns = part, position - 1
        return MicroBatch(
            input_ids=input_ids,
            lengths=torch.from_numpy(lengths),
            rows=rows,
            columns=columns,
            segment=part,
            targets=self.ids[torch.from_numpy(starts)[part] + position],
            index=index,
            sequence=own[part],
            role=torch.from_numpy(self.role[sequences])[part],
            scale=torch.from_numpy(scale[sequences]).float()[part],
            custom={name: column[index] for name, column in self.custom.items()},
            engines={name: column[index] for name, column in self.engines.items()},
            longest_packed=int(lengths.max(initial=1)) if packed and len(sequences) else 0,
            **{name: column[index] for name, column in self.columns.items()},
            **({} if prefixes is None else self._prefix_rows(sequences, prefixes)),
        )

    def _prefix_rows(self, sequences: Indexes, prefixes: Prefixes) -> dict[str, Tensor]:
        """Return the columns of a micro-batch that have the prefixes of its sequences."""
        _, chosen, number = np.unique(prefixes.number[sequences], return_index=True, return_inverse=True)
        lengths = prefixes.lengths[sequences[chosen]]
        return {
            "prefixes": self._padded(self.starts[sequences[chosen]], lengths),
            "prefix_lengths": torch.from_numpy(lengths),
            "prefix_of": torch.from_numpy(number),
        }

    def _padded(self, starts: Indexes, lengths: Indexes) -> Tensor:
        """Return rows of tokens, filled up with 0 on the right, int64 ``[rows, longest]``."""
        places = np.arange(int(lengths.max(initial=1)))
        where = torch.from_numpy(np.minimum(starts[:, None] + places, len(self.ids) - 1))
        return torch.where(torch.from_numpy(places < lengths[:, None]), self.ids[where], 0)


def split(size: int, count: int, seed: str) -> list[list[int]]:
    """Divide the experiences of a batch, by number, into mini-batches whose sizes differ by at most one.

    Args:
        size: Experiences in the batch.
        count: Optimizer steps to make of it; fewer only if there are fewer experiences.
        seed: Decides who goes where, so that a step done again is the same step. A single mini-batch keeps its order.

    Returns:
        Mini-batches, none of them empty.
    """
    order = list(range(size))
    if count == 1:
        return [order] if order else []
    random.Random(seed).shuffle(order)
    return [part for part in (order[start::count] for start in range(count)) if part]


def flatten(
    experiences: Sequence[Experience], config: LossConfig, weights: Mapping[str, float], step: int
) -> TrainTokens:
    """Return the trained tokens of a train step.

    A pair of answers is paired; an experience whose ``info`` says ``is_expert``, and every other one where the loss
    knows no component for samples, is to imitate. What has no weight in this step is left out.

    Args:
        experiences: With what their components need: samples with ``logprobs``, a temperature above 0 (none means 1),
            ``advantages`` for ``rl``, ``teacher_logprobs`` for ``ref_kl``; the others with nothing but tokens.
        config: The loss.
        weights: Of the components in this train step.
        step: Its number, from 1; staleness is counted from the weights before it.

    Raises:
        ValueError: An experience that cannot be trained on; names it and what it lacks. Or custom fields that
            :func:`gather_custom_fields` refuses.
    """
    batch = ExperienceBatch.of(experiences)
    role = _roles(batch, config)
    active = np.isin(role, [ROLES[name] for name, weight in weights.items() if weight])
    plain = np.flatnonzero(active & (role != PAIRED))
    plain = plain[trained_tokens(batch.select(plain)) > 0]
    pairs = np.flatnonzero(active & (role == PAIRED))
    halves = ExperienceBatch.of(split_dpo_experience_to_single_turn(batch.select(pairs).into_list()))
    whole = (trained_tokens(halves).reshape(-1, 2) > 0).all(1)
    pairs, halves = pairs[whole], halves.select(np.repeat(whole, 2))
    _check_lengths(batch.select(plain))
    _check_samples(batch.select(plain[role[plain] == SAMPLED]), needs(config, weights), weights)
    answers = ExperienceBatch.concat([batch.select(plain), halves])
    first = np.full(len(batch), -1, dtype=np.int64)
    first[plain] = np.arange(len(plain))
    first[pairs] = len(plain) + 2 * np.arange(len(pairs))
    return _flat(answers, np.concatenate([role[plain], np.full(len(halves), PAIRED)]), first, weights, step)


def without_unknown(batch: ExperienceBatch, config: LossConfig) -> tuple[ExperienceBatch, int]:
    """Return the batch with an action mask of False where the engine's or the teacher's logprob of a sampled token is
    not finite, and the number of tokens that this leaves out: they are in no loss and in no denominator.

    Raises:
        ValueError: No component of the loss is about one of the experiences.
    """
    lengths = batch.lengths("action_mask")
    sampled = (_roles(batch, config) == SAMPLED) & (lengths >= 0)
    if not sampled.any():
        return batch, 0
    mask = batch.dense("action_mask").bool()
    known = torch.ones_like(mask)
    for name in ("logprobs", "teacher_logprobs"):
        known &= _column(batch, name, np.maximum(lengths, 0), sampled).isfinite()
    out = int((mask & ~known).sum())
    return (batch.replace(action_mask=Ragged.packed(mask & known, lengths)) if out else batch), out


def _roles(batch: ExperienceBatch, config: LossConfig) -> Indexes:
    """Return the role of each experience.

    Raises:
        ValueError: No component of the loss is about one of them.
    """
    known = components(config)
    pair = np.array([kind == DPO for kind in batch.values("experience_type")], dtype=bool)
    expert = np.array([bool((info or {}).get(EXPERT)) for info in batch.values("info")], dtype=bool)
    samples = known & {"rl", "ref_kl"}
    if not samples and "ce" in known:
        expert[:] = True
    role = np.where(pair, PAIRED, np.where(expert, IMITATED, SAMPLED))
    for flags, needed, what in (
        (pair, {"pair"}, "a pair of answers (dpo)"),
        (~pair & expert, {"ce"}, "an answer to imitate (info.is_expert)"),
        (~pair & ~expert, {"rl", "ref_kl"}, "a sampled answer"),
    ):
        if not known & needed:
            _refuse(
                batch,
                flags,
                f"is {what}, and the loss has weights for {', '.join(sorted(known))} only; give "
                f"{' or '.join(f'algorithm.weights.{name}' for name in sorted(needed))} a weight, or leave it out",
            )
    return role


def trained_tokens(experiences: ExperienceBatch) -> Indexes:
    """Return how many True values the action mask of each has."""
    lengths = experiences.lengths("action_mask")
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner[experiences.dense("action_mask").numpy()], minlength=len(lengths))


def _check_lengths(answers: ExperienceBatch) -> None:
    """Check that each has a real response; that the lengths of fields agree is checked wherever a batch is made."""
    # a truncated prompt leaves no real response, and nothing trained on unless a mask says so
    _refuse(
        answers,
        answers.prompt_lengths() + answers.lengths("action_mask") != answers.lengths("tokens"),
        "has an action mask of another length than its response: only a real response can be trained on",
    )


def _check_samples(samples: ExperienceBatch, needed: Collection[str], weights: Mapping[str, float]) -> None:
    """Check that every sample has what the loss needs."""
    for name, wanted, maker in (
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
            (samples.lengths(name) < 0) & wanted,
            f"has no {name}, wanted one per response token; {maker}",
        )
    heats = np.array([1.0 if heat is None else heat for heat in samples.values("temperature")])
    _refuse(
        samples,
        heats <= 0,
        "was sampled at temperature 0: greedy samples have no logprobs to learn from; set a temperature above 0 for "
        "training rollouts",
    )
    _refuse(
        samples,
        np.array([not rows for rows in samples.values("versions")], dtype=bool) & ("staleness" in needed),
        "has no versions, and the loss weighs tokens by their staleness; an engine of this project returns them with "
        "its samples. Take the anchor mu or old, and no staleness correction, for samples of others",
    )


def _refuse(experiences: ExperienceBatch, wrong: Flags, why: str) -> None:
    if wrong.any():
        raise ValueError(f"experience {experiences.ids('uid')[int(wrong.argmax())]} {why}")


def _flat(
    answers: ExperienceBatch, role: Indexes, first: Indexes, weights: Mapping[str, float], step: int
) -> TrainTokens:
    """Return the tensors of all sequences, ``answers``, each with a trained token, without touching single tokens in
    Python.

    Args:
        answers: A sequence each; the halves of pairs are next to each other.
        role: Of each.
        first: Of each experience of the batch, its first sequence.
        weights: Of the components.
        step: Number of the train step.
    """
    sampled = role == SAMPLED
    responses = np.maximum(answers.lengths("action_mask"), 0)
    keep = answers.dense("action_mask") if len(answers) else torch.zeros(0, dtype=torch.bool)
    owner = np.repeat(np.arange(len(answers)), responses)
    place = np.arange(len(owner)) - (responses.cumsum() - responses)[owner]
    position = torch.from_numpy(answers.prompt_lengths()[owner] + place)[keep]
    lengths = np.maximum(answers.lengths("tokens"), 0)
    trained = torch.from_numpy(owner)[keep]
    heats = [heat if heat and one else 1.0 for heat, one in zip(answers.values("temperature"), sampled, strict=True)]
    columns = {
        "temperature": torch.tensor(heats)[trained],
        "mu": _column(answers, "logprobs", responses, sampled)[keep],
        "advantages": _column(answers, "advantages", responses, sampled)[keep],
        "staleness": _staleness(answers, responses, step)[keep],
    }
    if weights.get("ref_kl"):
        columns["teacher"] = _column(answers, "teacher_logprobs", responses, sampled)[keep]
    chosen = np.flatnonzero(sampled)
    return TrainTokens(
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
    )


def _by_engine(answers: ExperienceBatch, sampled: Flags, trained: Tensor) -> dict[str, Tensor]:
    """Return which tokens each engine sampled, bool ``[tokens]`` by its id; nothing where there is only one.

    Args:
        answers: A sequence each.
        sampled: Which of them the policy sampled.
        trained: The sequence of each trained token.
    """
    infos = zip(answers.values("info"), sampled, strict=True)
    engines = [str((info or {}).get(ENGINE, "")) if one else "" for info, one in infos]
    names = sorted(set(engines) - {""})
    if len(names) < 2:
        return {}
    owner = np.array(engines)
    return {name: torch.from_numpy(owner == name)[trained] for name in names}


def _column(answers: ExperienceBatch, name: str, responses: Indexes, chosen: Flags) -> Tensor:
    """Return a response field of all answers, float32 ``[response tokens]``; 0 but for those ``chosen`` that have
    it.
    """
    result = torch.zeros(int(responses.sum()))
    there = np.flatnonzero(chosen & (answers.lengths(name) >= 0))
    if len(there):
        flags = np.zeros(len(answers), dtype=bool)
        flags[there] = True
        result[torch.from_numpy(np.repeat(flags, responses))] = answers.select(there).dense(name).float()
    return result


def _staleness(answers: ExperienceBatch, responses: Indexes, step: int) -> Tensor:
    """Return the train steps between the weights that sampled each response token and those before train step
    ``step``, int64 ``[response tokens]``; 0 where a version is not known.
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

"""Grouping experiences by id and splitting preference pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from trinity_mq.experience.batch import ExperienceBatch
from trinity_mq.experience.eid import EID
from trinity_mq.experience.record import Experience
from trinity_mq.experience.rules import CHOSEN_MASK, DPO, REJECTED_MASK, SINGLE_TURN

IdType = Literal["task", "run", "step"]

_ID_PROPERTIES = {"task": "tid", "run": "rid", "step": "sid"}


@overload
def group_by(experiences: ExperienceBatch, id_type: IdType) -> dict[str, ExperienceBatch]: ...
@overload
def group_by(experiences: list[Experience], id_type: IdType) -> dict[str, list[Experience]]: ...
def group_by(
    experiences: list[Experience] | ExperienceBatch, id_type: IdType
) -> dict[str, list[Experience]] | dict[str, ExperienceBatch]:
    """Group experiences by ``tid`` (task), ``rid`` (run) or ``sid`` (step), in the order in which the ids first appear.

    The groups of an :class:`ExperienceBatch` are batches.

    Raises:
        ValueError: ``id_type`` is unknown.
    """
    if id_type not in _ID_PROPERTIES:
        raise ValueError(f"Unknown id_type: {id_type}; wanted one of {', '.join(_ID_PROPERTIES)}")
    kind = _ID_PROPERTIES[id_type]
    if isinstance(experiences, ExperienceBatch):
        return {name: experiences.select(numbers) for name, numbers in _numbers(experiences.ids(kind)).items()}
    members = _numbers(getattr(experience.eid, kind) for experience in experiences)
    return {name: [experiences[number] for number in numbers] for name, numbers in members.items()}


def _numbers(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the indexes at which each name occurs."""
    members: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        members.setdefault(name, []).append(number)
    return members


def split_dpo_experience_to_single_turn(experiences: Sequence[Experience]) -> list[Experience]:
    """Return two single-turn experiences for each dpo experience: the chosen response, then the rejected response.

    The order matters, because the loss pairs the experiences by even and odd index. Each experience has its own id,
    which differs from the id of the pair only in the suffix.

    Raises:
        ValueError: An experience is not of type dpo.
    """
    result = []
    for number, experience in enumerate(experiences):
        if experience.experience_type != DPO or experience.chosen is None or experience.rejected is None:
            raise ValueError(f"experience {number} ({experience.eid.uid}) is {experience.experience_type}, wanted dpo")
        result.append(_half(experience, experience.chosen, experience.chosen_messages, CHOSEN_MASK))
        result.append(_half(experience, experience.rejected, experience.rejected_messages, REJECTED_MASK))
    return result


def _half(pair: Experience, response: Tensor, messages: list[dict[str, object]] | None, mask: str) -> Experience:
    return Experience(
        eid=EID(pair.eid.batch, pair.eid.task, pair.eid.run, pair.eid.step),
        tokens=torch.cat([pair.tokens, response]),
        prompt_length=pair.tokens.shape[0],
        reward=pair.reward,
        action_mask=pair.info.get(mask),
        info=pair.info,
        metrics=pair.metrics,
        prompt_text=pair.prompt_text,
        messages=messages,
        tools=pair.tools,
        truncate_status=pair.truncate_status,
        multi_modal_inputs=pair.multi_modal_inputs,
        custom_fields=pair.custom_fields,
        temperature=pair.temperature,
        taskset=pair.taskset,
        index=pair.index,
        experience_type=SINGLE_TURN,
    )

"""Auxiliary models of workflows with a judge or a teacher: their choice, and their failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trinity_mq.models.errors import EngineLost, EngineNotReady
from trinity_mq.workflows.workflow import TaskError, Workflow

if TYPE_CHECKING:
    from trinity_mq.models import InferenceModel, ModelWrapper


class AuxiliaryError(RuntimeError):
    """An auxiliary model cannot be asked, or what it answered cannot be used; the run has failed and may be retried."""

    lost: InferenceModel | None = None
    """Its engine, if that did not answer at all: the next attempt is to ask another one, if there is one."""


Which = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]
"""An auxiliary model: its place among ``explorer.auxiliary_models``, from 0, or its name there."""


def auxiliary_place(workflow: Workflow, which: int | str, purpose: str) -> int:
    """Return the place of an auxiliary model among those of a workflow.

    Args:
        workflow: Was handed them.
        which: Its place or its name.
        purpose: What it is here: ``judge``, ``teacher``.

    Raises:
        TaskError: There is no such model.
    """
    names = [model.model_name for model in workflow.auxiliary_model_wrappers]
    place = which if isinstance(which, int) else names.index(which) if which in names else len(names)
    if place >= len(names):
        raise TaskError(
            f"{type(workflow).__name__} wants auxiliary model {which!r} as its {purpose}, and there are {len(names)}"
            f"{': ' if names else ''}{', '.join(names)}; add one to explorer.auxiliary_models, "
            f"or set workflow_args.{purpose} to the name or the place, from 0, of one that is there"
        )
    return place


@contextlib.contextmanager
def asking(model: ModelWrapper, purpose: str) -> Iterator[None]:
    """Make the failures of an auxiliary model its own: unlike those of the rollout engine they do not move the run to
    another engine. One that is not ready yet is waited for as usual.

    Raises:
        AuxiliaryError: The model cannot be asked.
    """
    try:
        yield
    except EngineNotReady:
        raise
    except Exception as error:  # of the engine, of the client, or of whatever chokes on a strange server's answer
        # without a cause: the chain of causes is searched for signs that the rollout engine is lost
        failed = AuxiliaryError(
            f"the {purpose} {model.model_name!r} at {model.model.url} cannot be asked: {type(error).__name__}: {error}"
        )
        failed.lost = model.model if isinstance(error, EngineLost) else None
        raise failed from None

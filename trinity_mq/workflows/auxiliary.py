"""Auxiliary models of workflows with a judge or a teacher: selection and failures."""

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
    """An auxiliary model cannot be reached, or its answer cannot be used. The run has failed and may be retried."""

    lost: InferenceModel | None = None
    """The auxiliary model, if its engine did not answer at all. The next attempt then uses another engine of this
    model, if there are several. None otherwise.
    """


Which = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]
"""An auxiliary model: its position in ``explorer.auxiliary_models``, from 0, or its name there."""


def auxiliary_index(workflow: Workflow, which: int | str, purpose: str) -> int:
    """Return the position of an auxiliary model among the auxiliary models of a workflow.

    Args:
        workflow: The workflow that received the models.
        which: Position or name of the model.
        purpose: Role of the model in the workflow, for error messages: ``judge`` or ``teacher``.

    Raises:
        TaskError: The workflow has no such model.
    """
    names = [model.model_name for model in workflow.auxiliary_model_wrappers]
    place = which if isinstance(which, int) else names.index(which) if which in names else len(names)
    if place >= len(names):
        raise TaskError(
            f"{type(workflow).__name__} uses auxiliary model {which!r} as its {purpose}, and the run has "
            f"{len(names)}{': ' if names else ''}{', '.join(names)}; add a model to explorer.auxiliary_models, or set "
            f"workflow_args.{purpose} to the name or the position, from 0, of a model in it"
        )
    return place


@contextlib.contextmanager
def auxiliary_errors(model: ModelWrapper, purpose: str) -> Iterator[None]:
    """Convert failures of an auxiliary model into AuxiliaryError. Such a failure does not move the run to another
    rollout engine. EngineNotReady passes through, so the caller waits for the model as usual.

    Raises:
        AuxiliaryError: The model cannot be reached, or did not answer as expected.
    """
    try:
        yield
    except EngineNotReady:
        raise
    # The error comes from the engine, the client, or the parsing of a foreign server's answer. It is raised without a
    # cause, because the chain of causes is searched for signs that the rollout engine is lost.
    except Exception as error:
        failed = AuxiliaryError(
            f"the {purpose} {model.model_name!r} at {model.model.url} cannot be asked: {type(error).__name__}: {error}"
        )
        failed.lost = model.model if isinstance(error, EngineLost) else None
        raise failed from None

"""Typed arguments of a workflow: ``workflow_args`` of the taskset, overridden by keys of the record, and validated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trinity_mq.config.loading.secrets import Secrets
from trinity_mq.errors import suggest
from trinity_mq.workflows.workflow import Task, TaskError


class Arguments(BaseModel):
    """Base class of a workflow's arguments, with one field for each argument."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def missing(self) -> list[str]:
        """Return a sentence for each program or file that the workflow needs and this machine does not have."""
        return []


A = TypeVar("A", bound=Arguments)


def arguments_of(task: Task, kind: type[A], *, record_keys: Iterable[str] = ()) -> A:
    """Return the arguments of ``task`` as an instance of ``kind``.

    Args:
        task: The task. Its ``workflow_args`` may hold only fields of ``kind``, unless ``kind`` ignores other arguments.
        kind: The pydantic model that declares the arguments.
        record_keys: Arguments that ``raw_task`` may also set. A value there overrides ``workflow_args`` unless it is
            None.

    Raises:
        TaskError: An argument does not exist, has an invalid value, or may not be set by a task from outside.
    """
    workflow_args: dict[str, Any] = dict(task.workflow_args)
    _refuse_unknown(workflow_args, kind)
    record = {name: task.raw_task[name] for name in record_keys if task.raw_task.get(name) is not None}
    _refuse_closed(record, task.record_args)
    try:
        return kind.model_validate(workflow_args | record)
    except ValidationError as error:
        raise TaskError(_message(error.errors()[0], record)) from error


def check_arguments(workflow_args: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """Check ``workflow_args`` before any record is read. Arguments may be missing, because a record may set them later.

    Raises:
        TaskError: An argument does not exist or has an invalid value.
    """
    _refuse_unknown(workflow_args, kind)
    try:
        kind.model_validate(dict(workflow_args))
    except ValidationError as error:
        wrong = next((detail for detail in error.errors() if detail["type"] != "missing"), None)
        if wrong is not None:
            raise TaskError(_message(wrong, {})) from error


def accept_more(kind: type[A]) -> type[A]:
    """Return a subclass of ``kind`` that ignores unknown arguments, for workflow subclasses with more arguments."""
    more: type[A] = type(f"Open{kind.__name__}", (kind,), {"model_config": ConfigDict(extra="ignore")})
    return more


def _refuse_unknown(workflow_args: Mapping[str, Any], kind: type[BaseModel]) -> None:
    unknown = next((name for name in workflow_args if name not in kind.model_fields), None)
    if unknown is not None and kind.model_config.get("extra") != "ignore":
        hint = suggest(str(unknown), kind.model_fields) if kind.model_fields else "the workflow takes none"
        raise TaskError(f"workflow_args.{unknown} does not exist; {hint}")


def _refuse_closed(record: Mapping[str, Any], open_keys: Sequence[str] | None) -> None:
    closed = [] if open_keys is None else [name for name in record if name not in open_keys]
    if closed:
        raise TaskError(
            f"raw_task.{closed[0]} is an argument of the workflow, which a task from outside may not set: leave it out "
            "or open this key with outsiders.record_args in the configuration of the run"
        )


def _message(detail: Any, record: Mapping[str, Any]) -> str:
    names = [str(part) for part in detail["loc"]]
    where = ".".join(["raw_task" if names and names[0] in record else "workflow_args", *names])
    secrets = Secrets({where: detail["input"]})
    shown_value = "missing" if detail["type"] == "missing" else secrets.hide(repr(detail["input"]))[:80]
    return f"{where} is {shown_value}: {secrets.hide(detail['msg'])}"

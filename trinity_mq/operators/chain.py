"""Runs a batch through a chain of operators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.experience.fields import short_repr
from trinity_mq.operators.base import ColumnOperator, ExperienceOperatorV1, operator_name
from trinity_mq.runtime.errors import describe_error

PREFIX = "experience_pipeline"
Experiences = list[Experience] | ExperienceBatch


class OperatorError(Exception):
    """An operator failed on a batch. The message names the operator, its place in the chain and, if the operator raised
    an error, the line of the error.
    """

    def __init__(self, operator: str, message: str) -> None:
        super().__init__(f"operator {operator}: {message}")
        self.operator = operator
        """Place of the operator in the chain and its class: ``{place}_{Class}``."""


async def run_chain(
    operators: Sequence[ExperienceOperatorV1], experiences: Experiences, *, timeout: float | None = None
) -> tuple[Experiences, dict[str, float]]:
    """Process the experiences of one batch with ``operators``, one after the other.

    The result of an operator is the input of the next operator. If no experiences remain, the later operators are
    skipped. A :class:`ColumnOperator` takes and returns an :class:`ExperienceBatch`, any other operator a list.

    Args:
        operators: The chain.
        experiences: All experiences of one batch.
        timeout: Seconds for the chain. None: no limit.

    Returns:
        The remaining experiences, and the metrics: each operator's own metrics as
            ``experience_pipeline/{place}_{Class}/{name}`` (a name with ``/`` is unchanged), its seconds as
            ``time/operator/{place}_{Class}``, and ``experience_pipeline/experience_count``. Metrics of operators that
            are not real numbers are left out.

    Raises:
        OperatorError: An operator failed, did not return experiences and metrics, or was running when the timeout
            ended.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    metrics: dict[str, float] = {}
    for place, operator in enumerate(operators):
        if not experiences:
            break
        label = f"{place}_{operator_name(operator)}"
        start = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                experiences, operator_metrics = await _process(operator, label, experiences)
        except TimeoutError:
            taken = loop.time() - start
            raise OperatorError(
                label,
                f"the chain was not done within {timeout:g} s (operator.timeout); {taken:.3g} s of them went here",
            ) from None
        metrics[f"time/operator/{label}"] = loop.time() - start
        for name, value in operator_metrics.items():
            if isinstance(value, Real):
                metrics[name if "/" in str(name) else f"{PREFIX}/{label}/{name}"] = float(value)
    metrics[f"{PREFIX}/experience_count"] = float(len(experiences))
    return experiences, metrics


async def _process(
    operator: ExperienceOperatorV1, label: str, experiences: Experiences
) -> tuple[Experiences, Mapping[str, Any]]:
    result: Any
    try:
        if isinstance(operator, ColumnOperator):
            result = await operator.process_batch(experiences)
        elif isinstance(experiences, ExperienceBatch):
            # copies, because an operator may write to its tensors, and the batch's tensors are views of the received
            # body
            result = await operator.process(await asyncio.to_thread(experiences.to_list))
        else:
            result = await operator.process(experiences)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise OperatorError(label, "cancelled itself") from None
    except (Exception, SystemExit) as error:
        raise OperatorError(label, describe_error(error)) from error
    match result:
        case (ExperienceBatch() as remaining_batch, Mapping() as metrics):
            return remaining_batch, metrics
        case (list(remaining_list), Mapping() as metrics) if all(isinstance(exp, Experience) for exp in remaining_list):
            return remaining_list, metrics
    raise OperatorError(label, f"returned {short_repr(result)}, wanted a list of experiences and a dict of metrics")

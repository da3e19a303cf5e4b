"""Operators by name, and their creation from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from trinity_mq.config import OperatorConfig
from trinity_mq.config.loading.secrets import Secrets
from trinity_mq.operators.base import AuxiliaryModels, ExperienceOperator, ExperienceOperatorV1, WrappedOperator
from trinity_mq.runtime.errors import FatalError, place
from trinity_mq.runtime.plugins import Registry, resolve

OPERATORS = Registry(
    {
        "dapo_dynamic_sampling": "trinity_mq.operators.sampling:DapoDynamicSampling",
        "deduplication": "trinity_mq.operators.sampling:Deduplication",
        "human_review": "trinity_mq.operators.human_review:HumanReview",
        "invalid_reward_filter": "trinity_mq.operators.filters:InvalidRewardFilter",
        "length_penalty": "trinity_mq.operators.rewards:LengthPenalty",
        "mask_response_truncated": "trinity_mq.operators.masks:MaskResponseTruncated",
        "pass_rate_calculator": "trinity_mq.operators.pass_rate:PassRateCalculator",
        "reward_filter": "trinity_mq.operators.filters:RewardFilter",
        "reward_shaping_mapper": "trinity_mq.operators.rewards:RewardShaping",
        "reward_std_filter": "trinity_mq.operators.filters:RewardStdFilter",
    },
    "EXPERIENCE_OPERATORS",
    "OPERATORS",
)
"""Built-in operators, and operators that ``@EXPERIENCE_OPERATORS.register_module`` adds."""
EXPERIENCE_OPERATORS = OPERATORS
"""Name of ``OPERATORS`` in Trinity-RFT."""

ENTRY_GROUP = "trinity_mq.operators"


class OperatorConfigError(FatalError, ValueError):
    """An operator cannot be created from its configuration."""


def create_operators(
    operator_configs: Sequence[OperatorConfig], auxiliary_models: AuxiliaryModels | None = None
) -> list[ExperienceOperatorV1]:
    """Return the operators that the configurations name, in order. Synchronous operators are wrapped to run in a
    thread.

    Args:
        operator_configs: Each has a registered name or a dotted path, and the arguments of the class.
        auxiliary_models: Clients by model name, passed to each operator.

    Raises:
        UnknownNameError: A name does not exist. The message lists near misses.
        OperatorConfigError: A name is not an operator class, its ``process`` is a coroutine function in the synchronous
            interface or a plain function in the asynchronous interface, or the class does not take these arguments.
    """
    return [_create(config, auxiliary_models) for config in operator_configs]


def _create(config: OperatorConfig, auxiliary_models: AuxiliaryModels | None) -> ExperienceOperatorV1:
    kind = resolve("operator", config.name, OPERATORS, ENTRY_GROUP)
    if not (inspect.isclass(kind) and issubclass(kind, ExperienceOperator | ExperienceOperatorV1)):
        raise OperatorConfigError(
            f"operator {config.name!r} is {kind!r}, wanted a subclass of trinity_mq.operators.ExperienceOperatorV1"
        )
    if issubclass(kind, ExperienceOperator) == inspect.iscoroutinefunction(inspect.unwrap(kind.process)):
        form = "a plain function" if issubclass(kind, ExperienceOperatorV1) else "an async function"
        raise OperatorConfigError(
            f"operator {config.name!r}: {kind.__name__}.process is {form}; write `async def process` in a subclass of "
            "ExperienceOperatorV1, or `def process`, which runs in a thread, in one of ExperienceOperator"
        )
    try:
        made = kind(**_checked(kind, config.args))
    except (TypeError, ValueError) as error:
        wrong = f"operator {config.name!r} cannot be made with args {config.args!r}: {error}{place(error)}"
        raise OperatorConfigError(Secrets(config.args).hide(wrong)) from error
    operator = WrappedOperator(made) if isinstance(made, ExperienceOperator) else made
    operator.set_auxiliary_model(auxiliary_models)
    return operator


def _checked(kind: type, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``args`` converted to the annotated types of the constructor of ``kind``.

    Raises:
        ValueError: An argument has an invalid value.
    """
    try:
        hints = get_type_hints(kind.__init__)  # type: ignore[misc]
    except (NameError, TypeError):  # a name may be imported only for type checkers
        hints = {}
    return {name: _value(name, value, hints[name]) if name in hints else value for name, value in args.items()}


def _value(name: str, value: Any, annotation: Any) -> Any:
    try:
        return TypeAdapter(annotation).validate_python(value)
    except PydanticUserError:  # pydantic does not support this class
        return value
    except ValidationError as error:
        reasons = "; ".join(detail["msg"] for detail in error.errors(include_url=False))
        raise ValueError(f"{name} is {value!r}: {reasons}") from error

"""Creates selectors from a configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trinity_mq.config.buffer.selectors import (
    DifficultyBasedSelector,
    DifficultyPoolsSelector,
    EasyToHardSelector,
    RandomSelector,
    SelectorConfig,
    SelectorPlugin,
    SequentialSelector,
)
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.records import Record
from trinity_mq.data.selectors.base import Selector
from trinity_mq.data.selectors.class_form import SelectorSettings, class_selector, is_class_form
from trinity_mq.data.selectors.difficulty_based import DifficultyBased
from trinity_mq.data.selectors.difficulty_pools import DifficultyPools
from trinity_mq.data.selectors.epochs import EasyToHard, EpochSelector
from trinity_mq.data.selectors.random import RandomOrder
from trinity_mq.runtime.errors import custom_code
from trinity_mq.runtime.plugins import resolve


def create_selector(config: SelectorConfig, rows: Sequence[Record], seed: int, taskset: str) -> Selector:
    """Create the selector of a taskset, in its initial state.

    Args:
        config: The selector's settings, whose class determines the selector.
        rows: The taskset's records.
        seed: Seed of the run, used if ``config`` has no seed.
        taskset: Name of the taskset, for error messages.

    Raises:
        TasksetError: A record has no valid number at a key of ``feature_keys``, or a custom class cannot be used.
        UnknownNameError: The custom class does not exist.
    """
    seed = seed if config.seed is None else config.seed
    match config:
        case SelectorPlugin():
            return _plugin(config, rows, seed, taskset)
        case RandomSelector():
            return RandomOrder(len(rows), seed)
        case EasyToHardSelector():
            return EasyToHard(_features(config.feature_keys, rows, taskset))
        case DifficultyBasedSelector():
            return DifficultyBased(_features(config.feature_keys, rows, taskset, rates=True), config, seed)
        case DifficultyPoolsSelector():
            return DifficultyPools(len(rows), config, seed)
    return EpochSelector(len(rows), "sequential" if isinstance(config, SequentialSelector) else "shuffle", seed)


def _features(keys: Sequence[str], rows: Sequence[Record], taskset: str, *, rates: bool = False) -> NDArray[np.float64]:
    """Return ``[tasks, keys]``, the numbers at ``keys`` of every record."""
    valid_values = "a number from 0 to 1" if rates else "a finite number"
    for place, row in enumerate(rows):
        for key in keys:
            value = row.get(key)
            good = isinstance(value, int | float) and math.isfinite(value) and (not rates or 0 <= value <= 1)
            if not good:
                raise TasksetError(
                    f"taskset {taskset!r}: record {place} has {value!r} at {key!r}, wanted {valid_values}; set "
                    "data_selector.feature_keys to keys that every record has, or add it to the record"
                )
    return np.array([[float(row[key]) for key in keys] for row in rows])


def _plugin(config: SelectorPlugin, rows: Sequence[Record], seed: int, taskset: str) -> Selector:
    kind = resolve("selector", config.selector_type)
    if is_class_form(kind):
        settings = SelectorSettings(config.selector_type, seed, list(config.feature_keys), dict(config.kwargs))
        return class_selector(kind, settings, rows, taskset, f"taskset {taskset!r}: selector {config.selector_type!r}")
    arguments: dict[str, Any] = dict(config.kwargs)
    if config.feature_keys:
        arguments["feature_keys"] = config.feature_keys
    where = f"taskset {taskset!r}: selector {config.selector_type!r}"
    what = f"{where} cannot be made of records, a seed and {arguments!r}"
    try:
        inspect.signature(kind).bind(rows, seed, **arguments)
    except (TypeError, ValueError) as error:
        raise TasksetError(f"{what}: {error}. Change its arguments under data_selector.kwargs") from error
    with custom_code(TasksetError, f"{what} (data_selector.kwargs):"):
        made = kind(rows, seed, **arguments)
    if not isinstance(made, Selector):
        raise TasksetError(f"{where} makes {made!r}, wanted the methods next, observe, state, restore and metrics")
    return made

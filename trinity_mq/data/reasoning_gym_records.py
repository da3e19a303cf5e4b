"""Records of the procedural datasets of reasoning-gym, drawn by a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_mq.config import TasksetConfig
from trinity_mq.data.errors import TasksetError
from trinity_mq.rewards.reasoning_gym_scores import ORIGIN, Dataset, DatasetError, open_dataset

DEFAULT_LIMIT = 500
"""Records of a taskset without a limit, as many as the datasets have by themselves."""
HELD_OUT = 5
"""One of so many questions is held out, by a hash of its text."""
DRAWS = {"train": 2, "test": 2 * HELD_OUT}
"""By split: entries that are drawn at most for each record; a part of them belongs to the other split."""
MORE_DRAWS = 50
"""Further entries, so that a few records are found too."""


def reasoning_gym_rows(config: TasksetConfig, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a taskset, each with where it comes from, as many as there are or ``limit`` of them.

    Which split a question belongs to follows from its text: training and evaluation share none, whatever their seeds.

    Args:
        config: Its ``path`` is the dataset, its ``dataset_args`` are the dataset's and may hold a ``seed`` too.
        seed: Of the run. It draws a seed where ``dataset_args`` has none: entries follow from the sum of the dataset's
            seed and their place, so that seeds near one another would have nearly all entries in common.

    Raises:
        TasksetError: The dataset cannot be made, or none of its questions belongs to the split.
    """
    args = dict(config.dataset_args)
    seed = args.pop("seed", _drawn(seed))
    limit = config.limit or DEFAULT_LIMIT
    draws = MORE_DRAWS + limit * DRAWS[config.split]
    try:
        dataset = open_dataset(config.path, args, size=draws, seed=seed)
    except DatasetError as error:
        raise TasksetError(f"taskset {config.name!r}: {error}") from error
    origin = {"dataset": config.path, "args": args, "seed": seed}
    given = 0
    for index in range(draws):
        entry = _entry(config, dataset, index)
        if is_held_out(entry["question"]) == (config.split == "test"):
            yield f"{config.path}[{index}]", {**_travelling(entry), ORIGIN: origin}
            given += 1
        if given == limit:
            return
    if not given:
        raise TasksetError(
            f"taskset {config.name!r}: none of {draws} questions of {config.path!r} belongs to split {config.split!r}, "
            f"which has one in {HELD_OUT} of all different ones for test; let dataset_args allow more of them"
        )


def _entry(config: TasksetConfig, dataset: Dataset, index: int) -> dict[str, Any]:
    try:
        return dataset[index]
    except Exception as error:  # whatever the dataset raises for arguments that it has taken
        raise TasksetError(
            f"taskset {config.name!r}: dataset {config.path!r} makes no entry {index} with dataset_args "
            f"{dict(config.dataset_args)!r:.200}: {type(error).__name__}: {error}; use other dataset_args"
        ) from error


def _drawn(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"reasoning-gym/{seed}".encode()).digest()[:4], "big") >> 1


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to the split ``test``."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT == 0


def _travelling(value: Any) -> Any:
    """Return a value as it arrives in a message: lists for tuples, and texts as keys."""
    if isinstance(value, Mapping):
        return {str(key): _travelling(one) for key, one in value.items()}
    return [_travelling(one) for one in value] if isinstance(value, list | tuple) else value

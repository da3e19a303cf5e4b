"""Records of the procedural datasets of reasoning-gym, generated from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_mq.config import TasksetConfig
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.storage import RecordsConfig, Storage
from trinity_mq.rewards.reasoning_gym_scores import ORIGIN, Dataset, DatasetError, open_dataset

DEFAULT_LIMIT = 500
"""Number of records of a taskset without a limit: the default size of the datasets."""
HELD_OUT = 5
"""Share of held-out questions: 1 in 5, chosen by a hash of the text."""
DRAWS = {"train": 2, "test": 2 * HELD_OUT}
"""Maximum entries generated per record, by split, because a part of the entries belongs to the other split."""
MORE_DRAWS = 50
"""Entries generated in addition, so that a small number of records is reached too."""


class ReasoningGymStorage(Storage):
    """Storage of the datasets of reasoning-gym; ``path`` names the dataset."""

    def read(self, config: RecordsConfig, seed: int) -> Iterator[tuple[str, Any]]:
        """Return the records of a taskset, drawn with ``seed``."""
        assert isinstance(config, TasksetConfig)
        return _rows(config, seed)


def _rows(config: TasksetConfig, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a taskset, each with its place for messages: ``limit`` records (500 without a limit), or
    fewer if not enough generated questions belong to the split. Each record names its dataset under :data:`ORIGIN`.

    The split of a question is a function of its text: training and evaluation never share a question, even with
    different seeds.

    Args:
        config: Its ``path`` is the dataset; its ``dataset_args`` are the dataset's arguments and may also hold a
            ``seed``.
        seed: Seed of the run. If ``dataset_args`` has no seed, one is derived by a hash. Entries are a function of the
            sum of the dataset's seed and their position, so adjacent seeds would share nearly all entries.

    Raises:
        TasksetError: The dataset cannot be created, or none of its questions belongs to the split.
    """
    args = dict(config.dataset_args)
    seed = args.pop("seed", _derived_seed(seed))
    limit = config.limit or DEFAULT_LIMIT
    draws = MORE_DRAWS + limit * DRAWS[config.split]
    try:
        dataset = open_dataset(config.path, args, size=draws, seed=seed)
    except DatasetError as error:
        raise TasksetError(f"taskset {config.name!r}: {error}") from error
    origin = {"dataset": config.path, "args": args, "seed": seed}
    count = 0
    for index in range(draws):
        entry = _entry(config, dataset, index)
        if is_held_out(entry["question"]) == (config.split == "test"):
            yield f"{config.path}[{index}]", {**_message_value(entry), ORIGIN: origin}
            count += 1
        if count == limit:
            return
    if not count:
        raise TasksetError(
            f"taskset {config.name!r}: none of {draws} questions of {config.path!r} belongs to split "
            f"{config.split!r}; one in {HELD_OUT} of all different questions belongs to test. Choose dataset_args "
            "that allow more different questions"
        )


def _entry(config: TasksetConfig, dataset: Dataset, index: int) -> dict[str, Any]:
    try:
        return dataset[index]
    except Exception as error:  # a dataset may raise any error, even for arguments that it has accepted
        raise TasksetError(
            f"taskset {config.name!r}: dataset {config.path!r} makes no entry {index} with dataset_args "
            f"{dict(config.dataset_args)!r:.200}: {type(error).__name__}: {error}; use other dataset_args"
        ) from error


def _derived_seed(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"reasoning-gym/{seed}".encode()).digest()[:4], "big") >> 1


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to the split ``test``."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT == 0


def _message_value(value: Any) -> Any:
    """Return a value as it arrives in a message: tuples become lists, and keys become texts."""
    if isinstance(value, Mapping):
        return {str(key): _message_value(item) for key, item in value.items()}
    return [_message_value(item) for item in value] if isinstance(value, list | tuple) else value

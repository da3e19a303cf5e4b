"""Reward for tasks of reasoning-gym: each dataset scores answers itself, using only the record."""

from __future__ import annotations

import ast
import cmath
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Protocol, cast

import structlog

from trinity_mq.errors import suggest
from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.rewards.countdown import formula_value
from trinity_mq.rewards.registry import RewardError
from trinity_mq.rewards.text import last_boxed, last_tagged

log = structlog.get_logger(__name__)

EXTRA = "the package reasoning-gym, which is not installed: pip install 'trinity-mq[reasoning-gym]'"
ORIGIN = "reasoning_gym"
"""Record key of the source dataset: ``{"dataset": name, "args": {...}, "seed": 0}``."""

MAX_NUMBER = 100
"""Largest number of fields of a move in rush_hour, whose boards have 6 rows of 6 fields."""

REFUSED = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
"""Datasets whose scoring makes SymPy evaluate the answer as Python. No safe replacement exists here."""


class DatasetError(ValueError):
    """A dataset of reasoning-gym cannot be created. The message gives the reason and the remedy."""


class Dataset(Protocol):
    """The part of reasoning-gym's dataset interface that is used here."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an entry: question, answer and metadata."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return the score of an answer, from 0 to 1."""


def _formula(text: str, *_: Any, **__: Any) -> Fraction:
    return formula_value(text)


SAFE: dict[str, tuple[str, Callable[..., Any]]] = {
    "binary_matrix": ("eval", ast.literal_eval),
    "countdown": ("parse_expr", _formula),
    "n_queens": ("eval", ast.literal_eval),
    "number_sorting": ("eval", ast.literal_eval),
    "puzzle24": ("parse_expr", _formula),
    "spiral_matrix": ("eval", ast.literal_eval),
    "string_insertion": ("eval", ast.literal_eval),
}
"""Safe replacements by dataset: the name of the module's global that evaluates answers, and a function that reads
literals or formulas instead.
"""


def _bounded_fraction(text: str) -> Fraction:
    if _HUGE_POWER.search(text):
        raise ValueError("the power of ten is too large")
    return Fraction(text)


def _finite_complex(*parts: Any) -> complex:
    number = complex(*parts)
    if not cmath.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _small_int(text: str) -> int:
    number = int(text)
    if abs(number) > MAX_NUMBER:
        raise ValueError(f"{number} is too large")
    return number


_HUGE_POWER = re.compile(r"[eE][-+]?[\d_]{4}")
REPAIRED: dict[str, tuple[str, Callable[..., Any]]] = {
    "coin_flip": ("Fraction", _bounded_fraction),
    "complex_arithmetic": ("complex", _finite_complex),
    "game_of_life_halting": ("bool", str),
    "rush_hour": ("int", _small_int),
}
"""Replacements, in the form of :data:`SAFE`, for datasets that compute ``1e999999999`` or a move by ``A+999999999``
without end, or that give ``nan`` or any text the full score.
"""


@functools.cache
def registered_datasets() -> Mapping[str, tuple[type, type]]:
    """Return the class and the configuration class of every dataset by name. The functions of SAFE and REPAIRED are
    replaced.

    Raises:
        DatasetError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym  # noqa: F401  its import registers all
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DatasetError(f"datasets of reasoning-gym need {EXTRA}") from error
    for name, (attribute, replacement) in (SAFE | REPAIRED).items():
        setattr(sys.modules[DATASETS[name][0].__module__], attribute, replacement)
    return cast(Mapping[str, tuple[type, type]], DATASETS)


def open_dataset(name: str, args: Mapping[str, Any], *, size: int = 1, seed: int = 0) -> Dataset:
    """Return a dataset of reasoning-gym.

    Args:
        name: Its registered name.
        args: Fields of its configuration, except ``size`` and ``seed``.
        size: Number of entries.
        seed: Seed that determines the entries.

    Raises:
        DatasetError: reasoning-gym is not installed, the dataset does not exist or does not take these arguments, or
            its scoring would evaluate text of a model as code.
    """
    kind, configuration = _dataset_class(name)
    fields = {field.name for field in dataclasses.fields(configuration)} - {"size", "seed"}
    for unknown in args.keys() - fields:
        if unknown == "size":
            raise DatasetError("dataset_args.size does not exist: limit of the taskset is the number of records")
        hint = suggest(str(unknown), sorted(fields))
        raise DatasetError(f"dataset_args.{unknown} does not exist in dataset {name!r}; {hint}")
    fields_by_name = dict(args)
    if name == "composite":
        fields_by_name["datasets"] = _parts(fields_by_name.get("datasets"))
    try:
        made = configuration(**fields_by_name, size=size, seed=seed)
        if hasattr(made, "validate"):
            made.validate()
        return cast(Dataset, kind(config=made))
    except Exception as error:  # datasets raise various errors, mostly assertions with a text
        raise DatasetError(
            f"dataset {name!r} does not take dataset_args {dict(args)!r:.200}: {str(error) or type(error).__name__}; "
            f"it has {', '.join(sorted(fields))}"
        ) from error


def _dataset_class(name: str) -> tuple[type, Any]:
    datasets = registered_datasets()
    if name in REFUSED:
        raise DatasetError(
            f"dataset {name!r} scores by having SymPy evaluate the answer as Python code, and nothing that a model "
            "wrote is executed here; use another dataset, or write its questions into a file and score them with "
            "accuracy_reward"
        )
    if name not in datasets:
        hint = suggest(name, sorted(datasets), count=3, cutoff=0.5)
        raise DatasetError(f"reasoning-gym has no dataset {name!r}; {hint}")
    return datasets[name]


def _parts(specs: object) -> list[Any]:
    """Return the parts of a composite dataset, each checked like a single dataset."""
    from reasoning_gym.composite import DatasetSpec

    if not isinstance(specs, list) or not specs or not all(isinstance(spec, Mapping) for spec in specs):
        raise DatasetError(
            f"dataset_args.datasets of 'composite' is {specs!r:.80}; wanted a list such as "
            "[{name: chain_sum, weight: 1, config: {max_terms: 3}}]"
        )
    for spec in specs:
        _dataset_class(str(spec.get("name")))
        if unknown := spec.keys() - {"name", "weight", "config"}:
            raise DatasetError(f"dataset_args.datasets: {min(map(str, unknown))!r} is not one of name, weight, config")
    return [DatasetSpec(spec["name"], spec.get("weight", 1.0), dict(spec.get("config", {}))) for spec in specs]


@functools.lru_cache(maxsize=32)
def _scorer(name: str, args: str) -> Dataset:
    return open_dataset(name, json.loads(args))


def reasoning_gym_reward(
    response: str,
    truth: str | None,
    *,
    finished: bool,
    record: Mapping[str, Any] | None = None,
    prompt_end: str | None = None,
) -> dict[str, float]:
    r"""Return accuracy 1 for an answer with the dataset's full score, else the score as ``partial_credit``.

    The answer is, after the thoughts, the last ``<answer></answer>``, else the last ``\boxed{}``, else all the text
    there if the response ended by itself. Some datasets give a small score for any answer. Text of a model is never
    executed.

    Args:
        response: The text of the response.
        truth: Ignored: the record defines the right answer.
        finished: Whether the response ended by itself.
        record: The task's record, from a taskset of ``storage_type: reasoning_gym``.
        prompt_end: The prompt, or its last characters, which may open the thoughts. None: unknown.

    Raises:
        RewardError: The record does not come from such a taskset, or the dataset cannot be created.
    """
    name, args, entry = _origin(record)
    response = after_thoughts(response, prompt_end)
    stated = last_tagged(response) or last_boxed(response)
    if stated is None and not finished:
        return {"accuracy": 0.0, "partial_credit": 0.0}
    answer = (stated[1] if stated else response).strip()
    try:
        dataset = _scorer(name, json.dumps(args, sort_keys=True))
    except DatasetError as error:
        raise RewardError(f"reasoning_gym_reward: {error}") from error
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:  # some datasets raise an error for an answer in an unexpected format
        log.debug("answer_not_scored", dataset=name, error=f"{type(error).__name__}: {error}")
        score = 0.0
    return {"accuracy": 1.0, "partial_credit": 0.0} if score >= 1.0 else {"accuracy": 0.0, "partial_credit": score}


def _origin(record: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
    """Return the name of a record's dataset, the dataset's arguments, and the entry for scoring."""
    match record:
        case {"reasoning_gym": {"dataset": str(name), "args": Mapping() as args}, "metadata": Mapping()} if record:
            return name, args, {key: record.get(key) for key in ("question", "answer", "metadata")}
    keys = ", ".join(map(str, record)) if record is not None else "none"
    raise RewardError(
        "reasoning_gym_reward needs the task's record, with metadata and reasoning_gym: {dataset, args}, and its keys "
        f"are: {keys}; use a taskset of storage_type: reasoning_gym, and a workflow that hands records to rewards, "
        "such as async_simple_workflow"
    )

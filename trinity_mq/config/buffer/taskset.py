"""Tasksets: sources of tasks, for training and for evaluation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from trinity_mq.config.base import Section
from trinity_mq.config.buffer.selectors import LEARNING, SIMPLE, SelectorConfig, SelectorPlugin


def check_query(name: str, storage_type: str, query: str) -> None:
    """Check that a database source has a query and every other source has none.

    Raises:
        ValueError: A query is missing or not allowed.
    """
    if (storage_type == "sql") != bool(query):
        raise ValueError(
            f"{name!r} of storage_type sql needs a query: a table's name, or a SELECT statement with an ORDER BY"
            if not query
            else (
                f"{name!r} has a query and storage_type {storage_type}, which reads no database: set storage_type to "
                "sql"
            )
        )


class FormatConfig(Section):
    """Keys of the parts of a record."""

    prompt_key: str = "question"
    """Key of the prompt."""
    response_key: str = "answer"
    """Key of the expected answer."""
    system_prompt: str | None = None
    """System prompt of all tasks. None: no system prompt."""


class TasksetConfig(Section):
    """A source of tasks.

    ``file``: the file at ``path``, JSON lines (``.jsonl``, ``.ndjson``), a JSON list (``.json``), CSV with names in its
    first line (``.csv``, ``.tsv``) or Parquet (``.parquet``, extra ``parquet``). ``huggingface``: a dataset folder or
    hub id at ``path`` (extra ``datasets``). ``synthetic``: problems of the generator named ``path``, such as ``ops3``,
    without any file. ``sql``: the rows of ``query`` in the database at the URL ``path`` (extra ``sql``), such as
    ``sqlite:///tasks.db``. ``reasoning_gym``: the dataset of reasoning-gym named ``path``, such as ``chain_sum`` (extra
    ``reasoning-gym``), drawn with the run's seed. ``queue``: tasks submitted from outside.
    """

    name: str = "train"
    """Name in metrics and messages."""
    storage_type: Literal["file", "huggingface", "sql", "synthetic", "reasoning_gym", "queue"] = "file"
    """Kind of the source."""
    path: str = ""
    """File, dataset, database or generator, by ``storage_type``."""
    query: str = ""
    """sql: a table's name, or a SELECT statement with an ORDER BY, since positions in the taskset are row numbers."""
    subset_name: str | None = None
    """huggingface: name of the dataset's configuration. None: its default."""
    split: str = "train"
    """huggingface, synthetic: split of the dataset. reasoning_gym: ``test`` contains a fifth of all questions,
    ``train`` the others."""
    dataset_args: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: settings of the dataset, such as ``max_terms``, and ``seed``, which overrides the run's seed."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of records to read. None: all; reasoning_gym: 500."""
    selector: Literal["sequential", "shuffle", "random"] = "shuffle"
    """Order of the records: ``sequential`` as stored, ``shuffle`` shuffled by ``seed`` in each epoch, or ``random``
    draws."""
    data_selector: SelectorConfig | None = None
    """A selector with settings, instead of ``selector``; only for training tasksets. None: only ``selector`` counts."""
    ratio: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Share of the tasks that come from this member of ``buffer.tasksets``, relative to the others. None: by its size.
    """
    format: FormatConfig = Field(default_factory=FormatConfig)
    """Keys of the parts of a record."""
    workflow: str = "async_simple_workflow"
    """Registered name or dotted path of the workflow."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the workflow."""
    reward_fn: str = ""
    """Registered name or dotted path of the reward function. Empty: the workflow's own; with reasoning_gym:
    ``reasoning_gym_reward``."""
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    rollout_args: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters that override the parameters of ``explorer.rollout_model``."""
    repeat_times: int = Field(default=1, ge=1)
    """Number of runs of each task, for evaluation tasksets only; training uses ``algorithm.repeat_times``."""

    @model_validator(mode="before")
    @classmethod
    def _default_reward_fn(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("storage_type") == "reasoning_gym" and not data.get("reward_fn"):
            return {**data, "reward_fn": "reasoning_gym_reward"}
        return data

    @model_validator(mode="after")
    def _one_selector(self) -> TasksetConfig:
        if self.data_selector is None:
            return self
        kinds = self.selector, self.data_selector.selector_type
        if self.selector not in {"shuffle", kinds[1]}:  # the default may be explicit in a dumped section
            raise ValueError(
                f"taskset {self.name!r} has selector {kinds[0]!r} and data_selector {kinds[1]!r}; remove one of them"
            )
        if self.storage_type == "queue":
            raise ValueError(f"taskset {self.name!r} is fed by submitted tasks: remove data_selector")
        return self

    @property
    def effective_selector(self) -> SelectorConfig:
        """The selector with its settings."""
        return self.data_selector or SIMPLE[self.selector]()

    @property
    def learns(self) -> bool:
        """Whether the selector receives the rewards of finished tasks."""
        chosen = self.effective_selector
        return isinstance(chosen, SelectorPlugin) or chosen.selector_type in LEARNING

    @model_validator(mode="after")
    def _path(self) -> TasksetConfig:
        if self.storage_type != "queue" and not self.path:
            raise ValueError(f"taskset {self.name!r} of storage_type {self.storage_type!r} needs a path")
        check_query(self.name, self.storage_type, self.query)
        if self.storage_type == "reasoning_gym" and self.split not in {"train", "test"}:
            raise ValueError(f"taskset {self.name!r} has split {self.split!r}; reasoning_gym has 'train' and 'test'")
        if self.dataset_args and self.storage_type != "reasoning_gym":
            raise ValueError(
                f"taskset {self.name!r} has dataset_args and storage_type {self.storage_type}, which takes no "
                "dataset_args: set storage_type to reasoning_gym, or remove dataset_args"
            )
        return self

"""Tasksets: sources of tasks, for training and for evaluation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section
from trinity_mq.config.buffer.selectors import LEARNING, SIMPLE, SelectorConfig, SelectorPlugin
from trinity_mq.config.buffer.storages import StorageRow, TaskStorage, check_source, storage_row
from trinity_mq.config.switches import check_switch_fields


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
    storage_type: TaskStorage = "file"
    """Kind of the source. A dotted path names your own, a subclass of ``trinity_mq.data.Storage``."""
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
    """reasoning_gym: settings of the dataset, such as ``max_terms``, and ``seed``, which overrides the run's seed. A
    storage of your own: its settings."""
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
    """Sampling parameters that override the parameters of ``explorer.rollout_model``. ``chat_template_kwargs``,
    ``enable_thinking`` and ``reasoning_effort`` override ``model.chat_template_kwargs``."""
    repeat_times: int = Field(default=1, ge=1)
    """Number of runs of each task, for evaluation tasksets only; training uses ``algorithm.repeat_times``."""

    @model_validator(mode="before")
    @classmethod
    def _default_reward_fn(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("reward_fn"):
            default = storage_row(str(data.get("storage_type"))).reward_fn
            return {**data, "reward_fn": default} if default else data
        return data

    @field_validator("rollout_args")
    @classmethod
    def _check_switches(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_switch_fields(value)
        return value

    @model_validator(mode="after")
    def _one_selector(self) -> TasksetConfig:
        if self.data_selector is None:
            return self
        kinds = self.selector, self.data_selector.selector_type
        if self.selector not in {"shuffle", kinds[1]}:  # the default may be explicit in a dumped section
            raise ValueError(
                f"taskset {self.name!r} has selector {kinds[0]!r} and data_selector {kinds[1]!r}; remove one of them"
            )
        if not self.storage.holds_records:
            raise ValueError(f"taskset {self.name!r} is fed by submitted tasks: remove data_selector")
        return self

    @property
    def storage(self) -> StorageRow:
        """Facts about the storage."""
        return storage_row(self.storage_type)

    @property
    def required_keys(self) -> dict[str, str]:
        """Keys that every record must have, by the name of the setting that gives the key. A storage with a reward
        function of its own may have records without a single right answer.
        """
        keys = {"prompt_key": self.format.prompt_key, "response_key": self.format.response_key}
        return {"prompt_key": keys["prompt_key"]} if self.storage.reward_fn else keys

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
        check_source("taskset ", self.name, self.storage_type, self.path, self.query)
        if (splits := self.storage.splits) and self.split not in splits:
            names = " and ".join(map(repr, splits))
            raise ValueError(f"taskset {self.name!r} has split {self.split!r}; {self.storage_type} has {names}")
        if self.dataset_args and not self.storage.takes_args:
            raise ValueError(
                f"taskset {self.name!r} has dataset_args and storage_type {self.storage_type}, which takes no "
                "dataset_args: set storage_type to reasoning_gym, or remove dataset_args"
            )
        return self

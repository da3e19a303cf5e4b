"""Tasksets: sources of tasks, for training and for evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section
from trinity_mq.config.buffer.selectors import LEARNING, SIMPLE, SelectorConfig, SelectorPlugin
from trinity_mq.config.buffer.storages import StorageRow, TaskStorage, check_source, storage_row
from trinity_mq.config.switches import ENABLE_THINKING, check_switch_fields, says_thinking

RELEASED_KEYS = {"prompt_key", "response_key", "system_prompt"}
"""Keys of ``format_args`` that the agents of all releases read."""
PROMPTED_WORKFLOWS = frozenset(
    f"{name}_workflow"
    for name in (
        *("simple", "math", "math_boxed", "math_eval", "math_rm", "math_ruler", "math_trainable_ruler"),
        *("on_policy_distill", "on_policy_distill_math", "rubric_judge", "ruler", "tool_agent"),
        *("math_answer", "boxed_answer", "math_benchmark", "reward_model", "math_answer_ruler", "self_ruler", "rubric"),
        *("distill", "math_distill", "tool_choice"),
    )
)
"""Built-in workflows, each also with the prefix ``async_``, that send the prompt of a record to the model and judge by
the record's answer."""
MIN_TOKENS, MIN_RESPONSE_TOKENS = "min_tokens", "min_response_tokens"
"""A sampling parameter of engines, and Trinity-RFT's name for it."""
_REGISTERED = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""Pattern of registered names. Paths of modules and files contain other characters."""


def sampling_parameters(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the sampling parameters that are set, under the names of the engines.

    Raises:
        ValueError: A parameter is given twice with different values.
    """
    parameters = dict(values)
    if MIN_RESPONSE_TOKENS in parameters:
        least = parameters.pop(MIN_RESPONSE_TOKENS)
        if least is not None and parameters.setdefault(MIN_TOKENS, least) != least:
            raise ValueError(
                f"{MIN_TOKENS} is {parameters[MIN_TOKENS]!r} and {MIN_RESPONSE_TOKENS}, which is the same, {least!r}: "
                "remove one of them"
            )
    if any(value is None for value in parameters.values()):
        return {name: value for name, value in parameters.items() if value is not None}
    return parameters


def registered_name(name: Any) -> str:
    """Return ``name`` if it can be a registered name.

    Raises:
        ValueError: It is not a name, or it is the path of a module or a file.
    """
    if not isinstance(name, str) or not _REGISTERED.fullmatch(name):
        raise ValueError(f"{name!r:.120} is no registered name; registered names have only letters, digits, _ and -")
    return name


class FormatConfig(Section):
    """Keys of the parts of a record, and texts around the prompt; the field names are Trinity-RFT's."""

    prompt_key: str = "question"
    """Key of the prompt."""
    response_key: str = "answer"
    """Key of the expected answer."""
    system_prompt: str | None = None
    """System prompt of all tasks. None: no system prompt."""
    system_prompt_key: str | None = None
    """Key of a record's own system prompt, which overrides ``system_prompt``. Records without a text at this key have
    ``system_prompt``."""
    reply_prefix: str | None = None
    """Text with which each answer begins. It is a part of the prompt: it is not sampled, not trained on, and not a part
    of the text that reward functions read."""
    workflow_key: str = ""
    """Key at which a record names its workflow: the taskset's ``workflow``, or a name in ``allowed_workflows``. Records
    without a name run ``workflow``. Empty: all records run ``workflow``."""
    reward_fn_key: str = ""
    """Key at which a record names its reward function: the taskset's ``reward_fn``, or a name in
    ``allowed_reward_fns``. Records without a name use ``reward_fn``. Empty: all records use ``reward_fn``."""
    enable_thinking: bool | None = None
    """Whether the model thinks before its answer, as ``rollout_args.enable_thinking``. None: ``rollout_args`` and
    ``model.chat_template_kwargs`` decide."""

    def as_args(self) -> dict[str, Any]:
        """Return the keys as ``format_args`` of a task. Keys that agents of earlier releases do not know are left out
        unless they are set.
        """
        return self.model_dump(include=RELEASED_KEYS) | self.model_dump(exclude=RELEASED_KEYS, exclude_defaults=True)


def system_prompt_of(record: Mapping[str, Any], key: str | None) -> str | None:
    """Return a record's own system prompt, or None.

    Raises:
        ValueError: The value at ``key`` is not a text.
    """
    text = record.get(key) if key else None
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{key!r} holds a {type(text).__name__}, wanted the text of the system prompt")
    return text or None


def _chosen(record: Mapping[str, Any], key: str, names: Sequence[str], setting: str) -> str:
    name = record.get(key) if key else None
    if name is None or name == "":
        return names[0]
    if registered_name(name) not in names:
        allowed = ", ".join(filter(None, names)) or "no name"
        raise ValueError(
            f"{key!r} is {name!r}, and records of this taskset may name {allowed}; correct the record, or list the "
            f"name in {setting} of the taskset"
        )
    return str(name)


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
    """Kind of the source. A dotted path names your own class, a subclass of ``trinity_mq.data.Storage``."""
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
    allowed_workflows: tuple[str, ...] = ()
    """Further workflows that records may name under ``format.workflow_key``, by registered name. A record cannot name
    the path of a module or a file. ``workflow_args`` applies to all of them."""
    reward_fn: str = ""
    """Registered name or dotted path of the reward function. Empty: the workflow's own; with reasoning_gym:
    ``reasoning_gym_reward``."""
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    allowed_reward_fns: tuple[str, ...] = ()
    """Further reward functions that records may name under ``format.reward_fn_key``, by registered name.
    ``reward_fn_args`` applies to all of them."""
    rollout_args: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters that override the parameters of ``explorer.rollout_model``. ``chat_template_kwargs``,
    ``enable_thinking`` and ``reasoning_effort`` override ``model.chat_template_kwargs``. ``min_response_tokens`` is
    Trinity-RFT's name for ``min_tokens``."""
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
    def _check_rollout_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_switch_fields(value)
        return sampling_parameters(value)

    @field_validator("allowed_workflows", "allowed_reward_fns")
    @classmethod
    def _check_registered_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(registered_name, value))

    @model_validator(mode="after")
    def _check_thinking(self) -> TasksetConfig:
        if self.format.enable_thinking is not None and says_thinking(self.rollout_args):
            raise ValueError(
                f"taskset {self.name!r} switches thinking in format.enable_thinking and in rollout_args: remove one of "
                "them"
            )
        return self

    @model_validator(mode="after")
    def _check_allowed_names(self) -> TasksetConfig:
        for names, key in (("allowed_workflows", "workflow_key"), ("allowed_reward_fns", "reward_fn_key")):
            if getattr(self, names) and not getattr(self.format, key):
                raise ValueError(
                    f"taskset {self.name!r} has {names}, which records name under format.{key}: set format.{key}, or "
                    f"remove {names}"
                )
        return self

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
        function of its own may have records without a single right answer. The records of environments and of your own
        workflows may have any keys.
        """
        if not any(name.removeprefix("async_") in PROMPTED_WORKFLOWS for name in self.workflows):
            return {}
        keys = {"prompt_key": self.format.prompt_key, "response_key": self.format.response_key}
        return {"prompt_key": keys["prompt_key"]} if self.storage.reward_fn else keys

    @property
    def task_rollout_args(self) -> dict[str, Any]:
        """``rollout_args`` of the tasks, including ``format.enable_thinking`` if it is set."""
        thinking = self.format.enable_thinking
        return self.rollout_args if thinking is None else {**self.rollout_args, ENABLE_THINKING: thinking}

    @property
    def workflows(self) -> tuple[str, ...]:
        """Names of the workflows of the tasks."""
        return tuple(dict.fromkeys((self.workflow, *self.allowed_workflows)))

    @property
    def reward_fns(self) -> tuple[str, ...]:
        """Names of the reward functions of the tasks. An empty name stands for the workflow's own."""
        return tuple(dict.fromkeys((self.reward_fn, *self.allowed_reward_fns)))

    def workflow_of(self, record: Mapping[str, Any]) -> str:
        """Return the name of the workflow of a record.

        Raises:
            ValueError: The record names a workflow that records may not name.
        """
        return _chosen(record, self.format.workflow_key, self.workflows, "allowed_workflows")

    def reward_fn_of(self, record: Mapping[str, Any]) -> str:
        """Return the name of the reward function of a record, empty for the workflow's own.

        Raises:
            ValueError: The record names a reward function that records may not name.
        """
        return _chosen(record, self.format.reward_fn_key, self.reward_fns, "allowed_reward_fns")

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Check the parts of a record that its task needs in addition to the required keys.

        Raises:
            ValueError: The record names a workflow or reward function that records may not name, or its system prompt
                is not a text.
        """
        self.workflow_of(record)
        self.reward_fn_of(record)
        system_prompt_of(record, self.format.system_prompt_key)

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

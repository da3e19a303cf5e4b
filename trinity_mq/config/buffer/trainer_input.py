"""The data that the trainer trains on: the stream of processed rollouts, or existing records."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trinity_mq.config.base import NameIn, Section
from trinity_mq.config.buffer.replay import ReplayConfig
from trinity_mq.config.buffer.storages import StorageRow, TrainingStorage, check_source, storage_row
from trinity_mq.config.switches import ENABLE_THINKING

SCHEMAS = ("experience", "sft", "dpo", "cpt")
"""Built-in kinds of records."""
Schema = Annotated[str, AfterValidator(NameIn("schema_type", SCHEMAS, "trinity_mq.formatters"))]


class RecordFormatConfig(Section):
    """Keys of the parts of a record; the field names are Trinity-RFT's."""

    prompt_type: Literal["plaintext", "messages"] = "plaintext"
    """``plaintext``: prompt and answers are texts. ``messages``: prompt and answers are lists of chat messages."""
    prompt_key: str = "question"
    """plaintext: key of the prompt; with ``cpt`` the key of the whole text."""
    response_key: str = "answer"
    """plaintext, ``sft``: key of the answer to imitate."""
    system_prompt: str | None = None
    """plaintext: system prompt of all records. None: no system prompt."""
    system_prompt_key: str | None = None
    """plaintext: key of a record's own system prompt, which overrides ``system_prompt``."""
    messages_key: str = "messages"
    """messages: key of the conversation; with ``dpo`` the key of the prompt."""
    tools_key: str = "tools"
    """messages: key of the tools offered in the conversation, a list or JSON text. Records without this key offer no
    tools."""
    enable_concatenated_multi_turn: bool = False
    """messages, ``sft``: imitate every assistant turn of the conversation, not only the last message."""
    chosen_key: str = "chosen"
    """``dpo``: key of the preferred answer, a text or a list of messages."""
    rejected_key: str = "rejected"
    """``dpo``: key of the rejected answer."""
    chat_template: str | None = None
    """Chat template of these records, as Jinja text. None: the template of the model."""
    enable_thinking: bool | None = None
    """Whether the chat template writes these records as answers with thoughts. None: ``model.chat_template_kwargs``
    decides."""

    @property
    def switches(self) -> dict[str, Any]:
        """Switches of the chat template, as in a request."""
        return {} if self.enable_thinking is None else {ENABLE_THINKING: self.enable_thinking}


class ExperienceBufferConfig(Section):
    """Data of the trainer.

    ``stream``: rollouts, as processed by the operators. All other types read records. ``file``: the file at ``path``
    (JSON lines, a JSON list, CSV, Parquet; with schema ``experience`` a ``.tmqx`` file or a folder of such files).
    ``huggingface``: a dataset folder or hub id. ``sql``: the rows of ``query`` in the database at the URL ``path``
    (extra ``sql``). ``synthetic``: the generator named ``path``, such as ``ops3``.
    """

    name: str = "train"
    """Name in metrics and errors."""
    storage_type: TrainingStorage = "stream"
    """Kind of the source. A dotted path names your own class, a subclass of ``trinity_mq.data.Storage``."""
    schema_type: Schema = "experience"
    """Kind of record. ``sft``: a prompt and an answer to imitate. ``dpo``: a prompt, a chosen and a rejected answer.
    ``cpt``: a text. ``experience``: a rollout recorded earlier, with its advantages. The dotted path of a class in
    Trinity-RFT's form (``ExperienceFormatter``), or the name under which a module in ``plugin_dirs`` registers it with
    ``FORMATTER``: a record of your own."""
    path: str = ""
    """File, folder, dataset, database or generator, by ``storage_type``."""
    query: str = ""
    """sql: a table's name, or a SELECT statement with an ORDER BY, since positions in the data are row numbers."""
    subset_name: str | None = None
    """huggingface: name of the dataset's configuration. None: its default."""
    split: str = "train"
    """huggingface, synthetic: split of the dataset."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of records to read. None: all."""
    selector: Literal["sequential", "shuffle"] = "shuffle"
    """Order of the records: ``sequential`` as stored, or ``shuffle`` shuffled by ``seed`` in each epoch."""
    format: RecordFormatConfig = Field(default_factory=RecordFormatConfig)
    """Keys of the parts of a record."""
    too_long: Literal["skip", "cut"] = "skip"
    """Treatment of records with more tokens than ``model.max_model_len``: ``skip`` leaves them out, ``cut`` cuts their
    answers. A record whose prompt leaves no room for a trained token is always left out. The metric ``data/too_long``
    counts records that were left out or cut."""

    @model_validator(mode="after")
    def _path(self) -> ExperienceBufferConfig:
        check_source("", self.name, self.storage_type, self.path, self.query)
        if not self.storage.holds_records and self.schema_type != "experience":
            raise ValueError(
                f"schema_type is {self.schema_type} and storage_type stream, which holds rollouts: set storage_type to "
                "file, huggingface, sql or synthetic, and path"
            )
        if self.schema_type == "experience" and not self.storage.holds_experiences:
            raise ValueError(
                f"schema_type experience reads .tmqx files, and storage_type is {self.storage_type}: set it to file"
            )
        return self

    @property
    def storage(self) -> StorageRow:
        """Facts about the storage."""
        return storage_row(self.storage_type)

    @property
    def required_keys(self) -> dict[str, str]:
        """Keys that every record of ``schema_type`` sft, dpo or cpt must have, by the name of the setting that gives
        the key. Empty for records of your own.
        """
        keys = self.format
        if self.schema_type not in SCHEMAS:
            return {}
        if self.schema_type == "cpt":
            return {"prompt_key": keys.prompt_key}
        as_messages = keys.prompt_type == "messages"
        prompt = {"messages_key": keys.messages_key} if as_messages else {"prompt_key": keys.prompt_key}
        if self.schema_type == "dpo":
            return prompt | {"chosen_key": keys.chosen_key, "rejected_key": keys.rejected_key}
        return prompt if as_messages else prompt | {"response_key": keys.response_key}


class TrainerInputConfig(Section):
    """Input of the trainer."""

    experience_buffer: ExperienceBufferConfig = Field(default_factory=ExperienceBufferConfig)
    """The data of each train step."""
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = Field(default_factory=dict)
    """Modes ``both`` and ``serve``: expert answers that are added to the rollouts, by name; at most one source, of
    ``schema_type`` ``sft`` or with records of your own. The algorithm imitates them: ``mix``, ``mix_chord``, or any
    algorithm with a weight for ``ce``."""
    expert_data_ratio: float = Field(default=0.2, gt=0, lt=1)
    """Share of the expert answers among all experiences of a train step without missing rollouts. Their number is the
    same in every step and is added to the rollouts."""

    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Modes ``both`` and ``serve``: groups of earlier train steps that are added to the fresh groups."""

    @model_validator(mode="after")
    def _experts(self) -> TrainerInputConfig:
        for name, data in self.auxiliary_buffers.items():
            if data.schema_type in {"experience", "dpo", "cpt"} or not data.storage.holds_records:
                raise ValueError(
                    f"auxiliary buffer {name!r} has schema_type {data.schema_type} and storage_type "
                    f"{data.storage_type}; wanted answers to imitate: schema_type sft from file, huggingface, sql or "
                    "synthetic"
                )
        if len(self.auxiliary_buffers) > 1:
            raise ValueError(
                f"auxiliary_buffers are {', '.join(self.auxiliary_buffers)}, wanted at most one: put their records "
                "into one source"
            )
        return self

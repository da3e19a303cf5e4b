"""The section of the weight sync: when weights travel, by what, and how long anyone waits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section

SyncMethod = Literal["collective", "checkpoint", "memory"]
PullMethod = Literal["memory", "checkpoint"]
PauseMode = Literal["wait", "keep", "abort"]
SyncStyle = Literal["fixed", "trainer_driven", "explorer_driven", "fully_async"]

OTHER_NAMES: dict[str, SyncStyle] = {"dynamic_by_trainer": "trainer_driven", "dynamic_by_explorer": "explorer_driven"}


class SyncConfig(Section):
    """When weights travel and how long anyone waits (learning.md section 1)."""

    sync_method: SyncMethod = "collective"
    """``collective``: a broadcast from the trainer to all engines at once, ``backend`` says by what. ``checkpoint``:
    safetensors files below ``checkpoint_path``, which trainer and engines reach. ``memory``: each engine streams them
    over HTTP from a copy in the trainer's host memory. ``nccl`` is taken for ``collective`` with that backend."""
    sync_style: SyncStyle = "fixed"
    """Who starts a sync, and what the explorer waits for. ``fixed``: the trainer, when it has consumed a multiple of
    ``sync_interval`` batches; the explorer opens no batch before the weights it is due (1 and offset 0: on-policy).
    ``trainer_driven``: the trainer, every ``sync_interval`` of its steps; the explorer does not wait for weights.
    ``explorer_driven``: every ``sync_interval`` batches the explorer asks for the newest weights and waits for them.
    ``fully_async``: as trainer_driven, and requests in flight go on under the new weights. ``dynamic_by_trainer`` and
    ``dynamic_by_explorer`` are taken for the middle two."""
    sync_interval: int = Field(default=1, ge=1)
    sync_offset: int = Field(default=0, ge=0)
    """Batches that the explorer opens beyond the interval before it waits; of style fixed only."""
    pipeline_depth: int = Field(default=1, ge=0)
    """How far the explorer runs ahead in the styles other than fixed, in batches not yet consumed."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Oldest fit to train on, in steps of the trainer, by the oldest token of a group: a hard bound when the batch is
    trained. None: what the style makes by itself where batches are trained in the order in which they were opened."""
    stale: Literal["drop", "requeue"] = "drop"
    """Groups beyond ``max_staleness``: ``drop`` them, or give their tasks back to the explorer, which puts them at the
    head of its next batch (``requeue``; a task at most once)."""
    pause_mode: PauseMode | None = None
    """Requests in flight when weights come: ``wait`` for them to end, ``keep`` them (they go on under the new weights,
    each token stamped with its own version) or ``abort`` them (they begin anew). None: ``keep`` under fully_async, else
    ``wait``."""
    request_timeout: float = Field(default=1800.0, gt=0)
    """Seconds the explorer waits for weights it has asked for (explorer_driven) while a trainer lives; then the run
    ends with an error, its state saved. A train step must fit in."""
    sync_timeout: float = Field(default=60.0, gt=0)
    """Seconds for each phase of one try."""
    member_lease: float = Field(default=15.0, gt=0)
    """Seconds without a join event until a member counts as gone."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What carries the broadcast: ``gloo`` over host memory, everywhere; ``nccl`` where the trainer and every engine
    have a GPU of their own."""
    bucket_bytes: int = Field(default=64 * 1024**2, ge=1024)
    """Size of one broadcast, of one shard of a checkpoint, and of one piece that is streamed."""
    host: str = "127.0.0.1"
    """Where the trainer's rendezvous and its server of weights listen: an address of its machine that engines reach."""
    checkpoint_path: str = ""
    """Folder or fsspec URL (such as ``s3://bucket/weights``) below which weights that travel as files are, in a folder
    of the run's name. Empty: ``weights`` in the run folder. What the trainer resumes from is in ``checkpoints``."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """Versions that stay there: the newest, whose files an engine may be reading, and those before it."""
    pull: PullMethod | None = None
    """Where an engine that lost its weights, or came late, gets the last committed ones from, at once, if
    ``sync_method`` is ``collective``. ``memory``, the default: a copy that the trainer keeps in host memory.
    ``checkpoint``: files below ``checkpoint_path``, written before each broadcast. The other methods are themselves
    where it gets them from."""

    @model_validator(mode="before")
    @classmethod
    def _reference_names(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(style := data.get("sync_style"), str) and style in OTHER_NAMES:
            data = {**data, "sync_style": OTHER_NAMES[style]}
        if isinstance(data, dict) and data.get("sync_method") == "nccl":
            if (backend := data.get("backend", "nccl")) != "nccl":
                raise ValueError(f"sync_method is 'nccl', but backend is {backend!r}; set sync_method: collective")
            return {**data, "sync_method": "collective", "backend": "nccl"}
        return data

    @field_validator("checkpoint_path")
    @classmethod
    def _no_slash(cls, value: str) -> str:
        return value.rstrip("/") if len(value) > 1 else value

    @property
    def pull_method(self) -> PullMethod:
        """``pull`` with its default filled in."""
        if self.pull is not None:
            return self.pull
        return "memory" if self.sync_method == "collective" else self.sync_method

    @model_validator(mode="after")
    def _one_source(self) -> SyncConfig:
        if self.pull is not None and self.sync_method not in {"collective", self.pull}:
            raise ValueError(
                f"pull is {self.pull!r}, but weights travel by {self.sync_method} and are pulled from there too; "
                "remove it"
            )
        return self

    @property
    def effective_pause_mode(self) -> PauseMode:
        """``pause_mode`` with its default filled in."""
        return self.pause_mode or ("keep" if self.sync_style == "fully_async" else "wait")

    @property
    def inherent_staleness(self) -> int:
        """Largest staleness that the style makes by itself, in steps, of batches trained in the order of their opening.

        The first token of batch b may be sampled as soon as b is opened. Under ``fixed`` the weights are then at most
        ``sync_interval - 1 + sync_offset`` batches behind b. In the others b is opened at a progress of at least
        b - 1 - ``pipeline_depth``, on weights that lack at most ``sync_interval`` of those steps (all of them where the
        commit follows right behind the opening); ``explorer_driven`` opens the first of ``sync_interval`` batches on
        the newest ones.
        """
        if self.sync_style == "fixed":
            return self.sync_interval - 1 + self.sync_offset
        return self.pipeline_depth + self.sync_interval - (self.sync_style == "explorer_driven")

    @property
    def effective_max_staleness(self) -> int:
        """``max_staleness`` with its default filled in."""
        return self.inherent_staleness if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _staleness(self) -> SyncConfig:
        if self.sync_style != "fixed":
            if self.sync_offset:
                raise ValueError(
                    f"sync_offset is {self.sync_offset}, but sync_style is {self.sync_style!r}, which knows none: "
                    "pipeline_depth says how far the explorer runs ahead there; remove sync_offset"
                )
            least = self.sync_interval - 1
            if self.sync_style != "explorer_driven" and self.effective_max_staleness < least:
                raise ValueError(
                    f"max_staleness is {self.max_staleness}, but the trainer sends weights every {self.sync_interval} "
                    f"steps (sync_interval): after {self.effective_max_staleness + 1} of them all data would be too "
                    f"old, and no further step be made. Set max_staleness to at least {least}, or sync more often"
                )
            return self
        if self.max_staleness is not None and self.max_staleness < self.inherent_staleness:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, but sync_interval {self.sync_interval} and sync_offset "
                f"{self.sync_offset} make "
                f"data up to {self.inherent_staleness} steps old: every such batch would be dropped"
            )
        return self

"""The section of the weight sync: its channel, its schedule and its timeouts."""

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
    """Channel, schedule and timeouts of weight syncs (docs/learning.md)."""

    sync_method: SyncMethod = "collective"
    """``collective``: a broadcast from the trainer to all engines at once, over ``backend``. ``checkpoint``:
    safetensors files below ``checkpoint_path``, which trainer and engines reach. ``memory``: each engine streams them
    over HTTP from a copy in the trainer's host memory. ``nccl`` is taken for ``collective`` with that backend."""
    sync_style: SyncStyle = "fixed"
    """The start of a sync, and the explorer's waiting. ``fixed``: the trainer, when it has consumed a multiple of
    ``sync_interval`` batches; the explorer opens no batch before the weights it is due (1 and offset 0: on-policy).
    ``trainer_driven``: the trainer, every ``sync_interval`` of its steps; the explorer does not wait for weights.
    ``explorer_driven``: every ``sync_interval`` batches the explorer asks for the newest weights and waits for them.
    ``fully_async``: as trainer_driven, and requests in flight go on under the new weights. ``dynamic_by_trainer`` and
    ``dynamic_by_explorer`` are taken for the middle two."""
    sync_interval: int = Field(default=1, ge=1)
    """Batches, or steps of the trainer, between two syncs, by ``sync_style``."""
    sync_offset: int = Field(default=0, ge=0)
    """fixed: batches that the explorer opens beyond the interval before it waits."""
    pipeline_depth: int = Field(default=1, ge=0)
    """Other styles than fixed: most batches opened and not yet consumed, besides the one being opened."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest age of data to train on, in steps of the trainer, by the oldest token of a group. None: the staleness
    that the style causes by itself; in mode ``serve`` any, since rewards may be late."""
    stale: Literal["drop", "requeue"] = "drop"
    """Groups beyond ``max_staleness``: ``drop`` them, or give their tasks back to the explorer, which puts them at the
    head of its next batch (``requeue``; a task at most once)."""
    pause_mode: PauseMode | None = None
    """Requests in flight when weights come: ``wait`` for them to end, ``keep`` them (they go on under the new weights,
    each token stamped with its own version) or ``abort`` them (they begin anew). None: ``keep`` under fully_async, else
    ``wait``."""
    request_timeout: float = Field(default=1800.0, gt=0)
    """explorer_driven: seconds for which the explorer waits for requested weights while a trainer lives; then the run
    ends with an error, its state saved. Must be longer than a train step."""
    sync_timeout: float = Field(default=60.0, gt=0)
    """Seconds for each phase of one attempt at a sync."""
    member_lease: float = Field(default=15.0, gt=0)
    """Seconds without a join event after which an engine is out of the gate."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Transport of the broadcast: ``gloo`` over host memory, everywhere; ``nccl`` where the trainer and every engine
    have a GPU of their own."""
    bucket_bytes: int = Field(default=64 * 1024**2, ge=1024)
    """Most bytes of one broadcast, of one shard of a checkpoint, and of one streamed chunk."""
    host: str = "127.0.0.1"
    """Address on which the trainer's rendezvous and weight server listen: one that engines reach."""
    checkpoint_path: str = ""
    """Folder or fsspec URL (such as ``s3://bucket/weights``) of weights sent as files, in a folder of the run's name.
    Empty: ``weights`` in the run folder. The trainer resumes from ``checkpoints``, not from here."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """Versions kept in ``checkpoint_path``, the newest included."""
    pull: PullMethod | None = None
    """collective: source of the committed weights for an engine that lost its own or joined late. ``memory``, the
    default: a copy in the trainer's host memory. ``checkpoint``: files below ``checkpoint_path``, written before each
    broadcast. With the other methods such an engine fetches by ``sync_method`` itself."""

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
        """Largest staleness, in steps, that the style causes by itself where batches are trained in order of opening.

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

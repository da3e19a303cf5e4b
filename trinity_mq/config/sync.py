"""The section of the weight sync: its channel, schedule and timeouts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section

SyncMethod = Literal["collective", "checkpoint", "memory"]
PullMethod = Literal["memory", "checkpoint"]
PauseMode = Literal["wait", "keep", "abort"]
SyncStyle = Literal["fixed", "trainer_driven", "explorer_driven", "fully_async"]

OTHER_NAMES: dict[str, SyncStyle] = {"dynamic_by_trainer": "trainer_driven", "dynamic_by_explorer": "explorer_driven"}


GLOO = "synchronizer.sync_method=collective synchronizer.backend=gloo"
"""Settings that replace NCCL, whichever key chose it."""


class SyncConfig(Section):
    """Channel, schedule and timeouts of weight syncs (docs/learning.md)."""

    sync_method: SyncMethod = "collective"
    """Channel of the weights. ``collective``: a broadcast from the trainer to all engines at once, over ``backend``.
    ``checkpoint``: safetensors files below ``checkpoint_path``, which trainer and engines must reach. ``memory``: each
    engine streams the weights over HTTP from a copy in the trainer's host memory. ``nccl`` is accepted as a name for
    ``collective`` with that backend."""
    sync_style: SyncStyle = "fixed"
    """Start of a sync, and the explorer's waiting. ``fixed``: the trainer starts a sync whenever it has consumed a
    multiple of ``sync_interval`` batches; the explorer opens a batch only after it has the weights due for it (interval
    1 and offset 0: on-policy). ``trainer_driven``: the trainer starts a sync every ``sync_interval`` of its steps; the
    explorer does not wait for weights. ``explorer_driven``: every ``sync_interval`` batches the explorer requests the
    newest weights and waits for them. ``fully_async``: like trainer_driven, and requests in flight continue under the
    new weights. ``dynamic_by_trainer`` and ``dynamic_by_explorer`` are accepted as names for ``trainer_driven`` and
    ``explorer_driven``."""
    sync_interval: int = Field(default=1, ge=1)
    """Number of batches, or of trainer steps, between two syncs, depending on ``sync_style``."""
    sync_offset: int = Field(default=0, ge=0)
    """fixed: number of batches that the explorer opens beyond the interval before it waits."""
    pipeline_depth: int = Field(default=1, ge=0)
    """All styles except fixed: maximum number of batches opened and not yet consumed, in addition to the batch being
    opened."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum age of training data, in trainer steps, measured by the oldest token of a group. None: the staleness that
    the style itself causes; in mode ``serve`` no limit, since rewards may be late. Mode ``train`` ignores this setting
    and has no limit."""
    stale: Literal["drop", "requeue"] = "drop"
    """Treatment of groups older than ``max_staleness``. ``drop``: drop them. ``requeue``: return their tasks to the
    explorer, which puts them at the head of its next batch; each task is returned at most once."""
    pause_mode: PauseMode | None = None
    """Treatment of requests in flight when new weights arrive. ``wait``: let them finish first. ``keep``: continue them
    under the new weights; each token is stamped with its weight version. ``abort``: restart them. None: ``keep`` under
    fully_async, otherwise ``wait``."""
    request_timeout: float = Field(default=1800.0, gt=0)
    """explorer_driven: seconds for which the explorer waits for requested weights while a trainer is alive. After that
    the run saves its state and ends with an error. Must be longer than a train step."""
    sync_timeout: float = Field(default=60.0, gt=0)
    """Seconds for each phase of one attempt at a sync. A phase that moves weights has additional time: their bytes at
    50 MB/s, for each engine that fetches them from the trainer or from a disk."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Transport of the broadcast. ``gloo``: over host memory, works everywhere. ``nccl``: between GPUs,
    over NVLink or the network of the machines. The first process of the trainer and every engine must use different
    GPUs. Not run on a GPU yet."""
    bucket_bytes: int = Field(default=64 * 1024**2, ge=1024)
    """Maximum bytes of one broadcast, of one checkpoint shard, and of one streamed chunk."""
    host: str = "127.0.0.1"
    """Address on which the trainer's rendezvous and weight server listen. Engines must be able to reach it."""
    colocated: bool = False
    """Whether trainer and engines share one card and take turns: engines sleep while the trainer steps, and weights,
    gradients and optimizer state of the trainer are in host memory while engines sample. The trainer has one process.
    On a CPU the turns are the same, and their memory is freed too."""
    checkpoint_path: str = ""
    """Folder or fsspec URL (such as ``s3://bucket/weights``) for weights sent as files. Each run has a folder with its
    name there, with the newest two versions. Empty: ``weights`` in the run folder. The trainer resumes from
    ``checkpoints``, not from here."""
    pull: PullMethod | None = None
    """collective: source of the committed weights for an engine that lost its weights or joined late. ``memory``
    (default): a copy in the trainer's host memory. ``checkpoint``: files below ``checkpoint_path``, written before each
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
    def _strip_slash(cls, value: str) -> str:
        return value.rstrip("/") if len(value) > 1 else value

    @property
    def pull_method(self) -> PullMethod:
        """``pull`` with its default filled in."""
        if self.pull is not None:
            return self.pull
        return "memory" if self.sync_method == "collective" else self.sync_method

    @property
    def uses_nccl(self) -> bool:
        """Whether the weights are broadcast between GPUs."""
        return self.sync_method == "collective" and self.backend == "nccl"

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
        """Maximum staleness, in steps, that the style itself causes if batches are trained in the order of opening.

        The first token of batch b may be sampled as soon as b is opened. Under ``fixed`` the weights are then at most
        ``sync_interval - 1 + sync_offset`` batches behind b. Under the other styles b is opened at a progress of at
        least b - 1 - ``pipeline_depth``, with weights that lack at most ``sync_interval`` of those steps (all of them
        if the commit follows directly after the opening). ``explorer_driven`` opens the first of ``sync_interval``
        batches with the newest weights.
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
                    f"sync_offset is {self.sync_offset}, but sync_style is {self.sync_style!r}, which has no offset: "
                    "there pipeline_depth says how far the explorer runs ahead; remove sync_offset"
                )
            least = self.sync_interval - 1
            if self.sync_style != "explorer_driven" and self.effective_max_staleness < least:
                raise ValueError(
                    f"max_staleness is {self.max_staleness}, but the trainer sends weights every {self.sync_interval} "
                    f"steps (sync_interval): after {self.effective_max_staleness + 1} of them all data would be too "
                    f"old, and no further step would be possible. Set max_staleness to at least {least}, or sync more "
                    "often"
                )
            return self
        if self.max_staleness is not None and self.max_staleness < self.inherent_staleness:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, but sync_interval {self.sync_interval} and sync_offset "
                f"{self.sync_offset} make "
                f"data up to {self.inherent_staleness} steps old: every such batch would be dropped"
            )
        return self

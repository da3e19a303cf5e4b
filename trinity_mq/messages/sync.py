"""Events of the weight-sync gate."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trinity_mq.messages.base import Message, Version

SyncVerb = Literal["join", "leave", "prepare", "ready", "wait", "go", "applied", "failed", "commit", "abort"]


class SyncEvent(Message):
    """One event of the gate. The coordinator sends ``prepare``, ``go``, ``commit`` and ``abort``; the members send the
    other verbs.
    """

    kind: ClassVar[str] = "sync_event"

    verb: SyncVerb
    sender: str
    life: str = ""
    """From members: identifies the engine's process. A new process has not been in the group before."""
    version: Version | None = None
    epoch: int = 0
    """Membership number; it rises when engines join or leave."""
    attempt: int = 0
    """Attempt at this version; it identifies late answers to an aborted attempt."""
    members: list[str] = Field(default_factory=list)
    """prepare, commit: the addressed members in rank order (rank 0 is the coordinator)."""
    ranks: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """join, prepare: number of ranks of each member that has several in the broadcast, such as one on each device."""
    manifest: list[tuple[str, str, list[int]]] = Field(default_factory=list)
    """prepare: ``(name, dtype, shape)`` of every tensor, in sending order."""
    rendezvous: dict[str, Any] = Field(default_factory=dict)
    """prepare: ``method``, and its parameters for members that fetch or join."""
    pull: bool = False
    """prepare: fetch the committed version individually, without ``go`` and barrier, and answer ``applied``."""
    progress: int | None = None
    """prepare, commit: closed batches that the trainer had consumed when it made these weights."""
    seconds: float | None = None
    """Seconds. prepare, go: deadline; wait: additional time; join: lease."""
    canary: dict[str, Any] = Field(default_factory=dict)
    """prepare: ``tokens`` of the canary prompt; applied: the ``logprobs`` of these tokens."""
    reason: str | None = None
    detail: dict[str, Any] = Field(default_factory=dict)
    """prepare: ``batch`` whose train step made the weights, for traces; join: ``fingerprint``, ``resume``; ready:
    ``pause``; applied: ``receive``, ``apply``. All values except ``batch`` and ``fingerprint`` are in seconds."""

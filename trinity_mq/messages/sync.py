"""Events of the weight-sync gate."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trinity_mq.messages.base import Message, Version

SyncVerb = Literal["join", "leave", "prepare", "ready", "wait", "go", "applied", "failed", "commit", "abort"]


class SyncEvent(Message):
    """One event of the gate. Coordinator to members: prepare, go, commit, abort. Members to coordinator: the others."""

    kind: ClassVar[str] = "sync_event"

    verb: SyncVerb
    sender: str
    life: str = ""
    """From members: identifies the engine's process; a new process has never been in the group."""
    version: Version | None = None
    epoch: int = 0
    """Number of the membership: rises whenever engines join or leave."""
    attempt: int = 0
    """Attempt at this version, so that late answers to an aborted attempt are recognized."""
    members: list[str] = Field(default_factory=list)
    """prepare, commit: the members addressed, in rank order (rank 0 is the coordinator)."""
    manifest: list[tuple[str, str, list[int]]] = Field(default_factory=list)
    """prepare: ``(name, dtype, shape)`` of every tensor, in the order in which they are sent."""
    rendezvous: dict[str, Any] = Field(default_factory=dict)
    """prepare: ``method``, and the parameters with which a member fetches or joins by it."""
    pull: bool = False
    """prepare: fetch the committed version alone, without go and barrier, and answer applied."""
    progress: int | None = None
    """prepare, commit: closed batches behind these weights."""
    seconds: float | None = None
    """prepare, go: deadline; wait: how much longer; join: lease."""
    canary: dict[str, Any] = Field(default_factory=dict)
    """prepare: ``tokens`` of the canary prompt; applied: their ``logprobs``."""
    reason: str | None = None
    detail: dict[str, Any] = Field(default_factory=dict)
    """join: ``fingerprint``, ``resume``; ready: ``pause``; applied: ``receive``, ``apply``; all but the first in
    seconds."""

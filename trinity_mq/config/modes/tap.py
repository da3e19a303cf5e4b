"""The section of a run that trains on what another run saw."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trinity_mq.config.base import Section


class SourceConfig(Section):
    """Mode ``train``: trains on the processed batches of another run, as they are on its stream. The other run may go
    on meanwhile, or be over.
    """

    tap: str = ""
    """The run: its folder, or its name. A run whose folder is on this machine is found by it, broker and blob store
    too; of a name alone, on this run's broker. It is only read. Empty: none, the run trains on its own data. Given, it
    makes mode ``train`` of mode ``both``."""
    start: Literal["beginning", "now"] | Annotated[int, Field(ge=1)] = "beginning"
    """First batch: the ``beginning`` of what its stream still holds, the first that is published from ``now`` on, or
    that of this number."""


def trains_on_tap(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of mode ``both`` with ``source.tap`` as those of mode ``train``: nothing is rolled out."""
    source = settings.get("source") or {}
    if not isinstance(source, dict) or not source.get("tap") or settings.get("mode", "both") != "both":
        return settings
    return {**settings, "mode": "train"}

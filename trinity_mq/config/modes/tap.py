"""The section of a run that trains on the rollouts of another run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trinity_mq.config.base import Section


class SourceConfig(Section):
    """Mode ``train``: trains on the processed batches of another run, read from its stream. The other run may still be
    running, or have ended.
    """

    tap: str = ""
    """Folder or name of the other run. If its folder is on this machine, the folder also gives its broker and blob
    store; a name alone refers to this run's broker. The other run is only read. Empty: the run trains on its own data.
    If set, mode ``both`` becomes mode ``train``."""
    start: Literal["beginning", "now"] | Annotated[int, Field(ge=1)] = "beginning"
    """First batch: the ``beginning`` of the batches that the stream still holds, the first batch published from ``now``
    on, or a batch number."""


def with_tap_mode(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with mode ``train`` instead of ``both`` if ``source.tap`` is set, since nothing is rolled out
    then.
    """
    source = settings.get("source") or {}
    if not isinstance(source, dict) or not source.get("tap") or settings.get("mode", "both") != "both":
        return settings
    return {**settings, "mode": "train"}

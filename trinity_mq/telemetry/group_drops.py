"""Table of the reasons for dropping a group of experiences. docs/retries.md lists them with their settings."""

from __future__ import annotations

from typing import NamedTuple


class GroupDrop(NamedTuple):
    """A reason for dropping a group."""

    metric: str
    """Metric that counts the groups. Empty: none."""
    reason: str
    """The reason, as in docs/retries.md."""
    lost: str = ""
    """Name of the dropped groups in the report of a run. Empty: the report does not list them."""


TOO_FEW_RUNS = GroupDrop("rollout/partial_groups", "too few runs with a reward", "groups too small")
LOW_VARIANCE = GroupDrop("rollout/low_variance_groups", "its rewards differ too little")
LEFT_OUT = GroupDrop("rollout/filtered_groups", "an operator of the chain left it out")
TOO_OLD = GroupDrop("sample/dropped_stale_groups", "its oldest token is too old", "groups too old")
TAP_FILTERED = GroupDrop("tap/filtered_groups", "this run's operators keep nothing of it")
REPLAY_LOST = GroupDrop("replay/lost_groups", "the stream does not hold it any more")
REPLAY_DEADLY = GroupDrop("", "the trainer died at steps with it")

GROUP_DROPS = (TOO_FEW_RUNS, LOW_VARIANCE, LEFT_OUT, TOO_OLD, TAP_FILTERED, REPLAY_LOST, REPLAY_DEADLY)
"""All reasons."""

"""The line at the end of a command's output that suggests the next command."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

NEXT: Mapping[str, str] = {
    "validate": "trinity-mq run {target}",
    "plan": "trinity-mq run {target}",
    "submit": "trinity-mq status {target}{broker}",
    "list": "trinity-mq status NAME, trinity-mq dash NAME",
    "status": "trinity-mq why {target}{broker}: what does the run wait for? After its end: report, inspect, audit",
    "logs": "trinity-mq why {target}{broker}: what does the run wait for?",
    "timeline": "trinity-mq why {target}: which part is the slowest, and what to do",
    "inspect": "trinity-mq audit {target}{broker}: which experiences made a checkpoint",
    "audit": "trinity-mq report {target}: curves and settings on one page",
    "doctor": "trinity-mq run {target}{broker_setting}",
    "settings": "trinity-mq settings SECTION, or section.key=value after the file in any command",
    "algorithms": "algorithm.algorithm_type=NAME after the file of trinity-mq run",
    "debug workflow": "trinity-mq run {target}",
    "debug algorithm": "trinity-mq run {target}",
    "debug render": "docs/families.md: what is proven for each family",
    "regrade": "trinity-mq inspect {target}{broker}: the same experiences, token by token",
    "dead list": "trinity-mq dead replay {target}{broker}, after the cause is removed",
    "dead replay": "trinity-mq status {target}{broker}",
    "review list": "trinity-mq review show {target} ID{broker}, then keep, drop or reward",
    "review show": "trinity-mq review keep|drop|reward {target} ID{broker}",
    "convert-experiences": "trinity-mq inspect FILE",
    "clean": "trinity-mq list: what is still there",
}
"""Next steps by command and action. A row with only a command also applies to the actions that lack a row. A command
without a row prints its next step itself, runs until it is stopped, or does not suggest a next step."""
EXAMPLE_TARGET = "example:arithmetic"


def next_step(arguments: argparse.Namespace) -> str | None:
    """Return the line about the next step, or None to print nothing: the command is not in :data:`NEXT`, has
    followed a run, has printed output for programs or the plan of one of several machines (``--only``), or has printed
    an empty list or a file that no other command takes, for which it sets ``arguments.is_last``.
    """
    words = [arguments.command, getattr(arguments, "action", None)]
    text = NEXT.get(" ".join(filter(None, words))) or NEXT.get(arguments.command)
    ends_with_run = getattr(arguments, "follow", False)
    is_silent = getattr(arguments, "json", None) or getattr(arguments, "is_last", False)
    is_silent = is_silent or getattr(arguments, "only", None)  # the plan of one of several machines
    if text is None or ends_with_run or is_silent:
        return None
    target = getattr(arguments, "target", None) or EXAMPLE_TARGET
    has_broker = getattr(arguments, "broker", None) is not None
    return "next: " + text.format(
        target=shlex.join([str(target), *getattr(arguments, "overrides", [])]),
        broker=" --broker URL" if has_broker else "",
        broker_setting=" broker.url=URL" if has_broker else "",
    )

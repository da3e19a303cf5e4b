"""The line at the end of a command's output: what a user types next."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

NEXT: Mapping[str, str] = {
    "validate": "trinity-mq run {target}",
    "submit": "trinity-mq status {target}",
    "list": "trinity-mq status NAME, or trinity-mq why NAME: what does the run wait for?",
    "status": "trinity-mq why {target}: what does the run wait for?",
    "logs": "trinity-mq why {target}: what does the run wait for?",
    "timeline": "trinity-mq why {target}: which part is the slowest, and what to do",
    "inspect": "trinity-mq regrade {target} --reward NAME: what would another reward function say?",
    "audit": "trinity-mq report {target}: curves and settings on one page",
    "doctor": "trinity-mq run {target}",
    "settings": "trinity-mq settings SECTION, or section.key=value after the file in any command",
    "algorithms": "algorithm.algorithm_type=NAME after the file of trinity-mq run",
    "debug workflow": "trinity-mq run {target}",
    "debug algorithm": "trinity-mq run {target}",
    "regrade": "trinity-mq inspect {target}: the same experiences, token by token",
    "dead list": "trinity-mq dead replay {target}, after the cause is removed",
    "dead replay": "trinity-mq status {target}",
    "review list": "trinity-mq review show {target} ID, then keep, drop or reward",
    "review show": "trinity-mq review keep|drop|reward {target} ID",
    "migrate": "trinity-mq validate {out}",
    "convert-experiences": "trinity-mq inspect FILE",
    "clean": "trinity-mq list: what is still there",
    "schema": "schemas/README.md describes clients in other languages",
}
"""Next steps by command and action. Commands without a row print it themselves, or run until they are stopped."""
EXAMPLE_TARGET = "example:arithmetic"


def next_step(arguments: argparse.Namespace) -> str | None:
    """Return the line about the next step, or None. Output for programs has none."""
    words = [arguments.command, getattr(arguments, "action", None)]
    text = NEXT.get(" ".join(filter(None, words))) or NEXT.get(arguments.command)
    if text is None or getattr(arguments, "json", None):
        return None
    target = getattr(arguments, "target", None) or EXAMPLE_TARGET
    out = getattr(arguments, "out", None)
    if "{out}" in text and out is None:
        return None
    return "next: " + text.format(
        target=shlex.join([str(target), *getattr(arguments, "overrides", [])]), out=shlex.quote(str(out))
    )

"""``trinity-mq doctor``: checks a live broker and this machine, and recommends actions; changes nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.operations.doctor.checks import DoctorFinding
from trinity_mq.operations.doctor.facts import Needs
from trinity_mq.operations.doctor.run import check_all
from trinity_mq.targets.connection import find_broker_url
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import default_broker, find_configuration

SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM", "not looked at": "-      "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq doctor``."""
    add_target(parser, optional=True)
    add_broker(parser, "--url")
    parser.add_argument(
        "--management",
        metavar="URL",
        help="its management API, http://[user:password@]host:port (default: the broker's host, port 15672 or 15671)",
    )
    parser.add_argument(
        "--node", metavar="FOLDER", help="folder of the private broker node (default: in the run's folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def doctor(arguments: argparse.Namespace) -> int:
    """Print the findings of all checks. Return 1 if the verdict of a finding is ``problem``, else 0."""
    target = arguments.target
    config = None if target is None else find_configuration(target, arguments.overrides)
    needs = Needs.of(config, None if config is not None else target)
    broker = config.broker if config is not None else default_broker(target or "run", arguments.overrides)
    if url := arguments.broker or (find_broker_url(config) if config is not None else None):
        broker = broker.model_copy(update={"url": url, "url_file": None})
    node = Path(arguments.node) if arguments.node else RunFolder(config).broker if config is not None else None
    folder = config.path if config is not None else Path("runs")
    results = asyncio.run(check_all(folder, broker, needs, arguments.management, node))
    if arguments.json:
        print(json.dumps({"findings": [asdict(finding) for finding in results]}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(results)))
    return 1 if any(finding.verdict == "problem" for finding in results) else 0


def lines(results: Sequence[DoctorFinding]) -> list[str]:
    """Return the findings as lines for a person, and a last line with the number of findings by verdict."""
    width = max((len(finding.subject) for finding in results), default=0)
    report = []
    for finding in results:
        unseen = finding.verdict == "not looked at"
        seen = f"not looked at, because {finding.seen}" if unseen else finding.seen
        report.append(f"{SIGNS[finding.verdict]}  {finding.subject:{width}}  {seen}")
        more = [f"wanted: {finding.wanted}"] if finding.wanted and finding.verdict in {"warning", "problem"} else []
        more += [finding.do if unseen else f"do: {finding.do}"] if finding.do else []
        for text in more:
            report += textwrap.wrap(
                text, 110, initial_indent=" " * 11, subsequent_indent=" " * 13, break_long_words=False
            )
    counts = {verdict: sum(finding.verdict == verdict for finding in results) for verdict in SIGNS}
    return [*report, ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)]

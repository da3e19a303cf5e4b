"""``trinity-mq report``: writes a run's curves, evaluations, losses and settings as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from trinity_mq.cli.arguments import add_target
from trinity_mq.observability.report.page import REPORT_FILE, write_report
from trinity_mq.targets.target import load_target_configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq report``."""
    add_target(parser)
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help=f"the HTML file; default: {REPORT_FILE} in the run's folder"
    )


def report(arguments: argparse.Namespace) -> int:
    """Write the page and print its path. Return 0."""
    config = load_target_configuration(arguments)
    print(f"the report is in {write_report(config, arguments.out)}")
    return 0

"""``trinity-mq report``: writes a run's curves, evaluations, losses and settings as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from trinity_mq.cli.arguments import add_target
from trinity_mq.cli.output import write_output
from trinity_mq.cli.reports.page import page
from trinity_mq.cli.target import configuration
from trinity_mq.config import Config

REPORT_FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq report``."""
    add_target(parser)
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help=f"the HTML file; default: {REPORT_FILE} in the run's folder"
    )


def report(arguments: argparse.Namespace) -> int:
    """Write the page and print its path. Return 0."""
    config = configuration(arguments)
    print(f"the report is in {write_report(config, arguments.out)}")
    return 0


def write_report(config: Config, out: Path | None = None) -> Path:
    """Write the report of a run and return its file.

    Raises:
        CommandError: The run has no metrics, a library is not installed, or the file cannot be written.
    """
    text = page(config)
    path = out or config.path / REPORT_FILE
    write_output(path, text)
    return path

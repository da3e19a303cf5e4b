"""The option ``--json`` of the benchmarks: the ratios that one has found, for scripts/benchmarks to compare."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios there, by name, as JSON")


def write(options: argparse.Namespace, ratios: Mapping[str, float]) -> None:
    """Write the ratios where the option says so."""
    if options.json:
        rounded = {name: float(f"{value:.4g}") for name, value in ratios.items()}
        options.json.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")

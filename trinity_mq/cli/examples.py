"""``trinity-mq examples``: lists the examples that are part of the package, and copies them."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from trinity_mq.config.loading.examples import EXAMPLE, EXAMPLES, STARTER, example_names, example_text
from trinity_mq.errors import CommandError

FOLDER = "examples"
"""Name of the folder into which the examples are copied. Paths in the examples begin with this name."""
_EXTRA = re.compile(r"trinity-mq\[([a-z0-9,-]+)\]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq examples``."""
    parser.add_argument(
        "--copy", action="store_true", help=f"copy all examples with their code and data to ./{FOLDER}, to change them"
    )


def examples(arguments: argparse.Namespace) -> int:
    """List the examples, or copy them. Return 0."""
    if arguments.copy:
        if Path(FOLDER).exists():
            raise CommandError(f"{Path(FOLDER).absolute()} exists: call this in a folder without {FOLDER}")
        try:
            shutil.copytree(EXAMPLES, FOLDER, ignore=shutil.ignore_patterns("__pycache__", STARTER))
        except OSError as error:
            raise CommandError(f"{Path(FOLDER).absolute()} cannot be written: {error.strerror or error}") from error
        print(f"copied to {FOLDER}\nnext: trinity-mq run {FOLDER}/arithmetic.yaml")
        return 0
    names = example_names()
    width = max(map(len, names)) + 2
    for name in names:
        text = example_text(name)
        extras = sorted({extra for match in _EXTRA.findall(text) for extra in match.split(",")})
        needs = f"  (needs trinity-mq[{','.join(extras)}])" if extras else ""
        print(f"{name:{width}}{_summary(text)}{needs}")
    print(f"\nnext: trinity-mq run {EXAMPLE}arithmetic; to change an example first: trinity-mq examples --copy")
    return 0


def _summary(text: str) -> str:
    """Return the first sentence of the comment at the top of a file."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#") or not line.strip("# "):
            break
        lines.append(line.strip("# "))
    return re.split(r"(?<=[.:;])\s", " ".join(lines), maxsplit=1)[0].rstrip(".:;")

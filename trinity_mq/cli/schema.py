"""``trinity-mq schema``: writes the JSON Schemas of the control-plane bodies to files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.messages.codec import UPGRADES
from trinity_mq.messages.schemas import json_schemas

SUFFIX = ".schema.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq schema``."""
    parser.add_argument("--out", metavar="FOLDER", default="schemas", help="output folder (default: schemas)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a file differs from the models"
    )


def schema(arguments: argparse.Namespace) -> int:
    """Write the schemas and return 0. With ``--check``, write nothing and return 1 if a file differs from the
    models.
    """
    folder = Path(arguments.out)
    if arguments.check:
        return _check(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts().items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror or error}") from error
    print(f"{len(texts())} schemas in {folder}")
    return 0


def texts() -> dict[str, str]:
    """Return the content of each schema file, by file name."""
    return {name + SUFFIX: json.dumps(json_schema, indent=2) + "\n" for name, json_schema in json_schemas().items()}


def schema_differences(folder: Path) -> list[str]:
    """Return a line for each schema file that is missing from ``folder``, differs from the models, or is not the schema
    of a message body. Schemas of old versions may be there.
    """
    lines = []
    for name, text in texts().items():
        path = folder / name
        if not path.exists():
            lines.append(f"{path}: missing")
        elif path.read_text(encoding="utf-8") != text:
            lines.append(f"{path}: differs from the models")
    expected = {*texts(), *(f"{kind}.v{version}{SUFFIX}" for kind, version in UPGRADES)}
    strays = sorted(path for path in folder.glob("*" + SUFFIX) if path.name not in expected)
    return lines + [f"{path}: not the schema of a known message body" for path in strays]


def _check(folder: Path) -> int:
    lines = schema_differences(folder)
    if not lines:
        print(f"{len(texts())} schemas in {folder} agree with the models")
        return 0
    for line in lines:
        print(line, file=sys.stderr)
    print(
        f"write them again with `trinity-mq schema --out {folder}`, unless the change is more than a new field with a "
        "default: that needs a new version and an upgrade function (schemas/README.md)",
        file=sys.stderr,
    )
    return 1

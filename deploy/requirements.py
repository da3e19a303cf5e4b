"""What has to be installed before the project itself, read from pyproject.toml: one requirement a line.

    python3 deploy/requirements.py [EXTRA ...] [--build]

``--build`` adds what builds the project. The image installs this in a layer of its own, which code does not change.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(extras: list[str], *, build: bool) -> list[str]:
    """Return the project's dependencies with those of ``extras``.

    Raises:
        SystemExit: There is no such extra.
    """
    data = tomllib.loads(PYPROJECT.read_text())
    optional = data["project"]["optional-dependencies"]
    wanted = list(data["project"]["dependencies"])
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"error: no extra {extra!r} in pyproject.toml; there are {', '.join(sorted(optional))}")
        wanted += optional[extra]
    return wanted + data["build-system"]["requires"] * build


if __name__ == "__main__":
    words = sys.argv[1:]
    found = requirements([word for word in words if not word.startswith("-")], build="--build" in words)
    sys.stdout.write("\n".join(found) + "\n")

"""A real PostgreSQL server of the tests' own, where one is installed: on a socket in a folder, gone afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SHARED = "/tmp"
"""Folder for temporary files of all users; that of the tests may be root's alone."""
USER = "postgres"
"""Who runs the server where the tests are root, which it refuses."""


def programs() -> Path | None:
    """Return the folder with ``initdb`` and ``pg_ctl``; Debian keeps them out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda one: int(one.parts[-3]))
    given = shutil.which("initdb")
    return Path(given).parent if given else found[-1].parent if found else None


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a database on a server that runs for the ``with`` block.

    Raises:
        pytest.skip.Exception: None is installed.
    """
    where = programs()
    if where is None:
        pytest.skip("PostgreSQL is not installed")
    user = USER if os.geteuid() == 0 else None
    # below a folder that the user of the server may pass; paths of sockets are short, too
    folder = Path(tempfile.mkdtemp(prefix="tmq-pg-", dir=None if user is None else SHARED))
    if user is not None:
        shutil.chown(folder, user)

    def run(program: str, *words: str) -> None:
        subprocess.run(
            [where / program, *words], user=user, cwd=folder, check=True, timeout=50, stdout=subprocess.DEVNULL
        )

    data, started = str(folder / "data"), False
    try:
        run("initdb", "-D", data, "-U", "me", "--auth=trust", "--no-sync")
        # nothing but a socket in our folder, and no waiting for the disk: what is in it is thrown away
        options = f"-k {folder} -h '' -c fsync=off"
        run("pg_ctl", "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
        started = True
        yield f"postgresql+psycopg://me@/postgres?host={folder}"
    finally:
        if started:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)

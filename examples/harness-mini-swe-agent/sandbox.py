#!/usr/bin/env python3
"""Runs a command in bubblewrap, without a network, with a clean environment and limits. mini-swe-agent's
BubblewrapEnvironment starts this file as its ``executable``:

sandbox.py [ARGUMENTS OF BWRAP] bash -c COMMAND

Exit status 125: bubblewrap is missing, or root cannot become nobody. As root, the command runs as nobody, because the
kernel does not limit the processes of root, and nobody becomes the owner of the working folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMITS = "ulimit -c 0 -f 262144 -n 256 -t 60 -u 64 -v 1048576"
"""Limits of bash. For each process: no core dump, files of 256 MiB, 256 open files, 60 s of processor time, 1 GiB of
memory. For all processes of the command: 64 processes. They are set inside the new user namespace, so that no process
outside counts.
"""
TEMPORARY_BYTES = 1 << 26
"""Size of each of /tmp and /dev/shm, which are in memory."""
MAX_OUTPUT_BYTES = 1 << 20
"""Bytes of output after which the command is killed."""
NOBODY = 65534
UNAVAILABLE = 125
PATH = "/usr/local/bin:/usr/bin:/bin"
WRAP = [
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--clearenv", "--setenv", "PATH", PATH, "--setenv", "LANG", "C.UTF-8"),
    *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"),
    *("--size", str(TEMPORARY_BYTES), "--tmpfs", "/tmp", "--size", str(TEMPORARY_BYTES), "--tmpfs", "/dev/shm"),
]
READ_ONLY = ("--remount-ro", "/dev", "--remount-ro", "/")
"""Arguments that make the root and /dev read-only: both are also in memory, and their size is not limited."""


def root_folders() -> list[str]:
    """Return arguments for the folders of programs at the root, which are links to /usr on most systems."""
    arguments: list[str] = []
    for folder in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    return arguments


def reachable_folder() -> str:
    """Return the folder for working folders. Root's folder of temporary files may lie in a folder that only root can
    enter, where no command could run as nobody.
    """
    folders = [tempfile.gettempdir(), "/tmp", "/var/tmp"] if os.getuid() == 0 else []
    for folder in map(Path, folders):
        if all(path.is_dir() and path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents)):
            return str(folder)
    return tempfile.gettempdir()


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        print("bubblewrap is not installed: install bubblewrap, which has the program bwrap", file=sys.stderr)
        return UNAVAILABLE
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        if "--bind" in arguments:
            os.chown(arguments[arguments.index("--bind") + 1], NOBODY, NOBODY)
    *options, shell, flag, command = arguments
    limited = [shell, flag, f'{LIMITS} && exec "$@"', "limits", shell, flag, command]
    with subprocess.Popen(
        [bwrap, *WRAP, *root_folders(), *options, *READ_ONLY, *limited],
        env={"PATH": PATH},  # the command can read the environment of bwrap, which is process 1 of its /proc
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **user,
    ) as process:
        assert process.stdout is not None
        remaining = MAX_OUTPUT_BYTES
        while remaining > 0 and (piece := os.read(process.stdout.fileno(), min(remaining, 1 << 16))):
            sys.stdout.buffer.write(piece)
            remaining -= len(piece)
        if not remaining:
            process.kill()
            sys.stdout.buffer.write(b"\n[the sandbox ended the command after %d bytes of output]\n" % MAX_OUTPUT_BYTES)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:
        print(f"the sandbox cannot be made: {error}; start the runner as an ordinary user", file=sys.stderr)
        sys.exit(UNAVAILABLE)

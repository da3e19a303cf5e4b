"""Runs the RabbitMQ of another Debian, unpacked in a folder, as if it were installed here.

``TRINITY_MQ_RABBITMQ_ROOT`` names the root folder of that system, as debootstrap makes one. Wrapper scripts run its
programs in a mount namespace of their own, where its ``/usr`` covers ours; the rest, files and network, is the same.
The library finds the wrappers by ``RABBITMQ_HOME`` and on the path, and so do the processes that tests start.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

ROOT_VARIABLE = "TRINITY_MQ_RABBITMQ_ROOT"
WANTED = f"{ROOT_VARIABLE} names the root folder of a system, made by `debootstrap --include=rabbitmq-server ...`"
COVER = 'mount --bind "$1/usr" /usr; shift; exec "$@"'
"""Shell program before a root folder and a command; the mount ends with the last process of its namespace."""
SERVERS = "usr/lib/rabbitmq/lib/rabbitmq_server-*"
EPMD = ("usr/bin/epmd", "usr/lib/erlang/bin/epmd", "usr/lib/erlang/erts-*/bin/epmd")


class UnusableRoot(Exception):
    """The RabbitMQ below a root folder cannot be run here."""


def wrapped(root: Path, folder: Path, path: str) -> Mapping[str, str]:
    """Write wrapper scripts into ``folder`` and return the environment variables that have them used.

    Args:
        root: Root folder of the other system.
        folder: An empty folder that lives as long as the environment is used.
        path: The search path to put epmd's wrapper before.

    Raises:
        UnusableRoot: There is no RabbitMQ below ``root``, or it cannot be run here.
    """
    root = root.absolute()
    if not (root / "usr/bin/sh").exists() or not (root / "lib").is_symlink():
        raise UnusableRoot(f"{root} holds no system of its own (no usr/bin/sh, or no merged /usr): {WANTED}")
    if os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/lib").is_symlink():
        raise UnusableRoot(
            f"the RabbitMQ below {root} can be run only by root, on a Linux with unshare and a merged /usr: "
            f"install rabbitmq-server here instead, and leave {ROOT_VARIABLE} out"
        )
    script = _newest(root, f"{SERVERS}/sbin/rabbitmq-server")
    home = folder / script.parts[-3]
    for program in ("rabbitmq-server", "rabbitmqctl"):
        _write(home / "sbin" / program, root, script.with_name(program))
    _write(folder / "bin/epmd", root, _newest(root, *EPMD))
    return {"RABBITMQ_HOME": str(home), "PATH": f"{folder / 'bin'}{os.pathsep}{path}"}


def _newest(root: Path, *patterns: str) -> Path:
    """The last match below ``root``, as its own programs see it."""
    for pattern in patterns:
        for found in sorted(root.glob(pattern), reverse=True):
            return Path("/") / found.relative_to(root)
    raise UnusableRoot(f"there is no {' or '.join(patterns)} below {root}: {WANTED}")


def _write(wrapper: Path, root: Path, program: Path) -> None:
    """Write a script that becomes ``program``; no process stays in between."""
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", COVER, "sh", str(root), str(program)]
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    wrapper.chmod(0o755)

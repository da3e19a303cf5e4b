"""A RabbitMQ of another Debian, unpacked in a folder: its programs run here, in a mount namespace of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_mq.local_broker.node_files import NodeError

ROOT_VARIABLE = "TRINITY_MQ_RABBITMQ_ROOT"
"""Environment variable with the root folder of another system, such as debootstrap makes."""
WANTED = f"{ROOT_VARIABLE} names the root folder of a system, made by `debootstrap --include=rabbitmq-server ...`"
COVER = 'mount --bind "$1/usr" /usr; shift; exec "$@"'
"""Everything else, our files and the network among it, is the same inside; the mount ends with the last process."""


@dataclass(frozen=True, slots=True)
class ServerRoot:
    """A root folder whose server is used instead of an installed one."""

    folder: Path

    @classmethod
    def chosen(cls, folder: Path | None = None) -> ServerRoot | None:
        """Return the given folder, else the one of :data:`ROOT_VARIABLE`, None where neither is given.

        Raises:
            NodeError: The programs of such a folder cannot be run here.
        """
        named = folder or Path(os.environ.get(ROOT_VARIABLE, ""))
        if not named.parts:
            return None
        root = named.absolute()
        if not (root / "usr/bin/sh").exists() or not (root / "lib").is_symlink():
            raise NodeError(f"{root} holds no system of its own (no usr/bin/sh, or no merged /usr): {WANTED}")
        if os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/lib").is_symlink():
            raise NodeError(
                f"the RabbitMQ below {root} can be run only by root, on a Linux with unshare and a merged /usr: "
                f"install rabbitmq-server here instead, and leave {ROOT_VARIABLE} out"
            )
        return cls(root)

    def inside(self, pattern: str) -> list[Path]:
        """Return what matches an absolute pattern below the folder, as its own programs see it; the newest first."""
        below = sorted(self.folder.glob(pattern.lstrip("/")), reverse=True)
        return [Path("/") / path.relative_to(self.folder) for path in below]

    def command(self, program: Sequence[str]) -> list[str]:
        """Return what runs ``program``; our child becomes it, nothing stays in between."""
        return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", COVER, "sh", str(self.folder), *program]

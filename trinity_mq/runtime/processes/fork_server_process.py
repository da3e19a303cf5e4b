"""A fork server as a child of this process. This module imports little, since the server must start before anything
else.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_PR_SET_CHILD_SUBREAPER = 36
_ENVIRONMENT = {
    # forking fails if a library starts a thread pool at its import
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # With flash-attn installed, transformers looks for GPUs at its import. A look through the CUDA runtime would
    # prevent the use of CUDA in every forked process; a look through NVML does not.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Variables of the server only. Each forked process has the environment of its request."""


class ForkServer:
    """A fork server that lives as long as this process, or until :meth:`close`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str], path: Path) -> None:
        self._process, self._folder = process, folder
        self.path = path
        """Path of the server's socket."""

    @classmethod
    def start(cls, modules: Sequence[str]) -> Self:
        """Start a server that imports ``modules``, without waiting for it, and become the parent of the processes that
        it forks.

        Args:
            modules: Modules in the order of import. ``MODULE=WORD``: processes whose first word is WORD are forked once
                this module is imported.

        Raises:
            OSError: This system is not Linux, or has no process left.
        """
        set_subreaper(True)
        folder = tempfile.TemporaryDirectory(prefix="tmq-fork-", ignore_cleanup_errors=True)
        path = Path(folder.name) / secrets.token_hex(4)
        try:
            process = _start_server(path, modules)
        except OSError:
            folder.cleanup()
            set_subreaper(False)
            raise
        return cls(process, folder, path)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def close(self) -> None:
        """End the server, and stop adopting orphans. The processes that it has started continue."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
        set_subreaper(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_server(path: Path, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the process of a server that listens at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(64)
        command = [sys.executable, "-m", "trinity_mq.runtime.processes.fork_server"]
        return subprocess.Popen(
            [*command, "--socket", str(listener.fileno()), "--parent", str(os.getpid()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
            pass_fds=(listener.fileno(),),
        )


def set_subreaper(on: bool) -> None:
    """Set whether this process adopts orphaned descendants.

    Raises:
        OSError: The kernel refused, or does not have this call.
    """
    if sys.platform != "linux":
        raise OSError("processes are forked on Linux only")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")

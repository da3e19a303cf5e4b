"""Helpers for processes, files and run folders: end with a parent, wait for an exit, write atomically, mark a run as
finished, and identify a run. Two runs of one name on one broker differ in their ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from trinity_mq.runtime.errors import FatalError

PARENT_INTERVAL = 0.5
"""Seconds between two checks that the parent is alive."""
KEPT_MEMORY = 256 * 1024 * 1024
"""Freed bytes that a computing process keeps for its next computation."""
TRIM_INTERVAL = 60.0
"""Seconds between two returns of freed memory to the kernel."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024  # the maximum; larger values are refused
_RUN_MARKER = "finished"
RUN_FILE = "run_id"
"""File in the run folder with the run's id, followed by a second word once an explorer has begun the run."""
TRAINER_FILE = "trainer_id"
"""File in a trainer's run folder, with an id of the folder."""
_BEGUN = "begun"
_OF_EARLIER_STARTS = ("state", "checkpoints")
"""Subfolders of a run folder whose content already belongs to a run."""


def die_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Let the kernel send ``signum`` to this process when ``parent`` ends for any reason. Linux only; without
    effect on other systems.

    Args:
        parent: Process id of the parent, as reported by the parent itself. If the parent has already ended, the signal
            is sent at once.
        signum: The signal.

    Raises:
        OSError: The kernel refused.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # the parent may have ended before the call
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def keep_freed_memory() -> None:
    """Let malloc keep up to :data:`KEPT_MEMORY` freed bytes instead of returning them to the kernel at once.

    A train step allocates and frees the same memory repeatedly, and each new page from the kernel costs a page fault
    and is filled with zeros: about a fifth of the CPU time of the demo's train step. Only glibc has this setting; with
    other libraries the call has no effect.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_MEMORY)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


async def trim_memory_periodically(every: float = TRIM_INTERVAL) -> None:
    """Return the freed pages between malloc's blocks to the kernel every ``every`` seconds, until cancelled.

    A process that handles messages of many sizes fragments its heap: without this the memory of a supervisor grew by 1
    to 2 MiB an hour at constant use. Only glibc has this function; with other libraries the call returns at once. Not
    for a process that computes, see :func:`keep_freed_memory`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    while trim is not None:
        await asyncio.sleep(every)
        await asyncio.to_thread(trim, 0)  # takes a quarter of a second with a gigabyte of fragments


def call_when_parent_ends(parent: int, call: Callable[[], None]) -> None:
    """Call ``call`` in a separate thread within :data:`PARENT_INTERVAL` seconds after the parent ``parent`` has ended.

    It does not need an event loop, and works on every system.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_INTERVAL)
        call()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


async def wait_exit(pid: int) -> None:
    """Return when process ``pid`` has ended, or at once if it does not exist. Its parent can still read its exit
    status.

    Raises:
        OSError: This system cannot watch processes (no pidfd).
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        loop.add_reader(fd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def write_atomic(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace the content of the file ``path`` by ``data``: a reader sees either the old or the new content completely.

    Data and name are on disk on return.

    Args:
        path: The file; its folder must exist.
        data: The whole content.
        mode: Permissions; None: the permissions of any new file.

    Raises:
        OSError: The file was not written and the old file is unchanged; or the new file is there, and only the name
            could not be synced to disk.
    """
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, _default_mode() if mode is None else mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def apply_umask(folder: Path) -> None:
    """Give every file below ``folder`` the permissions of any new file, since safetensors makes files private to the
    owner.
    """
    mode = _default_mode()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def disk_full_message(error: BaseException) -> str | None:
    """Return a line with the path on the full disk, if it is known, and the remedy; None if neither ``error`` nor a
    cause reports a full disk or an exhausted quota.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}:
            where = f"{cause.filename}: " if cause.filename else ""
            return (
                f"{where}the disk is full ({os.strerror(cause.errno)}); make room there and start the run again: "
                "everything saved before is intact"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def is_run_over(folder: Path) -> bool:
    """Return whether the run in ``folder`` has ended."""
    return (folder / _RUN_MARKER).exists()


def mark_run_over(folder: Path) -> None:
    """Mark the run in ``folder`` as ended; the marker is on disk on return. An agent that starts later then has nothing
    to do.

    Raises:
        OSError: The marker cannot be written.
    """
    write_atomic(folder / _RUN_MARKER, json.dumps({"time": time.time()}).encode())


def unmark_run_over(folder: Path) -> None:
    """Remove the marker, if it exists, of a run that continues."""
    (folder / _RUN_MARKER).unlink(missing_ok=True)


def read_run_id(folder: Path) -> str | None:
    """Return the id of the run that ``folder`` belongs to; None if the folder is not claimed."""
    return next(iter(_words(folder)), None)


def claim_folder(folder: Path) -> None:
    """Give a new run folder the id of the run that will begin there, before any of its agents can meet another run.

    A folder of an earlier start is not changed. Of several processes the first one decides.

    Raises:
        OSError: The file cannot be written.
    """
    if _words(folder) or any((folder / name).exists() for name in _OF_EARLIER_STARTS):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), (folder / RUN_FILE).open("x", encoding="ascii") as file:
        file.write(uuid.uuid4().hex)


def claimed_run_id(folder: Path) -> str:
    """Return the id for a run that begins in ``folder``: the claimed id if no run has used it, otherwise a new id."""
    words = _words(folder)
    return words[0] if len(words) == 1 else uuid.uuid4().hex


def write_run_id(folder: Path, run_id: str) -> None:
    """Write the id of the run that has begun in ``folder``, where its agents read it.

    Raises:
        OSError: The file cannot be written.
    """
    if _words(folder) != [run_id, _BEGUN]:
        write_atomic(folder / RUN_FILE, f"{run_id} {_BEGUN}".encode())


def read_trainer_id(folder: Path) -> str:
    """Return the id by which trainers that share ``folder`` recognise each other.

    The id is empty before :func:`ensure_trainer_id`.
    """
    return next(iter(_words(folder, TRAINER_FILE)), "")


def ensure_trainer_id(folder: Path) -> str:
    """Return the id of :func:`read_trainer_id`, and create it if missing; for a trainer that holds the run's lock.

    Raises:
        OSError: The file cannot be written.
    """
    if not read_trainer_id(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / TRAINER_FILE, uuid.uuid4().hex.encode())
    return read_trainer_id(folder)


def place(folder: Path) -> str:
    """Return this host's name and ``folder``, for people who look for an agent."""
    return f"{socket.gethostname()}:{folder.absolute()}"


def other_run_error(name: str, folder: Path, role: str, theirs: str, where: str) -> FatalError:
    """Return the error of an agent that meets another run of its name on the broker.

    Args:
        name: Name of both runs.
        folder: The agent's run folder.
        role: Role of the agent of the other run that was heard.
        theirs: Id of the other run; empty if unknown.
        where: Host and folder of that agent; empty if not reported.
    """
    ours = read_run_id(folder)
    return FatalError(
        f"another run of the name {name!r} uses this broker: its {role}{f' in {where}' if where else ''} "
        f"has{f' run id {theirs} and' if theirs else ''} another run folder than "
        f"{folder}{f' (run id {ours})' if ours else ''}. Start this one under another name (name=...), or stop the "
        f"other run, remove what it left with `trinity-mq broker clean {name}`, and start this run again"
    )


def _words(folder: Path, name: str = RUN_FILE) -> list[str]:
    try:
        return (folder / name).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []


def _default_mode() -> int:
    """Return the permissions of a new file. On Linux the umask is read without setting it: while it is set to 0,
    another thread could create a file that everybody can write.
    """
    umask_line = None
    with contextlib.suppress(OSError):  # not on Linux
        umask_line = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if umask_line is not None:
        return 0o666 & ~int(umask_line[1], 8)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask

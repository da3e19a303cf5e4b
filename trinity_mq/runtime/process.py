"""Helpers for processes and files: ending with a parent, waiting for an exit, atomic writes, and what a run folder says
of its run: that it is over, and which one it is. Two runs of one name on one broker differ in their ids.
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
"""Seconds between two looks at whether the parent lives."""
KEPT_MEMORY = 256 * 1024 * 1024
"""Freed bytes that a process which computes keeps for its next computation."""
TRIM_INTERVAL = 60.0
"""Seconds between two times at which freed memory is given back."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024  # larger ones are refused
_RUN_MARKER = "finished"
RUN_FILE = "run_id"
"""File in the run folder with the run's id, and a second word once an explorer has begun the run."""
TRAINER_FILE = "trainer_id"
"""File in the run folder of a trainer, with an id for the folder."""
_BEGUN = "begun"
_OF_EARLIER_STARTS = ("state", "checkpoints")
"""Folders in a run folder whose content names its run already."""


def die_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Have the kernel send ``signum`` to this process when ``parent`` ends, however it ends. Linux only; elsewhere it
    does nothing.

    Args:
        parent: Process id of the parent as the parent itself told it. If it has ended already, the signal comes at
            once.
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


def keep_freed_memory(size: int = KEPT_MEMORY) -> None:
    """Have malloc keep up to ``size`` freed bytes instead of giving them back to the kernel at once.

    A train step takes and frees the same memory again and again, and each page that the kernel gives anew costs a fault
    and is filled with zeros: about a fifth of the processor time of the demo's train step. Only glibc has this setting;
    elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, size)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


async def give_back_freed_memory(every: float = TRIM_INTERVAL) -> None:
    """Give the freed pages between malloc's blocks back to the kernel every so many seconds, until cancelled.

    A process that handles messages of many sizes fragments its heap: without this the memory of a supervisor grew by 1
    to 2 MiB an hour while what it had in use stayed the same. Only glibc has such a function; elsewhere the call
    returns at once. Not for a process that computes, see :func:`keep_freed_memory`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    while trim is not None:
        await asyncio.sleep(every)
        await asyncio.to_thread(trim, 0)  # a quarter of a second where a gigabyte is in pieces


def when_parent_ends(parent: int, call: Callable[[], None]) -> None:
    """Call ``call``, in a thread of its own, within :data:`PARENT_INTERVAL` after the parent ``parent`` has ended.

    That needs no event loop, and works on every system.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_INTERVAL)
        call()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


async def wait_exit(pid: int) -> None:
    """Return when process ``pid`` has ended, at once if there is none; its exit status stays for its parent to read.

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
    """Replace the file ``path`` by one that holds ``data``: a reader sees the old content or the new one, whole.

    Data and name are on disk on return.

    Args:
        path: Its folder must exist.
        data: The whole content.
        mode: Permissions; None: those of any new file.

    Raises:
        OSError: Not written; the old file is as it was.
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
    """Give every file below ``folder`` the permissions of any new file: safetensors writes for the owner alone."""
    mode = _default_mode()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def disk_full(error: BaseException) -> str | None:
    """Return in one line which path has no room left and what to do, None if neither ``error`` nor a cause says so."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}:
            where = f"{cause.filename}: " if cause.filename else ""
            return (
                f"{where}the disk is full ({os.strerror(cause.errno)}); make room there and start the run again: what "
                "was saved before is whole"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def is_run_over(folder: Path) -> bool:
    """Return whether the run in ``folder`` has come to its end."""
    return (folder / _RUN_MARKER).exists()


def mark_run_over(folder: Path) -> None:
    """Leave a marker in ``folder`` that its run has come to its end, on disk on return: an agent that is started later
    finds nothing to do.

    Raises:
        OSError: The marker cannot be written.
    """
    write_atomic(folder / _RUN_MARKER, json.dumps({"time": time.time()}).encode())


def unmark_run_over(folder: Path) -> None:
    """Remove the marker of a run that goes on; none is fine."""
    (folder / _RUN_MARKER).unlink(missing_ok=True)


def folder_run(folder: Path) -> str | None:
    """Return the id of the run that ``folder`` belongs to, None where no explorer has claimed it."""
    return next(iter(_words(folder)), None)


def claim_folder(folder: Path) -> None:
    """Give a new run folder the id of the run that will begin there, before any of its agents can meet another run.

    A folder of an earlier start keeps what it has. Of several processes the first one decides.

    Raises:
        OSError: The file cannot be written.
    """
    if _words(folder) or any((folder / name).exists() for name in _OF_EARLIER_STARTS):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), (folder / RUN_FILE).open("x", encoding="ascii") as file:
        file.write(uuid.uuid4().hex)


def claimed_run(folder: Path) -> str:
    """Return the id for a run that begins in ``folder``: the one it was claimed with, if no run has used that."""
    words = _words(folder)
    return words[0] if len(words) == 1 else uuid.uuid4().hex


def note_run(folder: Path, run_id: str) -> None:
    """Write the id of the run that has begun in ``folder``: its agents read it there.

    Raises:
        OSError: The file cannot be written.
    """
    if _words(folder) != [run_id, _BEGUN]:
        write_atomic(folder / RUN_FILE, f"{run_id} {_BEGUN}".encode())


def own_trainer(folder: Path) -> str:
    """Return the id by which trainers that share ``folder`` recognise each other; empty before :func:`note_trainer`."""
    return next(iter(_words(folder, TRAINER_FILE)), "")


def note_trainer(folder: Path) -> str:
    """Return :func:`own_trainer` of a folder in which a trainer has the run's lock; it is made if missing.

    Raises:
        OSError: The file cannot be written.
    """
    if not own_trainer(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / TRAINER_FILE, uuid.uuid4().hex.encode())
    return own_trainer(folder)


def place(folder: Path) -> str:
    """Return this host's name and ``folder``, for people who look for an agent."""
    return f"{socket.gethostname()}:{folder.absolute()}"


def other_run(name: str, folder: Path, role: str, theirs: str, where: str) -> FatalError:
    """Return the error of an agent that meets another run of its name on the broker.

    Args:
        name: Name of both runs.
        folder: The agent's run folder.
        role: Role of the agent of the other run that was heard.
        theirs: Id of the other run; empty: not known.
        where: Host and folder of that agent; empty: it did not say.
    """
    own = folder_run(folder)
    return FatalError(
        f"another run of the name {name!r} works on this broker: its {role}{f' in {where}' if where else ''} "
        f"has{f' run id {theirs} and' if theirs else ''} another run folder than {folder}"
        f"{f' (run id {own})' if own else ''}. Start this one under another name (name=...), or stop the other one, "
        f"remove what it left with `trinity-mq broker clean {name}`, and start this one again"
    )


def _words(folder: Path, name: str = RUN_FILE) -> list[str]:
    try:
        return (folder / name).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []


def _default_mode() -> int:
    """Return the permissions of a new file. Where Linux tells the umask, it is not set for a moment to read it: a file
    that another thread makes in that moment would be open to everybody.
    """
    told = None
    with contextlib.suppress(OSError):  # no Linux
        told = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if told is not None:
        return 0o666 & ~int(told[1], 8)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask

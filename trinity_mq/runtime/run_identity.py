"""The id of the run that a run folder belongs to. Two runs of one name on one broker differ in it."""

from __future__ import annotations

import contextlib
import socket
import uuid
from pathlib import Path

from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.process import write_atomic

RUN_FILE = "run_id"
"""File in the run folder with the run's id, and a second word once an explorer has begun the run."""
TRAINER_FILE = "trainer_id"
"""File in the run folder of a trainer, with an id for the folder."""
_BEGUN = "begun"
_OF_EARLIER_STARTS = ("state", "checkpoints")
"""Folders in a run folder whose content names its run already."""


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

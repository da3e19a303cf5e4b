"""Logs of an agent: JSON, one event a line, in ``<run_dir>/logs/<agent>.jsonl``; errors in short form on stderr. A file
that has grown to its limit becomes ``<agent>.1.jsonl`` in place of the one before, so that a log takes bounded space.

structlog goes through the standard library, so that what other libraries log arrives in the same file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from logging.handlers import BaseRotatingHandler
from pathlib import Path
from typing import Any, TextIO, cast

import structlog
from structlog.types import Processor

from trinity_mq.telemetry.jsonline import dump_line

LOGS_FOLDER = "logs"
"""Folder of the run folder that holds a file of lines for each agent."""
LOG_MAX_BYTES = 64 * 1024**2
"""Size at which a new file is begun."""
_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):((?:(?!://)\S)*)@")
"""Matches up to the last @ before the next URL, so that a password with an unencoded @ is hidden too."""
_CHATTY = ("asyncio", "httpcore", "httpx", "httpx2", "openai", "urllib3")
"""Libraries that log a line at level info for each request or connection."""


def mask_passwords(text: str) -> str:
    """Return ``text`` with the password of every URL in it replaced.

    >>> mask_passwords("amqp://guest:secret@localhost:5672/")
    'amqp://guest:***@localhost:5672/'
    """
    return _PASSWORD.sub(r"\1:***@", text)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger ``name``, used as ``log.info("slice_done", ticket=ticket)``."""
    return structlog.stdlib.get_logger(name)


def work_for(batch: int | str, ticket: str | None = None) -> AbstractContextManager[None]:
    """Return a context in which every line that is logged carries the batch and, if given, its ticket.

    It holds in the present task and in tasks and threads (``asyncio.to_thread``) begun inside, not in others. A line
    that names a batch or a ticket itself keeps its own.
    """
    return structlog.contextvars.bound_contextvars(batch=batch, **({} if ticket is None else {"ticket": ticket}))


def setup_logging(
    role: str,
    agent_id: str,
    run_dir: Path | None,
    level: str = "info",
    *,
    run: str = "",
    max_bytes: int = LOG_MAX_BYTES,
) -> None:
    """Route all logging of this process. Calling it again replaces what the last call set up.

    Args:
        role: Written into every line.
        agent_id: Written into every line, and the name of the log file.
        run_dir: The run folder; None: no file.
        level: debug, info, warning or error.
        run: Name of the run, written into every line; empty: into none.
        max_bytes: Size at which a new file is begun.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _LogFile | _ShortErrors):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
    if run_dir is not None:
        root.addHandler(_LogFile(role, agent_id, run_dir, run, max_bytes))
    root.addHandler(_ShortErrors(role))
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # loggers made at import time follow a later set-up
    )


class _LogFile(BaseRotatingHandler):
    """A file of lines. Several processes may write to one: each looks whether another has begun a new file."""

    def __init__(self, role: str, agent_id: str, run_dir: Path, run: str, max_bytes: int) -> None:
        folder = run_dir / LOGS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # half a surrogate pair, of strangers, becomes its escape in JSON
        super().__init__(str(folder / f"{agent_id}.jsonl"), mode="a", encoding="utf-8", errors="backslashreplace")
        self._before, self._max_bytes = folder / f"{agent_id}.1.jsonl", max_bytes
        self._told = False
        whose = {**({"run": run} if run else {}), "role": role, "agent": agent_id, "pid": os.getpid()}

        def add_agent(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
            return whose | dict(event)

        shared: list[Processor] = [
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            add_agent,
        ]
        self.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                processors=[*shared, structlog.stdlib.ProcessorFormatter.remove_processors_meta, _mask, _render],
                foreign_pre_chain=[structlog.stdlib.ExtraAdder(), structlog.contextvars.merge_contextvars],
            )
        )

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802  # the name of the base class
        """Say whether the file is full, or is not the one under its name any more."""
        if self.stream is None:  # it is closed
            return False
        try:
            now = os.stat(self.baseFilename)
            return now.st_size >= self._max_bytes or not os.path.samestat(now, os.fstat(self.stream.fileno()))
        except FileNotFoundError:  # moved aside with its run: lines go there until this process ends
            return False

    def doRollover(self) -> None:  # noqa: N802  # the name of the base class
        """Begin a new file, unless another process has.

        The full file is locked while it is moved, so that one process moves it, once. A process that finds it locked
        goes on writing to it and does not wait: the other one may be frozen.
        """
        if self.stream is not None:
            if not _may_move(self.stream):
                return
            stream, self.stream = self.stream, None  # should the next one not open, the next line tries again
            with stream, contextlib.suppress(FileNotFoundError):
                now = os.stat(self.baseFilename)
                if now.st_size >= self._max_bytes and os.path.samestat(now, os.fstat(stream.fileno())):
                    os.replace(self.baseFilename, self._before)
        self.stream = self._open()

    def close(self) -> None:
        """Close the file; what it has no room for is lost, and was said."""
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name of the base class
        """Say once, in one line, that the log cannot be written: a full disk is no reason for a traceback a line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.baseFilename} cannot be written: {error.strerror or error}\n")


def _may_move(stream: TextIO) -> bool:
    """Lock a full file until it is closed; return False where another process holds the lock.

    Where the file system has no locks the file is moved without one.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


class _ShortErrors(logging.Handler):
    """Writes ``role: event key=value: the exception's last line``; where the event has a reason, ``role: reason (event
    key=value)``. The log file has the traceback.
    """

    def __init__(self, role: str) -> None:
        super().__init__(logging.ERROR)
        self.role = role

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")  # whatever stderr is now: a live display replaces it
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, dict):
            fields = {key: value for key, value in record.msg.items() if not key.startswith("_")}
            error = fields.pop("exc_info", None)
            event = str(fields.pop("event", ""))
            reason = fields.pop("reason", None)
            text = " ".join([event, *(f"{key}={value}" for key, value in fields.items())])
            text = f"{reason} ({text})" if reason else text
        else:
            text, error = record.getMessage(), None
        problem = _exception(error if error is not None else record.exc_info)
        if problem is not None:
            text += f": {type(problem).__name__}: {problem}"
        return _spelled_out(mask_passwords(f"{self.role}: " + " ".join(text.split())))


def _spelled_out(text: str) -> str:
    """Return a line with what a terminal obeys spelled out: texts of strangers are in it."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _exception(value: Any) -> BaseException | None:
    if isinstance(value, BaseException):
        return value
    if isinstance(value, tuple):
        return cast("BaseException | None", value[1])
    return sys.exc_info()[1] if value else None


def _mask(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: _masked(value) for key, value in event.items()}


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return mask_passwords(value)
    if isinstance(value, Mapping):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(inner) for inner in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    return mask_passwords(repr(value))


def _render(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    first = {key: event[key] for key in ("time", "level", "role", "agent", "event") if key in event}
    return dump_line(first | dict(event))

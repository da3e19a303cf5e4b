"""Logs of an agent: JSON with an event per line in ``<run_dir>/logs/<agent>.jsonl``, and errors in short form on
stderr. A file that reaches its size limit is renamed to ``<agent>.1.jsonl`` and replaces the previous file of that
name. Therefore the log takes bounded space.

structlog is routed through the standard library, so that logs of other libraries arrive in the same file.
"""

from __future__ import annotations

import contextlib
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

from trinity_mq.file_lock import try_lock
from trinity_mq.telemetry.jsonline import dump_line
from trinity_mq.terminal import escape_to_one_line

LOGS_FOLDER = "logs"
"""Folder in the run folder with a log file for each agent."""
LOG_MAX_BYTES = 64 * 1024**2
"""Size in bytes at which a new file is begun."""
_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):((?:(?!://)\S)*)@")
"""Matches up to the last @ before the next URL, so that a password with an unencoded @ is also masked."""
_CHATTY = ("asyncio", "httpcore", "httpx", "httpx2", "openai", "urllib3")
"""Libraries that log a line at level info for each request or connection."""


def mask_passwords(text: str) -> str:
    """Return ``text`` with the password of every URL in it masked.

    >>> mask_passwords("amqp://guest:secret@localhost:5672/")
    'amqp://guest:***@localhost:5672/'
    """
    return _PASSWORD.sub(r"\1:***@", text)


def get_logger(name: str | None = None, **_: Any) -> structlog.stdlib.BoundLogger:
    """Return the logger ``name``. Use it as ``log.info("slice_done", ticket=ticket)``. Further arguments, which
    Trinity-RFT has (``in_ray_actor``, ``level``), are ignored: the level is ``monitor.log_level``.
    """
    return structlog.stdlib.get_logger(name or "plugin")


def work_for(batch: int | str, ticket: str | None = None) -> AbstractContextManager[None]:
    """Return a context that adds the batch and, if given, its ticket to every logged line.

    The context applies to the current task, and to tasks and threads (``asyncio.to_thread``) started inside it. A batch
    or ticket given in the log call itself takes precedence.
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
    """Route all logging of this process. Another call replaces the setup of the previous call.

    Args:
        role: Role of the agent, written to every line.
        agent_id: Id of the agent, written to every line. It is also the name of the log file.
        run_dir: Folder of the run. None: no log file.
        level: debug, info, warning or error.
        run: Name of the run, written to every line. Empty: omitted.
        max_bytes: Size in bytes at which a new file is begun.
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
        cache_logger_on_first_use=False,  # loggers created at import time must follow a later setup
    )


class _LogFile(BaseRotatingHandler):
    """Log file with JSON lines. Several processes may write to the same file. Each process checks whether another
    process has begun a new file.
    """

    def __init__(self, role: str, agent_id: str, run_dir: Path, run: str, max_bytes: int) -> None:
        folder = run_dir / LOGS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # unpaired surrogates from outside input become their JSON escapes
        super().__init__(str(folder / f"{agent_id}.jsonl"), mode="a", encoding="utf-8", errors="backslashreplace")
        self._before, self._max_bytes = folder / f"{agent_id}.1.jsonl", max_bytes
        self._told = False
        identity = {**({"run": run} if run else {}), "role": role, "agent": agent_id, "pid": os.getpid()}

        def add_agent(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
            return identity | dict(event)

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
        """Return whether the file is full, or has been replaced by another file under its name."""
        if self.stream is None:  # the log is closed
            return False
        try:
            now = os.stat(self.baseFilename)
            return now.st_size >= self._max_bytes or not os.path.samestat(now, os.fstat(self.stream.fileno()))
        except FileNotFoundError:  # the file was moved with its run: further lines go to it until this process ends
            return False

    def doRollover(self) -> None:  # noqa: N802  # the name of the base class
        """Begin a new file, unless another process has done so.

        The full file is locked while it is renamed, so that only one process renames it, and only once. A process that
        finds it locked continues to write to it instead of waiting, because the other process may be frozen.
        """
        if self.stream is not None:
            if not _may_move(self.stream):
                return
            stream, self.stream = self.stream, None  # if opening the next file fails, the next line retries
            with stream, contextlib.suppress(FileNotFoundError):
                now = os.stat(self.baseFilename)
                if now.st_size >= self._max_bytes and os.path.samestat(now, os.fstat(stream.fileno())):
                    os.replace(self.baseFilename, self._before)
        self.stream = self._open()

    def close(self) -> None:
        """Close the file. Buffered lines that cannot be written are lost; :meth:`handleError` has reported the
        failure.
        """
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name of the base class
        """Report a failed write once, in one line. A full disk must not cause a traceback per line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.baseFilename} cannot be written: {error.strerror or error}\n")


def _may_move(stream: TextIO) -> bool:
    """Lock a full file until it is closed. Return False if another process holds the lock.

    On a file system without locks, the file is renamed without a lock.
    """
    try:
        return try_lock(stream)
    except OSError:
        return True


class _ShortErrors(logging.Handler):
    """Writes ``role: event key=value: last line of the exception`` to stderr. If the event has a reason, it writes
    ``role: reason (event key=value)``. The traceback is only in the log file.
    """

    def __init__(self, role: str) -> None:
        super().__init__(logging.ERROR)
        self.role = role

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # look up stderr at each write, because a live display replaces it
            sys.stderr.write(self.format(record) + "\n")
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
        # the line may contain text from outside, which must not control the terminal
        return escape_to_one_line(mask_passwords(f"{self.role}: " + " ".join(text.split())))


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

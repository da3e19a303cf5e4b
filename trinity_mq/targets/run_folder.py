"""Folders that only one process at a time may use: run folders, and folders of brokers that outlive a command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from trinity_mq.config import Config, ConfigError, escape_interpolations, load_config
from trinity_mq.errors import CommandError
from trinity_mq.file_lock import try_lock
from trinity_mq.renamed import changed_meanings
from trinity_mq.runtime.process import is_run_over, mark_run_over, unmark_run_over, write_atomic

CONFIG_FILE = "config.yaml"
LOCK_FILE = "lock"
NAMES_FILE = "names"
"""File that run folders contain since release 0.3. Before, some names of workflows and rewards had other meanings."""
NEW_RUN = ("model.", "algorithm.", "seed", "source.", "buffer.taskset.selector", "buffer.taskset.data_selector")
"""Keys and key prefixes that determine the checkpoint, the schedule and the order of the tasks. A run cannot be resumed
with other values. All other settings may change between starts, except for ``buffer.batch_size`` without
``buffer.total_steps``; see :meth:`RunFolder.changes`.
"""
_ELSEWHERE = ("run_dir", "broker.url", "broker.url_file", "broker.password_file")
"""Keys whose changes between two starts are not reported, because they only locate the run folder and the broker."""


class LockedFolder:
    """A folder with a lock that only a single process can hold. The process stores the URL of its broker in the folder.

    Args:
        path: The folder.
        lock: Name of the lock file, which holds the process id.
        url: Name of the file that holds the broker's URL.
        mode: Permissions of a new folder, less the umask.
    """

    def __init__(self, path: Path, lock: str, url: str, mode: int = 0o777) -> None:
        self.path, self._mode = path.absolute(), mode
        self._lock, self._url = self.path / lock, self.path / url

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock inside the block. A missing folder is created.

        Raises:
            CommandError: Another process holds the lock, or the folder cannot be created.
        """
        try:
            self.path.mkdir(mode=self._mode, parents=True, exist_ok=True)
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CommandError(f"folder {self.path} cannot be used: {error.strerror or error}") from error
        with os.fdopen(fd, "r+") as file:
            if not try_lock(file):
                raise CommandError(self._in_use(file.read().strip() or "unknown"))
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def _in_use(self, holder: str) -> str:
        return f"process {holder} already serves a broker in {self.path}"

    def holder(self) -> int | None:
        """Return the id of the process that holds the lock. None: no process holds it, or the process that took it just
        now has not written its id yet.
        """
        try:
            with self._lock.open() as file:
                is_free = try_lock(file, shared=True)
        except FileNotFoundError:
            return None
        return None if is_free else int(self._lock.read_text() or 0) or None

    def last_locked_ns(self) -> int:
        """Return the time of the last lock acquisition in nanoseconds since the epoch, or 0 if the folder was never
        locked.
        """
        try:
            return self._lock.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def save_broker_url(self, url: str) -> None:
        """Write the broker's URL for other commands, readable by the owner only."""
        write_atomic(self._url, url.encode(), mode=0o600)

    def remove_broker_url(self) -> None:
        """Remove the URL of a stopped broker."""
        self._url.unlink(missing_ok=True)

    def saved_broker_url(self) -> str | None:
        """Return the stored broker URL, or None if no URL is stored."""
        try:
            return self._url.read_text().strip() or None
        except OSError:
            return None

    def live_broker_url(self) -> str | None:
        """Return the stored broker URL if a process holds the lock, else None. A killed process leaves its URL
        behind.
        """
        return self.saved_broker_url() if self.holder() is not None else None


class RunFolder(LockedFolder):
    """The folder ``<run_dir>`` of a run: configuration, lock, logs, private broker, and marker of a finished run."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.path, LOCK_FILE, "broker.url")
        self.name = config.name
        self._config = config

    def _in_use(self, holder: str) -> str:
        return (
            f"run folder {self.path} is in use by process {holder}: stop that run first, or start this "
            "one under another name (name=...)"
        )

    @property
    def config_file(self) -> Path:
        """The configuration file that the agents of this run read."""
        return self.path / CONFIG_FILE

    @property
    def logs(self) -> Path:
        """The folder of logs and captured output."""
        return self.path / "logs"

    @property
    def broker(self) -> Path:
        """The folder of the private broker."""
        return self.path / "broker"

    def changes(self) -> list[str]:
        """Return one line for each setting that changed since the last start; an empty list before the first start.

        Raises:
            ConfigError: A setting changed that a resumed run must keep, or the configuration in the folder cannot be
                read.
        """
        now = flat_settings(self._config.model_dump(mode="json"))
        before = self._known()
        changes = [] if before is None else _changes(before, now)
        # without total_steps, batch_size determines how many batches an epoch has
        fixed = NEW_RUN if now["buffer.total_steps"] is not None else (*NEW_RUN, "buffer.batch_size")
        forbidden = [line for key, line in changes if key.startswith(fixed)]
        if forbidden:
            raise ConfigError(
                f"run {self.name!r} in {self.path} was started with other values of settings that must stay the same: "
                f"{'; '.join(forbidden)}. Restore the old values, start a run with another name (name=...), or start "
                "over with --fresh, which moves this folder aside"
            )
        return [line for _, line in changes]

    def write_configuration(self) -> list[str]:
        """Write the configuration into the folder. Return one line for each setting that changed since the last start,
        and for each name that meant something else at the last start. Errors as for :meth:`changes`.
        """
        changes = self.changes()
        names = self.path / NAMES_FILE
        if self.config_file.exists() and not names.exists():
            changes += changed_meanings(self._config.model_dump(mode="json", include={"buffer"}))
        self.logs.mkdir(parents=True, exist_ok=True)
        data = self._config.model_dump(mode="json")
        data["run_dir"] = str(self.path)
        data["broker"]["url"] = None  # the URL may hold a password; agents get it from the environment
        # Readable by the owner only: ${oc.env:NAME} is already resolved and may be a secret.
        write_atomic(
            self.config_file, yaml.safe_dump(escape_interpolations(data), sort_keys=False).encode(), mode=0o600
        )
        names.write_text("0.3\n")
        return changes

    @property
    def finished(self) -> bool:
        """True if the run has finished."""
        return is_run_over(self.path)

    def mark_finished(self) -> None:
        """Mark the run as finished."""
        mark_run_over(self.path)

    def unmark_finished(self) -> None:
        """Remove the marker of a finished run before the run is resumed."""
        unmark_run_over(self.path)

    def move_aside(self) -> Path:
        """Rename the folder to the first free name of ``<folder>.1``, ``<folder>.2`` and so on, and return the new
        path.

        Raises:
            CommandError: The folder cannot be renamed.
        """
        numbers = itertools.count(1)
        aside = next(path for n in numbers if not (path := self.path.with_name(f"{self.path.name}.{n}")).exists())
        try:
            return self.path.rename(aside)
        except OSError as error:
            raise CommandError(
                f"run folder {self.path} cannot be moved to {aside}: {error.strerror or error}; move it yourself, or "
                "start under another name (name=...)"
            ) from error

    def _known(self) -> dict[str, Any] | None:
        if not self.config_file.exists():
            return None
        try:
            # loading through the models fills in defaults for settings that are new in this version
            return flat_settings(load_config(self.config_file).model_dump(mode="json"))
        except ConfigError as error:
            raise ConfigError(
                f"the configuration of the last start is unreadable; remove it to continue\n{error}"
            ) from error


def flat_settings(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    keys = [key for key in dict.fromkeys((*now, *before)) if key not in _ELSEWHERE and before.get(key) != now.get(key)]
    return [(key, f"{key}: {before.get(key)!r} -> {now.get(key)!r}") for key in keys]

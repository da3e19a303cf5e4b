"""Resolution of a command's TARGET (a YAML file, a run folder or a run name) and of its KEY=VALUE settings."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_mq.bus.topology import RUN_NAME
from trinity_mq.config import BrokerConfig, Config, Stage, load_config, load_stages
from trinity_mq.config.loading.examples import EXAMPLE
from trinity_mq.errors import CommandError
from trinity_mq.targets.run_folder import CONFIG_FILE
from trinity_mq.targets.setting_words import SETTING
from trinity_mq.telemetry import LOGS_FOLDER, METRICS_FILE

RUNS = Path("runs")
"""Folder that holds the run folders of configurations without ``run_dir``."""


def load_target_configuration(arguments: argparse.Namespace) -> Config:
    """Return the configuration of TARGET with the settings of the command line applied.

    Raises:
        CommandError: TARGET is a run name without a run folder, a folder without a configuration, or a setting.
        ConfigError: The configuration cannot be used, or the file does not exist.
    """
    config = find_configuration(arguments.target, arguments.overrides)
    if config is None:
        raise CommandError(
            f"{arguments.target!r} is neither a file nor a run's folder, and there is no {RUNS / arguments.target}; "
            f"give a YAML file, or an example such as example:arithmetic (`trinity-mq examples`){run_list_suffix()}"
        )
    return config


def select_newest_run(arguments: argparse.Namespace) -> None:
    """If the command line names no TARGET, set it to the folder of the run below ``runs`` that was started last, and
    print this folder on stderr. A KEY=VALUE argument in the place of TARGET becomes the first setting.

    Raises:
        CommandError: No run folder exists.
    """
    target = arguments.target
    if target is not None and (SETTING.match(target) is None or Path(target).exists()):
        return
    starts = {path.parent: path.stat().st_mtime for path in RUNS.glob(f"**/{CONFIG_FILE}")}
    if not starts:
        raise CommandError(
            f"no run has left a folder below {RUNS.absolute()}; name a YAML file, a run's folder or name"
        )
    folder = max(starts, key=lambda path: (starts[path], path))
    arguments.target, arguments.overrides = str(folder), [*filter(None, [target]), *arguments.overrides]
    print(f"the newest run, {folder}:", file=sys.stderr)


def load_target_stages(arguments: argparse.Namespace) -> list[Stage]:
    """Return the stages of TARGET if it is a file that describes several runs, else an empty list.

    Raises:
        ConfigError: The file cannot be used.
    """
    return load_stages(arguments.target, arguments.overrides) if is_configuration_file(arguments.target) else []


def find_configuration(target: str, overrides: Sequence[str]) -> Config | None:
    """Return the configuration of the run that ``target`` names, or None if ``target`` is a run name without a folder.

    Raises:
        CommandError: ``target`` is a folder without a configuration, or a setting.
        ConfigError: The configuration cannot be used, or ``target`` names neither a file, a run folder nor a run.
    """
    path = Path(target)
    if not is_configuration_file(target):
        folders = [folder for folder in (path, RUNS / target) if (folder / CONFIG_FILE).is_file()]
        if folders:
            return _configuration_of_folder(folders[0], overrides)
        if RUN_NAME.fullmatch(target):
            return None
        if path.is_dir():
            raise CommandError(f"{target} holds no {CONFIG_FILE}, so it is not a run's folder{run_list_suffix()}")
        if "=" in target:
            raise CommandError(f"{target!r} is a setting; name the run before it: a YAML file, a run's folder or name")
    return load_config(target, overrides)


def find_run_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run that TARGET and its settings name. A folder with logs or metrics is enough, because
    agents started without ``trinity-mq run`` write no configuration there. If TARGET is a configuration file, the
    returned folder may not exist yet.

    Raises:
        CommandError, ConfigError: No run has left a folder, or as for :func:`find_configuration`.
    """
    path = Path(arguments.target)
    if (path / LOGS_FOLDER).is_dir() or (path / METRICS_FILE).is_file():
        return path
    config = find_configuration(arguments.target, arguments.overrides)
    if config is not None:
        return config.path
    path = RUNS / str(arguments.target)
    if not path.is_dir():
        raise CommandError(f"{path}: no run has left a folder there{run_list_suffix()}")
    return path


def is_configuration_file(target: str) -> bool:
    """Return whether ``target`` is a file or names a shipped example."""
    return target.startswith(EXAMPLE) or Path(target).is_file()


def _configuration_of_folder(folder: Path, overrides: Sequence[str]) -> Config:
    config, keys = load_config(folder / CONFIG_FILE, overrides), {word.partition("=")[0] for word in overrides}
    if "run_dir" in keys:
        return config
    # The folder may have been moved. With a new name, the configuration describes another run with another folder.
    return config.model_copy(update={"run_dir": "" if "name" in keys else str(folder.absolute())})


def default_broker(name: str, overrides: Sequence[str]) -> BrokerConfig:
    """Return the broker settings of a run known only by name: the defaults with the given settings applied.

    Raises:
        ConfigError: The settings cannot be used.
    """
    return load_config({"name": name, "model": {"tiny": {}}}, overrides).broker


def run_names() -> list[str]:
    """Return the names of the run folders below ``runs``."""
    return sorted(path.parent.name for path in RUNS.glob(f"*/{CONFIG_FILE}"))


def name_of_host(host: str) -> str:
    """Return a host name as a part of an agent's id: at most 40 lower-case letters, digits and ``-``. It is ``host`` if
    no character of the name can be used.

    >>> name_of_host("GPU-3.example.org")
    'gpu-3-example-org'
    """
    return re.sub("[^a-z0-9]+", "-", host.lower()).strip("-")[:40] or "host"


def run_list_suffix() -> str:
    """Return an error suffix that lists up to five run folders below ``runs``, or an empty string without run
    folders.
    """
    names = run_names()
    shown = [*names[:5], *(["..."] if len(names) > 5 else [])]
    return f"; runs here: {', '.join(shown)} (`trinity-mq list`)" if names else ""

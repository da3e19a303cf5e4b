"""The run that a command is given: a YAML file, a run's folder or a run's name, and settings over its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_mq.bus.topology import RUN_NAME
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.main import SETTING
from trinity_mq.cli.run_folder import CONFIG_FILE
from trinity_mq.config import BrokerConfig, Config, Stage, load_config, load_stages

RUNS = Path("runs")
"""The folder of the runs whose configuration names no other."""


def configuration(arguments: argparse.Namespace) -> Config:
    """Return the configuration of TARGET with the settings of the command line.

    Raises:
        CommandError: TARGET is a name of which no run folder is known.
        ConfigError: The configuration cannot be used.
    """
    config = find_configuration(arguments.target, arguments.overrides)
    if config is None:
        raise CommandError(
            f"{arguments.target!r} is neither a file nor a run's folder, and there is no {RUNS / arguments.target}; "
            f"give a YAML file such as examples/arithmetic.yaml{known_runs()}"
        )
    return config


def name_newest(arguments: argparse.Namespace) -> None:
    """Make the run that was started last TARGET, where the command line names none, and say which that is.

    Raises:
        CommandError: There is no run.
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


def staged(arguments: argparse.Namespace) -> list[Stage]:
    """Return the stages of TARGET where that is a file which describes several runs; none otherwise.

    Raises:
        ConfigError: The file cannot be used.
    """
    return load_stages(arguments.target, arguments.overrides) if Path(arguments.target).is_file() else []


def find_configuration(target: str, overrides: Sequence[str]) -> Config | None:
    """Return the configuration of the run that ``target`` names, None where it is a name without a run folder.

    Raises:
        CommandError: ``target`` is no configuration, no run folder and no name of a run.
        ConfigError: The configuration cannot be used.
    """
    path = Path(target)
    if not path.is_file():
        folders = [folder for folder in (path, RUNS / target) if (folder / CONFIG_FILE).is_file()]
        if folders:
            return _of_folder(folders[0], overrides)
        if RUN_NAME.fullmatch(target):
            return None
        if path.is_dir():
            raise CommandError(f"{target} holds no {CONFIG_FILE}, so it is no run's folder{known_runs()}")
        if "=" in target:
            raise CommandError(f"{target!r} is a setting; name the run before it: a YAML file, a run's folder or name")
    return load_config(path, overrides)


def _of_folder(folder: Path, overrides: Sequence[str]) -> Config:
    config, given = load_config(folder / CONFIG_FILE, overrides), {word.partition("=")[0] for word in overrides}
    if "run_dir" in given:
        return config
    # the folder may have been moved; with another name it is the pattern of another run
    return config.model_copy(update={"run_dir": "" if "name" in given else str(folder.absolute())})


def broker_of_name(name: str, overrides: Sequence[str]) -> BrokerConfig:
    """Return the broker of a run of which only the name is known: the defaults, with the given settings.

    Raises:
        ConfigError: The settings cannot be used.
    """
    return load_config({"name": name, "model": {"tiny": {}}}, overrides).broker


def run_names() -> list[str]:
    """Return the names of the folders of runs below ``runs``."""
    return sorted(path.parent.name for path in RUNS.glob(f"*/{CONFIG_FILE}"))


def known_runs() -> str:
    """Return the end of an error: which runs have folders below ``runs``; empty where none has."""
    names = run_names()
    shown = [*names[:5], *(["..."] if len(names) > 5 else [])]
    return f"; runs here: {', '.join(shown)} (`trinity-mq list`)" if names else ""

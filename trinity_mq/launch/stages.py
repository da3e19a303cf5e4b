"""Runs the stages of one file in order, each starting from the previous model. Finished stages are recorded."""

from __future__ import annotations

import argparse
import hashlib
import json
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from trinity_mq.config import Config, Stage
from trinity_mq.config.loading.stages import final_model
from trinity_mq.config.modes.mode import TRAINING_MODES
from trinity_mq.errors import CommandError
from trinity_mq.launch.configured_run import check, run_configured
from trinity_mq.launch.earlier_start import discard_earlier_run
from trinity_mq.launch.exit_codes import TRAINED
from trinity_mq.runtime.process import write_atomic
from trinity_mq.runtime.processes.fork_server_process import ForkServer
from trinity_mq.targets.run_folder import RunFolder

RECORD_FILE = "stage.json"
"""Name of the file with the :class:`StageRecord` in the folder of a stage's run."""

ForkServers = Callable[[], AbstractContextManager[ForkServer | None]]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Recorded state of a started stage. Hashes come from :func:`model_hash`."""

    stage: str
    began_with: str | None
    """Hash of the earlier stage's model, from which this stage started. None: it started from the configured model."""
    model: str | None = None
    """Hash of the trained model. None: the stage has not finished, or it trains no model."""
    finished: bool = False

    @classmethod
    def load(cls, folder: Path) -> StageRecord | None:
        """Return the record in a run's folder, or None if no record exists.

        Raises:
            CommandError: The record cannot be read.
        """
        path = folder / RECORD_FILE
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CommandError(
                f"{path} is not a valid record of this stage ({error}); restore it, or start over with --fresh"
            ) from error

    def save(self, folder: Path) -> None:
        """Write the record into a run's folder atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / RECORD_FILE, json.dumps(asdict(self), indent=1).encode())


def model_hash(folder: Path) -> str | None:
    """Return the SHA-256 of the weights and configuration of a Hugging Face folder, or None if the folder has
    neither.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def run_stages(stages: Sequence[Stage], arguments: argparse.Namespace, fork_server: ForkServers) -> int:
    """Run the unfinished stages in order. Return the exit code of the last stage that ran, or 0 if all had finished.

    The command ends after a stage that does not finish, because the model for the next stage does not exist.

    Raises:
        CommandError: A started stage does not match the current models, or ``--from`` was given.
    """
    if arguments.start:
        folders = ", ".join(str(stage.config.path) for stage in stages)
        raise CommandError(f"--from works within one stage: give the stage's folder, one of {folders}")
    if arguments.fresh:
        check(stages[0].config, arguments, stages[0].name)  # before a folder is moved
        for stage in stages:
            for line in discard_earlier_run(stage.config, RunFolder(stage.config)):
                print(line)
    stage_arguments = argparse.Namespace(**{**vars(arguments), "fresh": False})
    models = {stage.name: final_model(stage.config) for stage in stages}
    for number, stage in enumerate(stages, start=1):
        began_with = None if stage.begins_with is None else model_hash(models[stage.begins_with])
        title = f"stage {number} of {len(stages)}, {stage.name}"
        if _has_finished(stage, began_with):
            print(f"{title}: has finished, in {stage.config.path}")
            continue
        print(f"{title}: {_beginning(stage)}\n{_shown(stage.config)}", flush=True)
        StageRecord(stage.name, began_with).save(stage.config.path)
        with fork_server() as server:
            code = run_configured(stage.config, stage_arguments, server, stage.name)
        if code != TRAINED:
            remaining = ", ".join(later.name for later in stages[number:])
            print(f"{title}: not finished" + (f"; stages not started: {remaining}" if remaining else ""))
            return code
        trained = model_hash(models[stage.name]) if stage.config.mode in TRAINING_MODES else None
        StageRecord(stage.name, began_with, trained, finished=True).save(stage.config.path)
    return TRAINED


def _has_finished(stage: Stage, began_with: str | None) -> bool:
    """Return whether a stage has finished and is skipped. Print a warning for each setting that has changed since then.

    Raises:
        CommandError: The stage started from a model that has since changed, or its trained model has changed.
    """
    folder = RunFolder(stage.config)
    record = StageRecord.load(folder.path)
    if record is None:
        return False
    if record.began_with != began_with:
        raise CommandError(
            f"stage {stage.name} in {folder.path} was started from another model than the present final model of "
            f"stage {stage.begins_with} in {stage.config.model.model_path}: restore the earlier model, or retrain "
            "all stages with --fresh"
        )
    if not record.finished:
        return False
    if record.model is not None and record.model != model_hash(final_model(stage.config)):
        raise CommandError(
            f"stage {stage.name} has finished, and the model it left in {final_model(stage.config)} was changed or "
            "removed since: restore it, or retrain all stages with --fresh"
        )
    for change in folder.changes():
        print(f"warning: stage {stage.name} has finished, so this change has no effect: {change}")
    return True


def _beginning(stage: Stage) -> str:
    model = "the configured model" if stage.begins_with is None else f"the model of stage {stage.begins_with}"
    return f"mode {stage.config.mode}, algorithm {stage.config.algorithm.algorithm_type}, begins with {model}"


def _shown(config: Config) -> str:
    """Return the non-default settings of a stage as indented YAML, without the broker URL, which may hold a
    password.
    """
    data = config.model_dump(mode="json", exclude_defaults=True)
    data.get("broker", {}).pop("url", None)
    return textwrap.indent(yaml.safe_dump(data, sort_keys=False), "    ").rstrip()

"""Starts a run that was started before: extends a finished run by more batches, returns to a checkpoint, or starts
over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from trinity_mq.bus.addresses import Addresses
from trinity_mq.config import Config, ExperienceBufferConfig
from trinity_mq.data.records import Record, check_records_unchanged, read_records
from trinity_mq.dispatch.tickets import sort_batch_id
from trinity_mq.errors import CommandError
from trinity_mq.observability.report.text import saved_checkpoints
from trinity_mq.operations.clean import delete_run, saved_tickets
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import Target
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.training.checkpoints.benchmarked import checksums
from trinity_mq.training.checkpoints.checkpoint import CheckpointError, choose, find_by_name

HOW_TO_GO_ON = "to continue training, request more batches (buffer.total_steps=N); to start over, add --fresh"


def describe_extension(config: Config, changes: Sequence[str]) -> str | None:
    """Return a line that describes how a finished run continues because the configuration now asks for more batches or,
    in mode bench, because checkpoints are new or have changed. Return None if the run has nothing to do.

    Args:
        config: The configuration of this start.
        changes: Settings that changed since the last start.

    Raises:
        CommandError: Changed settings would have no effect on the finished run.
    """
    if config.mode == "bench":
        return _more_checkpoints(config)
    if not changes:
        return None
    opened, total = _lengths(config)
    if total is None or total <= opened:
        raise CommandError(
            f"run {config.name!r} has finished after {opened} batches, so these settings would have no effect: "
            f"{'; '.join(changes)}. Leave them out to see its report; {HOW_TO_GO_ON}"
        )
    schedule = "; the learning rate decays over the new length" if config.learning_rate_falls else ""
    return f"this run had finished after {opened} batches and continues to batch {total}{schedule}"


def _more_checkpoints(config: Config) -> str | None:
    from trinity_agents.explorer.state import StateFile

    done = StateFile.of(config.path).load().benchmarked
    labels = [label for label, checksum in checksums(config).items() if done.get(str(label)) != checksum]
    if not labels:
        return None
    names = ", ".join(map(str, labels))
    return f"checkpoints {names} are new or have changed since their evaluation, and will be evaluated"


def rewind_to_checkpoint(config: Config, name: str) -> list[str]:
    """Make the trainer resume from the checkpoint ``name`` and the explorer wait for it, even if the run had finished.
    Return lines for a person.

    Raises:
        CommandError: No such checkpoint exists.
        FatalError: The explorer's state cannot be read or written.
    """
    from trinity_agents.explorer.state import StateFile

    folder = config.path / "checkpoints"
    try:
        checkpoint = find_by_name(folder, name)
        file = StateFile.of(config.path)
        state = file.load()
        if state.finished:
            # the batches stay the same, but the final weights may change: repeat the final evaluation
            state.finished = False
            state.evaluated = [label for label in state.evaluated if sort_batch_id(label)[0] != state.opened]
            run_until_complete(file.save(state))
        choose(folder, checkpoint)
    except CheckpointError as error:
        raise CommandError(f"--from: {error}") from error
    later = state.opened - checkpoint.state.progress
    return [f"resumes from {checkpoint.title}; up to {max(later, 0)} later batches are trained on again"]


def check_data_unchanged(config: Config) -> None:
    """Check that the data are unchanged since the first start of the run, using its saved position in the data.

    Raises:
        FatalError: The data have changed, or a saved state cannot be read.
    """
    from trinity_agents.explorer.state import StateFile
    from trinity_agents.explorer.task_source import open_training

    saved = StateFile.of(config.path).load().taskset
    if saved and (taskset := open_training(config)) is not None:
        taskset.restore(saved)
    checkpoints = saved_checkpoints(config.path)
    if not checkpoints or (config.mode == "train" and config.source.tap):
        return
    source, data = checkpoints[0].state.source, config.buffer.trainer_input
    positions = [(records, source.get("experts", {})) for records in data.auxiliary_buffers.values()]
    for records, position in [(data.experience_buffer, source)] if config.mode == "train" else positions:
        if "identity" in position:
            _check_records(records, position["identity"])


def _check_records(data: ExperienceBufferConfig, saved: str) -> None:
    rows: list[Record] = []
    if data.schema_type == "experience":
        from trinity_agents.trainer.sources.records import recorded  # imports torch

        identity = recorded(data)[1]
    else:
        rows, identity = read_records(data)
    check_records_unchanged(f"training data {data.name!r}", data, saved, rows, identity)


def discard_earlier_run(config: Config, folder: RunFolder) -> list[str]:
    """Delete the run's remains on a shared broker and move its folder aside. Return lines for a person.

    Raises:
        CommandError: A process holds the run folder, the run is active on the broker, the blob store does not answer,
            or the folder cannot be moved. BusRefused, BusUnavailable: The broker refuses the login, or cannot be
            reached.
    """
    if not folder.path.exists() and Addresses.of(config.broker) is None:
        return []
    lines: list[str] = []
    with folder.locked():
        broker = Addresses.of(config.broker)
        if broker is not None:  # a private broker lies in the folder
            tickets: list[str] = []
            with contextlib.suppress(FatalError):  # without a readable state, the broker's messages still name tickets
                tickets = saved_tickets(config)
            url = config.broker.model_copy(update={"url": broker.text(), "url_file": None})
            lines += run_until_complete(delete_run(Target(config.name, url, config), tickets))
        if folder.config_file.exists():
            lines.append(f"the earlier run is in {folder.move_aside()}")
    return lines


def _lengths(config: Config) -> tuple[int, int | None]:
    """Return (the number of opened batches, the number of batches of the whole run or None if unknown). Mode train
    opens no batches: there the first number is the trainer's progress.
    """
    if config.mode == "train":
        from trinity_agents.trainer.history import last_progress

        return last_progress(config.path / "history"), config.buffer.total_steps

    from trinity_agents.explorer.state import StateFile
    from trinity_agents.explorer.task_source import open_tasksets, run_length

    state = StateFile.of(config.path).load()
    taskset = open_tasksets(config)[0]
    return state.opened, run_length(config, state, None if taskset is None else len(taskset))

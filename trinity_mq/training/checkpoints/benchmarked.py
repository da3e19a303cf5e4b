"""Selects the checkpoints that mode ``bench`` evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trinity_mq.config import Config
from trinity_mq.training.checkpoints.checkpoint import Checkpoint, CheckpointError, DamagedCheckpoint, find_checkpoints

FIRST = 0
"""Label of the first model, which has no checkpoint."""
FIRST_MODEL = "first model"
"""Stands for the checksum of the first model's weights."""


def select_checkpoints(config: Config) -> Mapping[int, Checkpoint | None]:
    """Return the checkpoints that ``bench.checkpoints`` selects, by label, in the order of their labels. The label is
    the number of batches that a checkpoint was trained on. The first model is None; ``all`` includes it if
    ``explorer.eval_on_startup`` is set.

    Raises:
        CheckpointError: The folder has no checkpoint, lacks a requested checkpoint, or cannot be read.
    """
    folder, selection = Path(config.bench.run) / "checkpoints", config.bench.checkpoints
    try:
        whole, damaged = find_checkpoints(folder) if folder.is_dir() else ([], [])
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {error.strerror or error}") from error
    there: dict[int, Checkpoint | None] = {
        checkpoint.state.progress: checkpoint for checkpoint in sorted(whole, key=_progress)
    }
    if selection == (FIRST,):
        return {FIRST: None}
    if not there:
        raise CheckpointError(
            f"bench.run: no checkpoint to evaluate in {folder}{_damage_note(damaged)}: "
            "give the folder of a run that saved one, or bench.checkpoints=[0] for the first model alone"
        )
    if selection == "latest":
        label = max(there)
        return {label: there[label]}
    first: dict[int, Checkpoint | None] = {FIRST: None}
    if selection == "all":
        return (first if config.explorer.eval_on_startup else {}) | there
    if missing := sorted(set(selection) - set(there) - {FIRST}):
        raise CheckpointError(
            f"bench.checkpoints: {', '.join(map(str, missing))} not among the checkpoints in {folder}, which are "
            f"{', '.join(map(str, there))}{_damage_note(damaged)}; older ones were deleted "
            "(trainer.max_checkpoints_to_keep, trainer.keep_every)"
        )
    return {label: (first | there)[label] for label in sorted(set(selection))}


def checksums(config: Config) -> Mapping[int, str]:
    """Return an identifier of the weights of each checkpoint that mode ``bench`` evaluates, by label: the checksum, the
    title if the checksum is unknown, or :data:`FIRST_MODEL`. Empty in other modes.

    Raises:
        CheckpointError: As in :func:`select_checkpoints`.
    """
    if config.mode != "bench":
        return {}
    checkpoints = select_checkpoints(config)
    return {
        label: FIRST_MODEL if checkpoint is None else checkpoint.weights or checkpoint.title
        for label, checkpoint in checkpoints.items()
    }


def _progress(checkpoint: Checkpoint) -> int:
    return checkpoint.state.progress


def _damage_note(damaged: list[DamagedCheckpoint]) -> str:
    return (
        f" ({'; '.join(f'{checkpoint.path.name} is damaged: {checkpoint.reason}' for checkpoint in damaged)})"
        if damaged
        else ""
    )

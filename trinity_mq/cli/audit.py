"""``trinity-mq audit``: proves which experiences a checkpoint was trained on, and that each was used once."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.bus import BusError
from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.errors import CommandError
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import Target, find_target, open_streams, saved_run_id
from trinity_mq.targets.target import load_target_configuration
from trinity_mq.training.checkpoints.checkpoint import Checkpoint, CheckpointError, find_by_name, find_checkpoints

if TYPE_CHECKING:
    from trinity_agents.trainer.audit import Auditor
    from trinity_mq.proof.record import Record

FOUND_FAULTS = 1
SIGNS = {"holds": "ok", "fault": "FAULT", "not checked": "not checked"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq audit``."""
    add_target(parser)
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="such as step-120 or progress-120, or all (default: the newest)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a checkpoint")
    parser.add_argument("--offline", action="store_true", help="read only the run's folder, without the broker")
    add_broker(parser)
    parser.epilog = "exit codes: 0 no fault found; 1 a fault found; 2 there is nothing to check"


def audit(arguments: argparse.Namespace) -> int:
    """Check checkpoints of a run against its history and, unless ``--offline``, against the ``ready`` stream. Print the
    results. Return 1 if a fault was found, else 0, also if the stream could not be read.
    """
    from trinity_agents.trainer.audit import Auditor, as_json, verdict

    config = load_target_configuration(arguments)
    run_id = saved_run_id(config.path)
    audits = [Auditor(config.path, checkpoint) for checkpoint in _checkpoints(config.path, arguments.checkpoint)]
    for auditor in audits:
        auditor.check_folder(run_id)
    with contextlib.redirect_stdout(sys.stderr):  # keep the library's log output out of the report
        record, reason = _stream_content(arguments)
    for auditor in audits:
        if record is None:
            auditor.leave_out("stream", reason)
        else:
            auditor.check_stream(record)
    for auditor in audits:
        if arguments.json:
            print(json.dumps({"run": config.name, **as_json(auditor)}))
        else:
            _print(auditor)
    print(verdict(audits), file=sys.stderr if arguments.json else sys.stdout)
    return FOUND_FAULTS if any(auditor.has_faults for auditor in audits) else 0


def _checkpoints(run_folder: Path, name: str | None) -> list[Checkpoint]:
    """Return the checkpoints to check, newest first.

    Raises:
        CommandError: The run has not saved a checkpoint, or the named checkpoint is missing.
    """
    folder = run_folder / "checkpoints"
    try:
        if name not in {None, "all"}:
            return [find_by_name(folder, str(name))]
        whole, damaged = find_checkpoints(folder) if folder.is_dir() else ([], [])
    except (CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    for checkpoint in damaged:
        print(f"{checkpoint.path.name} is damaged and left out: {checkpoint.reason}", file=sys.stderr)
    if not whole:
        raise CommandError(f"{folder} holds no checkpoint to check: has the run saved one yet?")
    return whole if name == "all" else whole[:1]


def _print(auditor: Auditor) -> None:
    state = auditor.checkpoint.state
    print(
        f"{auditor.checkpoint.path}: generation {state.generation}, step {state.step}, {state.progress} batches, "
        f"{len(auditor.uids)} experiences"
    )
    width = max(len(check.name) for check in auditor.checks)
    for check in auditor.checks:
        print(f"  {SIGNS[check.result]:<11}  {check.name:<{width}}  {check.text}")


# -- the ready stream


def _stream_content(arguments: argparse.Namespace) -> tuple[Record | None, str]:
    """Return the content of the run's ``ready`` stream, or None and the reason why it is not available."""
    if arguments.offline:
        return None, "skipped (--offline)"
    try:
        target = find_target(arguments)
        return run_until_complete(_read(target)), ""
    except (CommandError, FatalError, BusError, OSError) as error:
        return None, f"the stream of processed batches cannot be read: {error}"


async def _read(target: Target) -> Record:
    from trinity_mq.proof.record import read_sets

    async with open_streams(target, "audit") as (bus, topology, store):
        if await bus.depth(topology.ready.name) is None:
            raise CommandError(f"run {target.run!r} has no stream on this broker")
        return await read_sets(bus, topology, store)

"""``trinity-mq audit``: proves which experiences a checkpoint was trained on, and that each was used once."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING

from trinity_mq.bus import BusError
from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.errors import CommandError
from trinity_mq.operations.audit import checkpoints, read_content
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import Target, find_target, open_bus, saved_run_id
from trinity_mq.targets.target import load_target_configuration

if TYPE_CHECKING:
    from trinity_agents.trainer.audit import Auditor, StreamContent

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
    """Check checkpoints of a run against its history and the ``ready`` stream, and print the results. Return 1 if a
    fault was found.
    """
    from trinity_agents.trainer.audit import Auditor, as_json, verdict

    config = load_target_configuration(arguments)
    run_id = saved_run_id(config.path)
    audits = [Auditor(config.path, checkpoint) for checkpoint in checkpoints(config.path, arguments.checkpoint)]
    for auditor in audits:
        auditor.check_folder(run_id)
    with contextlib.redirect_stdout(sys.stderr):  # keep the library's log output out of the report
        content, reason = _stream_content(arguments, run_id)
    for auditor in audits:
        if content is None:
            auditor.leave_out("stream", reason)
        else:
            auditor.check_stream(content)
    for auditor in audits:
        if arguments.json:
            print(json.dumps({"run": config.name, **as_json(auditor)}))
        else:
            _print(auditor)
    print(verdict(audits), file=sys.stderr if arguments.json else sys.stdout)
    return FOUND_FAULTS if any(auditor.has_faults for auditor in audits) else 0


def _print(auditor: Auditor) -> None:
    state = auditor.checkpoint.state
    print(
        f"{auditor.checkpoint.path}: generation {state.generation}, step {state.step}, {state.progress} batches, "
        f"{len(auditor.uids)} experiences"
    )
    width = max(len(check.name) for check in auditor.checks)
    for check in auditor.checks:
        print(f"  {SIGNS[check.result]:<11}  {check.name:<{width}}  {check.text}")


# -- the stream


def _stream_content(arguments: argparse.Namespace, run_id: str | None) -> tuple[StreamContent | None, str]:
    """Return the content of the run's ``ready`` stream, or None and the reason why it is not available."""
    if arguments.offline:
        return None, "skipped (--offline)"
    try:
        target = find_target(arguments)
        return run_until_complete(_read(target, run_id)), ""
    except (CommandError, FatalError, BusError, OSError) as error:
        return None, f"the stream of processed batches cannot be read: {error}"


async def _read(target: Target, run_id: str | None) -> StreamContent:
    from trinity_mq.transport.blobs import open_store

    async with open_bus(target, "audit") as (bus, topology):
        bus.run_id = run_id
        if await bus.depth(topology.ready.name) is None:
            raise CommandError(f"run {target.run!r} has no stream on this broker")
        return await read_content(bus, topology, open_store(target.broker, target.run))

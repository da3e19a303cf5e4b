"""``trinity-mq audit``: proves which experiences a checkpoint was trained on, and that each was used once."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.bus import Bus, BusError, Delivery, Topology
from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.cli.broker.connection import Target, find_target, reached, saved_run_id
from trinity_mq.cli.errors import CommandError
from trinity_mq.cli.interrupts import run_to_the_end
from trinity_mq.cli.target import configuration
from trinity_mq.runtime.errors import FatalError
from trinity_mq.training.checkpoints.checkpoint import Checkpoint, CheckpointError, find_checkpoints, named

if TYPE_CHECKING:
    from trinity_agents.trainer.audit import Auditor, StreamContent
    from trinity_mq.transport.blobs import BlobStore

FOUND_FAULTS = 1
SIGNS = {"holds": "ok", "fault": "FAULT", "not checked": "not checked"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq audit``."""
    add_target(parser)
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="such as step-120 or progress-120, or all (default: the newest)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a checkpoint")
    parser.add_argument("--offline", action="store_true", help="look at the run's folder only, and at no broker")
    add_broker(parser)
    parser.epilog = "exit codes: 0 no fault found; 1 a fault found; 2 there is nothing to check"


def audit(arguments: argparse.Namespace) -> int:
    """Check checkpoints of a run against its history and the ``ready`` stream, and print the results. Return 1 if a
    fault was found.
    """
    from trinity_agents.trainer.audit import Auditor, as_json, verdict

    config = configuration(arguments)
    run_id = saved_run_id(config.path)
    audits = [Auditor(config.path, checkpoint) for checkpoint in _checkpoints(config.path, arguments.checkpoint)]
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


def _checkpoints(run_folder: Path, name: str | None) -> list[Checkpoint]:
    """Return the checkpoints to check, newest first.

    Raises:
        CommandError: There is no checkpoint.
    """
    folder = run_folder / "checkpoints"
    try:
        if name not in {None, "all"}:
            return [named(folder, str(name))]
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


# -- the stream


def _stream_content(arguments: argparse.Namespace, run_id: str | None) -> tuple[StreamContent | None, str]:
    """Return the content of the run's ``ready`` stream, or None and the reason why it is not available."""
    if arguments.offline:
        return None, "not asked for (--offline)"
    try:
        target = find_target(arguments)
        return run_to_the_end(_read(target, run_id)), ""
    except (CommandError, FatalError, BusError, OSError) as error:
        return None, f"the stream of processed batches cannot be read: {error}"


async def _read(target: Target, run_id: str | None) -> StreamContent:
    from trinity_mq.transport.blobs import open_store

    async with reached(target, "audit") as (bus, topology):
        bus.run_id = run_id
        if await bus.depth(topology.ready.name) is None:
            raise CommandError(f"run {target.run!r} has no stream on this broker")
        return await read_content(bus, topology, open_store(target.broker, target.run))


async def read_content(bus: Bus, topology: Topology, store: BlobStore | None) -> StreamContent:
    """Return the current content of a run's ``ready`` stream. Only the experience ids of chunks are kept.

    Raises:
        BusUnavailable: The stream does not answer.
    """
    from trinity_mq.bus.streams import read_up_to_now
    from trinity_mq.runtime.deliveries import new_mark

    reader = StreamReader(store)
    stream = dataclasses.replace(topology.ready, redeclare=False)  # an audit must not create the stream
    async for delivery in read_up_to_now(bus, stream, new_mark(), offset=0):
        if not bus.is_foreign(delivery):
            await reader.take(delivery)
    return reader.content


class StreamReader:
    """Collects the complete sets of a stream, delivery by delivery. Only the experience ids of chunks are kept."""

    def __init__(self, store: BlobStore | None) -> None:
        from trinity_agents.trainer.audit import StreamContent

        self.content = StreamContent()
        self._store = store
        self._begun = False
        self._chunks: defaultdict[tuple[str, str], dict[int, list[str] | None]] = defaultdict(dict)
        self._tickets: set[str] = set()

    async def take(self, delivery: Delivery) -> None:
        """Process the next delivery."""
        from trinity_agents.trainer.audit import StreamSet
        from trinity_mq.messages import BatchReady, DecodeError, decode_any
        from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE

        assert delivery.offset is not None
        if not self._begun:
            self._begun, self.content.begins = True, delivery.offset
        if delivery.content_type in {EXPERIENCES, REFERENCE}:
            ticket, op, n = (delivery.headers.get(name) for name in ("ticket", "op", "n"))
            if isinstance(ticket, str) and isinstance(op, str) and isinstance(n, int):
                chunks = self._chunks[ticket, op]
                if n not in chunks:
                    chunks[n] = await self._uids(delivery)
            return
        try:
            message = decode_any(delivery.body, delivery.content_type)
        except DecodeError:
            return  # the trainer has already reported it
        if not isinstance(message, BatchReady):
            return
        key = message.ticket, message.op
        chunks = self._chunks.get(key, {})
        if key in self.content.sets or any(n not in chunks for n in range(message.chunks)):
            return
        chunk_ids = [chunks[n] for n in range(message.chunks)]
        uids = None if None in chunk_ids else frozenset(uid for chunk in chunk_ids for uid in chunk or ())
        is_first = message.ticket not in self._tickets
        self.content.sets[key] = StreamSet(delivery.offset, is_first, uids, message.other_chain)
        self._tickets.add(message.ticket)

    async def _uids(self, delivery: Delivery) -> list[str] | None:
        """Return the experience ids in a chunk; None if it cannot be read."""
        from trinity_mq.experience import DecodeError, ExperienceBatch
        from trinity_mq.transport.blobs import StoreUnavailable, resolve

        def read() -> list[str]:
            body = resolve(self._store, delivery.body, delivery.content_type)
            return list(ExperienceBatch.decode(body).settle().ids("uid"))

        try:
            return await asyncio.to_thread(read)
        except (DecodeError, StoreUnavailable):
            return None

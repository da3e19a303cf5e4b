"""``trinity-mq broker clean``: deletes the queues, exchanges and blobs of a run that will not resume."""

from __future__ import annotations

import argparse

from trinity_mq.cli.arguments import add_blob_store, add_broker, add_target
from trinity_mq.operations.clean import delete_run, saved_tickets
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import find_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq clean``, which is also ``trinity-mq broker clean``."""
    add_target(parser)
    add_broker(parser)
    add_blob_store(parser)


def clean(arguments: argparse.Namespace) -> int:
    """Delete the queues, exchanges and blobs of a run whose explorer and trainer do not run. Return 0."""
    target = find_target(arguments, arguments.blob_store)
    tickets = [] if target.config is None else saved_tickets(target.config)
    for line in run_until_complete(delete_run(target, tickets)):
        print(line)
    return 0

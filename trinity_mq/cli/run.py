"""``trinity-mq run``: runs everything on this machine, from a configuration to a report.

This module imports little at the top, so that the fork server starts first and imports its modules concurrently.
"""

from __future__ import annotations

import argparse
import contextlib

from trinity_mq.cli.arguments import add_target
from trinity_mq.launch.exit_codes import EPILOG
from trinity_mq.runtime.processes.fork_server_process import ForkServer

PRELOADED = (
    "torch",
    "uvloop",
    "trinity_mq.bus.rabbit.bus",
    "trinity_mq.cli.agents",
    "tensorboard.summary.writer.event_file_writer",
    # these agents need none of the modules below, and start while those are imported
    "trinity_agents.operator.agent=operator",
    "trinity_agents.runner.agent=runner",
    "torch._dynamo",  # transformers and torch's optimizers import this module
    # modules that transformers imports when it builds a model of any architecture
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "transformers.processing_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "trinity_mq.engines.host.host",
    "trinity_agents.explorer.agent=explorer",
    "trinity_mq.engines.torch.generator",
    "trinity_mq.engines.server.server",
    "trinity_agents.engine.agent",
    "trinity_agents.gateway.agent",
    "trinity_mq.sync.channels.collective.channel",
    "trinity_agents.trainer.agent",
)
"""Modules that the fork server imports, in this order. It forks agents of ``ROLE`` once ``MODULE=ROLE`` is imported,
and all other agents at the end. Garbage is collected after each import. The modules are listed by name because the
command line must not import the daemons, which import torch.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq run``."""
    add_target(parser)
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live table")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over: move the run's folder aside, delete its queues and exchanges, begin with batch 1",
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="CHECKPOINT",
        help="resume from this checkpoint, such as step-120 or progress-120, and train on the later batches again",
    )
    parser.add_argument("--attached", action="store_true", help="drain when the standard input is closed")
    parser.epilog = EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Run a configuration, or the stages of a file one after another, to the end. Return a code of
    :mod:`trinity_mq.launch.exit_codes`, 130 or 143.
    """
    with _fork_server() as server:
        from trinity_mq.launch.configured_run import run_configured
        from trinity_mq.targets.target import load_target_configuration, load_target_stages

        stages = load_target_stages(arguments)
        if not stages:
            return run_configured(load_target_configuration(arguments), arguments, server)
    from trinity_mq.launch.stages import run_stages

    return run_stages(stages, arguments, _fork_server)


def serve(arguments: argparse.Namespace) -> int:
    """Run a configuration in mode ``serve``. The exit codes are the same as for :func:`run`."""
    arguments.overrides = ["mode=serve", *arguments.overrides]
    return run(arguments)


def _fork_server() -> contextlib.AbstractContextManager[ForkServer | None]:
    try:
        return ForkServer.start(PRELOADED)
    except OSError:  # fork is not available, or the socket cannot be created: agents start as separate commands
        return contextlib.nullcontext()

"""``trinity-mq node``: runs this machine's part of a run on several machines."""

from __future__ import annotations

import argparse
import asyncio
import socket
from functools import partial

from trinity_mq.cli.arguments import add_target
from trinity_mq.launch.nodes import NodeLayout, run_node
from trinity_mq.targets.target import load_target_configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq node``."""
    add_target(parser)
    parser.add_argument(
        "--trainers",
        required=True,
        metavar="HOST,HOST",
        help="machines with trainer.nproc trainer processes each; the first has rank 0",
    )
    parser.add_argument(
        "--engines",
        default="",
        metavar="HOST,HOST",
        help="machines with explorer.rollout_model.engine_num engines each; the first also runs explorer, runners and "
        "operators (default: these are started in another way)",
    )
    parser.add_argument(
        "--host", default=socket.gethostname(), help="this machine, as in the lists (default: its name)"
    )
    parser.add_argument("--port", type=int, default=29400, help="port of the trainers' rendezvous (default: 29400)")


def node(arguments: argparse.Namespace) -> int:
    """Run this machine's part until the run is over; return the highest exit code of its processes."""
    lists = (arguments.trainers, arguments.engines)
    trainers, engines = (tuple(filter(None, map(str.strip, words.split(",")))) for words in lists)
    layout = NodeLayout(trainers=trainers, engines=engines, port=arguments.port)
    config = load_target_configuration(arguments)
    target = (arguments.target, *arguments.overrides)
    return asyncio.run(run_node(config, target, layout, arguments.host, partial(print, flush=True)))

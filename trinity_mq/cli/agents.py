"""``trinity-mq explorer|runner|operator|trainer|gateway``: runs a single agent.

``trinity-mq explorer --engines-only`` runs no explorer: it hosts further engines for a run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
from typing import cast

from trinity_mq.bus.addresses import URL_VARIABLE, Addresses
from trinity_mq.cli.arguments import add_target
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import load_target_configuration, name_of_host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command that runs an agent. The last word of ``parser.prog`` is the agent's role."""
    add_target(parser)
    role = parser.prog.rpartition(" ")[2]
    parser.add_argument("--id", help=f"its name among the agents of the run (default: {role}-0)")
    if role == "explorer":
        parser.add_argument(
            "--engines-only",
            action="store_true",
            help="host further engines for a run whose explorer is elsewhere, and schedule nothing "
            "(default name: engines-HOSTNAME)",
        )


def run_agent(arguments: argparse.Namespace) -> int:
    """Run an agent of the role that the command names, or with ``--engines-only`` host further engines, until the work
    is over. Return the exit code.
    """
    config = load_target_configuration(arguments)
    if Addresses.of(config.broker) is None and (url := RunFolder(config).saved_broker_url()) is not None:
        os.environ[URL_VARIABLE] = url
    # imported by name, because the command line must not import the daemons, which import torch
    if getattr(arguments, "engines_only", False):
        module = importlib.import_module("trinity_agents.explorer.engine_hosting")
        return cast("int", module.host_engines(config, agent_id(arguments.id or "engines-{host}")))
    module = importlib.import_module(f"trinity_agents.{arguments.command}.agent")
    return cast("int", module.main(config, agent_id(arguments.id or f"{arguments.command}-0")))


def agent_id(pattern: str) -> str:
    """Return ``pattern`` with this machine's host name for ``{host}``. The result is the same after a restart, and
    different on another machine or in another container.
    """
    return pattern.replace("{host}", name_of_host(socket.gethostname()))

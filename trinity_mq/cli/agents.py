"""``trinity-mq explorer|runner|operator|trainer``: one agent by itself."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
from typing import cast

from trinity_mq.bus.connect import URL_VARIABLE
from trinity_mq.cli.target import known_broker
from trinity_mq.config import load_config


def run_agent(arguments: argparse.Namespace) -> int:
    """Run the agent named by the command until its work is over; return its exit code."""
    config = load_config(arguments.config, arguments.overrides)
    url = known_broker(config)
    if url is not None:
        os.environ[URL_VARIABLE] = url
    # by name: the command line must not import the daemons, which import torch
    module = importlib.import_module(f"trinity_agents.{arguments.command}")
    if getattr(arguments, "engines_only", False):
        return cast("int", module.host_engines(config, arguments.id or host_name()))
    return cast("int", module.main(config, arguments.id or f"{arguments.command}-0"))


def host_name() -> str:
    """Return what this machine's host of engines is called: the same after a restart, another on another machine."""
    return f"engines-{re.sub('[^a-z0-9]+', '-', socket.gethostname().lower()).strip('-')[:40] or 'host'}"

"""``trinity-mq explorer|runner|operator|trainer``: one agent by itself."""

from __future__ import annotations

import argparse
import importlib
import os
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
    return cast("int", module.main(config, arguments.id or f"{arguments.command}-0"))

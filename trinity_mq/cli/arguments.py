"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Run = Callable[[argparse.Namespace], int]


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG`` and the settings that override it."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as examples/arithmetic.yaml")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="settings over those of the file, such as buffer.total_steps=10",
    )


def add_broker(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add ``--broker``, and ``more`` names for it."""
    parser.add_argument(
        "--broker",
        *more,
        metavar="URL",
        help="amqp://user:password@host:port/vhost (default: the run's, else TRINITY_MQ_BROKER_URL)",
    )


def add_run_or_config(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG``, ``--run`` and ``--broker``, which name a run and its broker."""
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="the run's YAML file; else give --run")
    parser.add_argument("--run", metavar="NAME", help="the run's name, instead of CONFIG")
    add_broker(parser)


def add_actions(parser: argparse.ArgumentParser) -> Callable[[str, str, Run], argparse.ArgumentParser]:
    """Give ``parser`` actions of its own; return the function that adds one: its name, its help and what it runs."""
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=argparse.ArgumentParser
    )

    def add(name: str, words: str, run: Run) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        action.set_defaults(function=run)
        return action

    return add

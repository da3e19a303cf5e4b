"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Run = Callable[[argparse.Namespace], int]


def add_target(parser: argparse.ArgumentParser, also: str = "", *, optional: bool = False) -> None:
    """Add ``TARGET``, which names a run (``also`` something else), and the settings over those of its configuration."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?" if optional else None,
        help=" ".join(["a YAML file such as examples/arithmetic.yaml, a run's folder, or a run's name", also]).strip(),
    )
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="settings over those of the file or folder, such as buffer.total_steps=10",
    )


def add_broker(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add ``--broker``, and ``more`` names for it."""
    parser.add_argument(
        "--broker",
        *more,
        metavar="URL",
        help="amqp://user:password@host:port/vhost (default: the run's, else TRINITY_MQ_BROKER_URL)",
    )


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

"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

Run = Callable[[argparse.Namespace], int]
_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL)
_OPTION = re.compile(r"--[a-z][a-z-]*")


class Parser(argparse.ArgumentParser):
    """A parser whose errors about an unknown command, action or option name similar words."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with code 2."""
        from trinity_mq.errors import suggest
        from trinity_mq.telemetry import mask_passwords

        if match := _INVALID_CHOICE.search(message):
            choices = [choice.strip(" '") for choice in match["choices"].split(",")]
            message = f"{message[: match.start()]}no {match['word']!r}; {suggest(match['word'], choices)}"
        elif message.startswith("unrecognized arguments:") and (option := _OPTION.search(message)):
            message += f"; {suggest(option[0], dict.fromkeys(_OPTION.findall(self.format_help())), 'options:')}"
        super().error(mask_passwords(message))


def add_target(parser: argparse.ArgumentParser, also: str = "", *, optional: bool = False) -> None:
    """Add ``TARGET``, which names a run, and settings that override its configuration. ``also`` is added to the help of
    ``TARGET``. With ``optional``, the command line may leave ``TARGET`` out.
    """
    target = parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?" if optional else None,
        help=" ".join(
            ["a YAML file, a shipped example such as example:arithmetic, a run's folder, or a run's name", also]
        ).strip(),
    )
    target.completer = complete_target  # type: ignore[attr-defined]  # read by argcomplete
    overrides = parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="settings that override the file or folder, such as buffer.total_steps=10",
    )
    overrides.completer = complete_setting  # type: ignore[attr-defined]


def complete_target(prefix: str, **_: Any) -> Iterator[str]:
    """Yield YAML files and folders that begin with ``prefix``, the names of all runs, and for a non-empty ``prefix``
    all examples. The caller, argcomplete, drops words that do not begin with ``prefix``.
    """
    from argcomplete.completers import FilesCompleter

    from trinity_mq.config.loading.examples import EXAMPLE, example_names
    from trinity_mq.targets.target import run_names

    yield from FilesCompleter(("yaml", "yml"))(prefix)
    yield from run_names()
    if prefix:  # without it the examples would hide the user's own files
        yield from (f"{EXAMPLE}{name}" for name in example_names())


def complete_setting(**_: Any) -> Iterator[str]:
    """Yield ``KEY=`` for each setting. The key of a setting of list items names the first item."""
    from trinity_mq.config.settings_table import all_settings

    for setting in all_settings():
        yield f"{setting.key.replace('<n>', '0')}="


def add_broker(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add ``--broker``, with ``more`` as alternative names."""
    parser.add_argument(
        "--broker",
        *more,
        metavar="URL",
        help="amqp://user:password@host:port/vhost (default: the run's broker, else TRINITY_MQ_BROKER_URL)",
    )


def add_blob_store(parser: argparse.ArgumentParser) -> None:
    """Add ``--blob-store``."""
    parser.add_argument(
        "--blob-store",
        metavar="URL",
        help="blob store with the large bodies (default: broker.blob_store of the YAML file)",
    )


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add ``--tokenizer``."""
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder with a tokenizer.json (default: the run's model)")


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add ``--host`` and ``--port`` of a server."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=port, help="port to listen on; 0: a free one (default: %(default)s)"
    )


def check_least(arguments: argparse.Namespace, **least: int) -> None:
    """Check that the values of options are not too small. An option whose value is None is not checked.

    Raises:
        CommandError: The value of an option is below its minimum in ``least``, which is by option name.
    """
    from trinity_mq.errors import CommandError

    for name, lowest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise CommandError(f"--{name} is {value:g}, wanted at least {lowest}")


def add_actions(
    parser: argparse.ArgumentParser, *, required: bool = True
) -> Callable[[str, str, Run], argparse.ArgumentParser]:
    """Add subcommands to ``parser``, and return the function that adds one action: its name, its help and its
    function.
    """
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=required, parser_class=Parser)

    def add(name: str, words: str, run: Run) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        action.set_defaults(function=run)
        return action

    return add

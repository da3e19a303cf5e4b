"""The ``trinity-mq`` command: the table of lazily imported commands and the exit codes of errors.

This module imports only the standard library. The module of a command is imported when that command runs.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.cli.arguments import Parser
from trinity_mq.cli.next_steps import next_step
from trinity_mq.roles import COMMAND_ROLES, row_of
from trinity_mq.targets.setting_words import SETTING

COMMAND_GROUPS = (
    (
        "run",
        (
            (
                "init",
                "init:init",
                "write a folder with an agent of your own that learns: configuration, code, records, test",
            ),
            ("examples", "examples:examples", "list the shipped examples; copy one to change it"),
            ("run", "run:run", "run everything on this machine, with live progress; Ctrl-C drains"),
            ("node", "node:node", "run this machine's part of a run on several machines"),
            (
                "serve",
                "run:serve",
                "answer agents through a gateway and train on what they did; run, with mode=serve",
            ),
            ("validate", "validate:validate", "check a configuration and its tasksets, start nothing"),
            ("plan", "plan:plan", "show the GPU of each process and its estimated memory, start nothing"),
            ("submit", "submit:submit", "publish a task to a run"),
            ("review", "review", "show the runs that wait for a person's verdict, and give verdicts"),
        ),
    ),
    (
        "look",
        (
            ("list", "list:list_runs", "show the runs below a folder: how far each is, and whether it runs"),
            ("status", "status:status", "show the agents of a run and the depths of its queues"),
            ("why", "why:why", "say in one sentence what a run waits for, with the evidence and what to do"),
            ("dash", "dash:dash", "serve one page that shows a run: live from its broker, or from its folder alone"),
            (
                "logs",
                "logs:logs",
                "show the log lines of a run in order of time: of all agents, one agent or one batch",
            ),
            ("inspect", "inspect:inspect", "show experiences of a run or of a file token by token; read-only"),
            ("tap", "tap:tap", "print the experiences of a live run as JSON lines; read-only"),
            (
                "timeline",
                "timeline:timeline",
                "write a timeline of the work of each agent of a run, as a trace for https://ui.perfetto.dev; show one "
                "batch",
            ),
            ("report", "report:report", "write a run's curves, evaluations, losses and settings as one HTML file"),
            ("audit", "audit:audit", "prove from a run's records which experiences made a checkpoint, each once"),
            ("exporter", "exporter:exporter", "serve the state and metrics of a run to Prometheus"),
            (
                "track",
                "track:track",
                "send the metrics of a run to Weights & Biases, MLflow or SwanLab, its spans by OTLP",
            ),
        ),
    ),
    (
        "repair",
        (
            ("doctor", "doctor:doctor", "check a live broker and this machine, and say what to do; changes nothing"),
            ("dead", "dead", "list dead letters, and retry dead-lettered batches"),
            ("clean", "clean:clean", "delete the queues, exchanges and blobs of a run that is over for good"),
            ("broker", "broker", "run a private RabbitMQ node in a folder, or clean up after a run on any broker"),
            (
                "chaos",
                "chaos:chaos",
                "kill, freeze, disconnect and restart parts of a run on a seeded, repeatable schedule, and check its "
                "invariants",
            ),
        ),
    ),
    (
        "settings and data",
        (
            ("settings", "settings:settings", "show all settings, or those of a section"),
            ("algorithms", "algorithms", "list the algorithms; show the formula and settings of an algorithm"),
            ("debug", "debug", "try one thing by itself, without a broker"),
            (
                "regrade",
                "regrade:regrade",
                "recompute the rewards and advantages of a run's experiences with another reward function; show the "
                "changes",
            ),
            (
                "migrate",
                "migrate:migrate_file",
                "rewrite a configuration of Trinity-RFT as one of ours, with a comment on each change",
            ),
            (
                "convert-experiences",
                "convert:convert",
                "convert experiences of Trinity (TRXP, pickles, SQLite buffers) to .tmqx; executes nothing in them",
            ),
            (
                "convert-checkpoint",
                "convert_checkpoint:convert",
                "write the weights of a Trinity-RFT checkpoint as a Hugging Face folder, the first model of a run",
            ),
            ("schema", "schema:schema", "write the JSON Schemas of all messages except experiences"),
        ),
    ),
    (
        "one agent",
        (
            *(
                (role, "agents:run_agent", f"run one {role} by itself: {row_of(role).summary}")
                for role in COMMAND_ROLES
            ),
            (
                "health",
                "health:health",
                "tell whether the agent that writes TRINITY_MQ_HEALTH_FILE is alive (for a container's health check)",
            ),
        ),
    ),
)
"""Groups of commands in ``--help``: (title, rows). A row is (name, module and function below ``trinity_mq.cli``, help
text). Each module has ``add_arguments(parser)``, which also sets ``function`` if the command has subcommands.
"""
COMMANDS = tuple(row for _, rows in COMMAND_GROUPS for row in rows)
FIRST_LINE_SECONDS = 1.5
"""Seconds after which a command that has printed nothing says that it is loading."""
HELP_COLUMN = 22
"""Column of the help texts in the list of commands."""
FIRST_STEPS = """\
first steps:
  trinity-mq doctor                  is everything here that a run needs?
  trinity-mq run example:arithmetic  watch a small model learn, in two minutes
  trinity-mq init my-agent           then begin with an agent of your own"""
EXIT_USER = 2
"""Exit code for an error that the user can fix."""
EXIT_FATAL = 78
"""Exit code of an agent for an error that the user can fix: its supervisor must not restart it (sysexits EX_CONFIG)."""
EXIT_RESTART = 75
"""Exit code of an agent for an error that a restart may fix (sysexits EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: success. 1: failure. 2: an error that the user can fix, explained in a line on stderr. 75 and 78: an agent failed
    with an error that a restart may fix (75) or cannot fix (78). 130 and 143: interrupted by SIGINT or SIGTERM. The
    help of a command explains its other codes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal cannot show must not fail the command
            stream.reconfigure(errors="replace")
    from trinity_mq.terminal import guarded_output

    with guarded_output():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    from trinity_mq.terminal import announced

    arguments = argparse.Namespace(command=None)
    # The user's workflows and rewards lie in the working directory. Agents, started with ``python -m``, search it too.
    sys.path.append(str(Path.cwd()))
    try:
        words = sys.argv[1:] if argv is None else argv
        with announced("loading; the first time on a machine takes some seconds", FIRST_LINE_SECONDS):
            arguments = argument_parser().parse_args(words or ["--help"])
            code: int = arguments.function(arguments)
        sys.stdout.flush()  # a closed output raises BrokenPipeError here instead of at python's exit
        if code == 0 and (line := next_step(arguments)) is not None:
            _show_hint(line)
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader closed our output: without this, python's own flush at exit would print an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from trinity_mq.runtime.expected_errors import PASSING, expected_error, is_named

        problem = expected_error(error)
        if problem is None:
            raise
        from trinity_mq.telemetry import mask_passwords

        print(mask_passwords(f"trinity-mq {arguments.command}: {problem}"), file=sys.stderr)
        if arguments.command in COMMAND_ROLES:
            return EXIT_RESTART if is_named(problem, PASSING) else EXIT_FATAL
        return EXIT_USER


def _show_hint(line: str) -> None:
    """Print the line about the next command on stderr, with passwords masked. A failed write is ignored."""
    if "://" in line:
        from trinity_mq.telemetry import mask_passwords

        line = mask_passwords(line)
    try:
        print(line, file=sys.stderr)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # else python's own flush at exit would fail


class _RootParser(Parser):
    """The parser of the command line. Its help shows the commands in groups."""

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def format_help(self) -> str:
        """Return the help text: usage, a list for each group of commands, and the first command to try."""
        width = max(min(shutil.get_terminal_size().columns, 120) - 2, 2 * HELP_COLUMN)
        blocks = [self.format_usage().rstrip(), textwrap.fill(self.description or "", width)]
        for title, rows in COMMAND_GROUPS:
            blocks.append("\n".join([f"{title}:", *(_help_lines(name, text, width) for name, _, text in rows)]))
        options = {"COMMAND --help": "show the arguments of a command", "--version": "print the version and exit"}
        blocks.append("\n".join(["options:", *(_help_lines(name, text, width) for name, text in options.items())]))
        return "\n\n".join([*blocks, self.epilog or ""]) + "\n"

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]  # the overloads of the base say the same
        """Parse the words of the command line. An error about an unknown option names a similar option."""
        parsed: argparse.Namespace
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.commands[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed


def _help_lines(name: str, text: str, width: int) -> str:
    lines = textwrap.wrap(text, width - HELP_COLUMN, break_on_hyphens=False)
    return "\n".join(
        f"{word:{HELP_COLUMN}}{line}" for word, line in zip([f"  {name}", *[""] * len(lines)], lines, strict=False)
    )


class _CommandParser(Parser):
    """The parser of one command. It imports the command's module only when it parses that command's arguments, so
    ``trinity-mq --help`` imports no module of a command.
    """

    def __init__(self, *args: Any, target: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._target = target

    def load(self) -> None:
        """Add the command's arguments. Later calls do nothing."""
        path, _, function = self._target.partition(":")
        if path:
            self._target = ""
            module = importlib.import_module(path)
            if function:
                self.set_defaults(function=getattr(module, function))
            module.add_arguments(self)

    def parse_known_args(  # type: ignore[override]  # the overloads of the base say the same
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.load()
        parsed, rest = super().parse_known_args(args, namespace)
        # argparse takes positional arguments only up to the first option; accept KEY=VALUE arguments after options too
        if hasattr(parsed, "overrides"):
            parsed.overrides = [*parsed.overrides, *filter(SETTING.match, rest)]
            rest = [word for word in rest if not SETTING.match(word)]
        return parsed, rest


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with all commands."""
    parser = _RootParser(
        prog="trinity-mq",
        description="Reinforcement fine-tuning of language models as a message-queue actor system on RabbitMQ.",
        epilog=FIRST_STEPS,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    parser.commands = parsers = {
        name: commands.add_parser(
            name,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            target=f"trinity_mq.cli.{target}",
        )
        for name, target, help_text in COMMANDS
    }
    if "_ARGCOMPLETE" in os.environ:  # the shell requests completions only
        import argcomplete

        for word in os.environ.get("COMP_LINE", "").split():
            if word in parsers:
                parsers[word].load()  # argcomplete needs the arguments of this command
        argcomplete.autocomplete(parser)
    return parser


class _Version(argparse.Action):
    """Print the version. It is looked up only for ``--version``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from trinity_mq import __version__

        print(__version__)
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())

"""The ``trinity-mq`` command: words to a function, errors to one line and an exit code.

Nothing is imported here but the standard library: a command imports what it needs when it is given.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

ROLES = ("explorer", "runner", "operator", "trainer")
EXIT_USER = 2
"""An error that the user can cure."""
EXIT_FATAL = 78
"""The same of an agent: its supervisor must not start it again (sysexits EX_CONFIG)."""
EXIT_RESTART = 75
"""An agent that a fresh start may cure (sysexits EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130

EXPECTED = (
    "trinity_mq.config.load.ConfigError",
    "trinity_mq.bus.base.BusError",
    "trinity_mq.data.errors.TasksetError",
    "trinity_mq.runtime.errors.FatalError",
    "trinity_mq.runtime.errors.RestartMe",
    "trinity_mq.cli.errors.CommandError",
)
"""Errors that say all a person needs, with those derived from them. By name: importing them all would cost a second."""
PASSING = ("trinity_mq.bus.base.BusUnavailable", "trinity_mq.runtime.errors.RestartMe")
"""Those of them that a fresh start may cure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: it went wrong. 2: the user can cure it; the line on stderr says how. 75, 78: the same of an agent,
    passing or not. 130, 143: interrupted by SIGINT, SIGTERM.
    """
    arguments = _parser().parse_args(argv)
    # workflows and rewards of the user's own lie where the command is given; agents, started with -m, look there too
    sys.path.append(str(Path.cwd()))
    try:
        code = _function(arguments.function)(arguments)
        sys.stdout.flush()  # here a reader that has left is met, not at python's exit
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has left; python's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        problem = _expected(error)
        if problem is None:
            raise
        from trinity_mq.telemetry import mask_passwords

        print(mask_passwords(f"trinity-mq {arguments.command}: {problem}"), file=sys.stderr)
        if arguments.command in ROLES:
            return EXIT_RESTART if _is_one_of(problem, PASSING) else EXIT_FATAL
        return EXIT_USER


def _function(path: str) -> Callable[[argparse.Namespace], int]:
    module, _, name = path.partition(":")
    return cast("Callable[[argparse.Namespace], int]", getattr(importlib.import_module(module), name))


def _expected(error: BaseException) -> BaseException | None:
    """Return the error that tells the user what to do, also out of the groups that concurrent tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        found = [_expected(inner) for inner in error.exceptions]
        return found[0] if found and None not in found else None
    return error if _is_one_of(error, EXPECTED) else None


def _is_one_of(error: BaseException, names: Sequence[str]) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(error).__mro__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trinity-mq",
        description="Reinforcement fine-tuning of language models as a message-queue actor system on RabbitMQ.",
        epilog="Begin with: trinity-mq run examples/arithmetic.yaml",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    for role, words in (
        ("explorer", "schedules tasks, hosts rollout engines, evaluates"),
        ("runner", "does tasks"),
        ("operator", "processes experiences"),
        ("trainer", "steps the optimizer"),
    ):
        agent = _add(commands, role, "trinity_mq.cli.commands.agents:run_agent", f"run one {role} by itself: {words}")
        _add_config(agent)
        agent.add_argument("--id", help=f"its name among the agents of the run (default: {role}-0)")
        if role == "explorer":
            agent.add_argument(
                "--engines-only",
                action="store_true",
                help="host further engines for a run whose explorer is elsewhere, and schedule nothing "
                "(default name: engines-HOSTNAME)",
            )
    _add_validate(commands)
    _add_doctor(commands)
    _add_health(commands)
    _add_submit(commands)
    _add_status(commands)
    _add_timeline(commands)
    _add_inspect(commands)
    _add_debug(commands)
    _add_dead(commands)
    _add_broker(commands)
    _add_convert(commands)
    _add_schema(commands)
    return parser


_Commands = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for what add_subparsers returns


def _add(commands: _Commands[argparse.ArgumentParser], name: str, function: str, words: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    parser.set_defaults(function=function)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as examples/arithmetic.yaml")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="settings over those of the file, such as buffer.total_steps=10",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="the run's YAML file; else give --run")
    parser.add_argument("--run", metavar="NAME", help="the run's name, instead of CONFIG")
    parser.add_argument(
        "--broker",
        metavar="URL",
        help="amqp://user:password@host:port/vhost (default: the run's, else TRINITY_MQ_BROKER_URL)",
    )


def _add_run(commands: _Commands[argparse.ArgumentParser]) -> None:
    run = _add(
        commands,
        "run",
        "trinity_mq.cli.run.command:run",
        "run everything on this machine, with live progress; Ctrl-C drains",
    )
    _add_config(run)
    run.add_argument("--plain", action="store_true", help="lines instead of a live picture")


def _add_validate(commands: _Commands[argparse.ArgumentParser]) -> None:
    validate = _add(
        commands,
        "validate",
        "trinity_mq.cli.commands.validate:validate",
        "check a configuration and its tasksets, start nothing",
    )
    _add_config(validate)


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    doctor = _add(
        commands,
        "doctor",
        "trinity_mq.cli.doctor.command:doctor",
        "examine a live broker and this machine, and say what to do; changes nothing",
    )
    doctor.add_argument(
        "config", metavar="CONFIG", nargs="?", help="the run's YAML file: what it needs is looked at too"
    )
    doctor.add_argument("--run", metavar="NAME", help="a run's name, where there is no CONFIG")
    doctor.add_argument(
        "--broker",
        "--url",
        metavar="URL",
        help="amqp://user:password@host:port/vhost (default: the run's, else TRINITY_MQ_BROKER_URL)",
    )
    doctor.add_argument(
        "--management",
        metavar="URL",
        help="its management API, http://[user:password@]host:port (default: the broker's host, port 15672 or 15671)",
    )
    doctor.add_argument(
        "--node", metavar="FOLDER", help="of the private node that the broker is (default: that of the run's folder)"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def _add_health(commands: _Commands[argparse.ArgumentParser]) -> None:
    health = _add(
        commands,
        "health",
        "trinity_mq.cli.commands.health:health",
        "tell whether the agent that writes TRINITY_MQ_HEALTH_FILE is alive (for a container's health check)",
    )
    health.add_argument("--file", metavar="PATH", help="instead of TRINITY_MQ_HEALTH_FILE")
    health.add_argument(
        "--max-age", metavar="SECONDS", type=float, default=30.0, help="of its last sign of life (default: 30)"
    )


def _add_submit(commands: _Commands[argparse.ArgumentParser]) -> None:
    submit = _add(commands, "submit", "trinity_mq.cli.commands.submit:submit", "publish a task to a run")
    _add_target(submit)
    submit.add_argument(
        "--task", metavar="JSON", default="-", help="the task, @FILE for a file, - for standard input (default)"
    )
    submit.add_argument("--wait", metavar="SECONDS", type=float, help="wait for the outcome and print it as JSON")
    submit.add_argument(
        "--id", default="", help="submission id: the same one again is not done again (default: a new one)"
    )


def _add_status(commands: _Commands[argparse.ArgumentParser]) -> None:
    status = _add(
        commands,
        "status",
        "trinity_mq.cli.commands.status:status",
        "show who lives in a run and how deep its queues are",
    )
    _add_target(status)
    status.add_argument("--seconds", type=float, default=3.0, help="how long to listen (default: 3)")


def _add_timeline(commands: _Commands[argparse.ArgumentParser]) -> None:
    timeline = _add(
        commands,
        "timeline",
        "trinity_mq.cli.commands.timeline:timeline",
        "write what each agent of a run did when, as a trace for https://ui.perfetto.dev",
    )
    timeline.add_argument("target", metavar="RUN", help="the run's folder, its YAML file or its name")
    timeline.add_argument("--steps", metavar="FIRST-LAST", help="only of these batches, such as 10-30")
    timeline.add_argument("--out", metavar="FILE", help="where to (default: timeline.json in the run's folder)")


def _add_inspect(commands: _Commands[argparse.ArgumentParser]) -> None:
    inspect = _add(
        commands,
        "inspect",
        "trinity_mq.cli.inspect.command:inspect",
        "show experiences of a run, or of a file, token by token; takes nothing from anybody",
    )
    inspect.add_argument("target", metavar="RUN_OR_CONFIG", help="the run's name, its YAML file, or a .tmqx file")
    for name in ("batch", "task", "run", "step"):
        inspect.add_argument(f"--{name}", metavar="ID", help=f"only of this {name}")
    inspect.add_argument("--limit", metavar="N", type=int, default=10, help="at most so many (default: 10)")
    inspect.add_argument("--last", action="store_true", help="the last ones instead of the first ones")
    inspect.add_argument("--json", action="store_true", help="one JSON object a line")
    inspect.add_argument(
        "--broker",
        metavar="URL",
        help="amqp://user:password@host:port/vhost (default: the run's, else TRINITY_MQ_BROKER_URL)",
    )
    inspect.add_argument("--blob-store", metavar="URL", help="where large ones are (default: that of the YAML file)")
    inspect.add_argument("--tokenizer", metavar="FOLDER", help="with a tokenizer.json (default: the run's model)")


def _add_debug(commands: _Commands[argparse.ArgumentParser]) -> None:
    debug = _add(commands, "debug", "", "try one thing by itself, without a broker")
    actions = debug.add_subparsers(dest="action", metavar="ACTION", required=True)
    workflow = _add(
        actions,
        "workflow",
        "trinity_mq.cli.debug.command:workflow",
        "do one run of one task, and show every message, token, logprob and reward",
    )
    _add_config(workflow)
    workflow.add_argument(
        "--task", metavar="N", default="0", help="number of a record, or a task as JSON, @FILE or - (default: 0)"
    )
    workflow.add_argument("--taskset", metavar="NAME", help="of an evaluation taskset (default: what is trained on)")
    workflow.add_argument("--engine", metavar="URL", help="use the engine there instead of starting one")
    workflow.add_argument("--weights", metavar="FOLDER", help="such as runs/x/final (default: what a run begins with)")
    workflow.add_argument("--json", action="store_true", help="one JSON object a line")


def _add_dead(commands: _Commands[argparse.ArgumentParser]) -> None:
    dead = _add(commands, "dead", "", "look at dead letters, and run batches among them again")
    actions = dead.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = _add(
        actions,
        "list",
        "trinity_mq.cli.commands.dead:list_dead",
        "list dead letters with their reasons, and leave them where they are",
    )
    _add_target(listing)
    listing.add_argument("--limit", type=int, default=100, help="at most so many (default: 100)")
    replay = _add(
        actions,
        "replay",
        "trinity_mq.cli.commands.dead:replay",
        "give batches that operators could not process back to the operators, after these were repaired",
    )
    _add_target(replay)
    replay.add_argument(
        "--batch", metavar="N", action="append", default=[], help="only this batch; may be given several times"
    )


def _add_broker(commands: _Commands[argparse.ArgumentParser]) -> None:
    broker = _add(commands, "broker", "", "a private RabbitMQ node in a folder, and what runs leave on a broker")
    actions = broker.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, words in (
        ("start", "start one in the background and print its URL"),
        ("stop", "stop it"),
        ("status", "tell whether it runs, and its URL"),
        ("serve", "run one in the foreground until interrupted"),
    ):
        command = _add(actions, action, f"trinity_mq.cli.broker.command:{action}", words)
        command.add_argument("folder", metavar="FOLDER", help="keeps the node's data, ports and password")
        if action == "serve":
            command.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    users = _add(
        actions,
        "permissions",
        "trinity_mq.cli.broker.permissions:show_permissions",
        "print the rabbitmqctl lines for a user with the fewest permissions; changes nothing",
    )
    users.add_argument("run_name", metavar="RUN", help="the run's name")
    users.add_argument(
        "--role",
        choices=("agent", "submitter", "reader"),
        default="agent",
        help="agent: what every daemon needs; submitter: `submit`; reader: `status`, `inspect`, `dead list`",
    )
    users.add_argument("--user", metavar="NAME", help="the broker's user (default: RUN-ROLE)")
    users.add_argument("--vhost", metavar="NAME", default="/", help="the virtual host (default: /)")
    users.add_argument("--replies", action="store_true", help="agent: may answer submitters; see deploy/permissions.md")
    clean = _add(
        actions,
        "clean",
        "trinity_mq.cli.broker.clean:clean",
        "delete the queues and blobs of a run that is over for good",
    )
    clean.add_argument("target", metavar="RUN", help="the run's name, or its YAML file")
    clean.add_argument(
        "--broker",
        metavar="URL",
        help="amqp://user:password@host:port/vhost (default: the run's, else TRINITY_MQ_BROKER_URL)",
    )
    clean.add_argument(
        "--blob-store", metavar="URL", help="where its blobs are (default: broker.blob_store of the file)"
    )


def _add_schema(commands: _Commands[argparse.ArgumentParser]) -> None:
    schema = _add(
        commands,
        "schema",
        "trinity_mq.cli.commands.schema:schema",
        "write the JSON Schemas of what travels besides experiences",
    )
    schema.add_argument("--out", metavar="FOLDER", default="schemas", help="where to (default: schemas)")
    schema.add_argument("--check", action="store_true", help="write nothing; 1 where a file is not what it would be")


def _add_convert(commands: _Commands[argparse.ArgumentParser]) -> None:
    convert = _add(
        commands,
        "convert-experiences",
        "trinity_mq.cli.commands.convert:convert",
        "turn files of experiences that Trinity wrote (TRXP, pickles) into .tmqx; runs nothing that is in them",
    )
    convert.add_argument("inputs", metavar="IN", nargs="+", help="files, which stay as they are")
    convert.add_argument(
        "--out", metavar="FOLDER_OR_FILE", required=True, help="where to: one file if it ends in .tmqx, else a folder"
    )
    convert.add_argument("--compression", choices=("none", "zstd"), default="none", help="of the new files")
    convert.add_argument(
        "--strict", action="store_true", help="stop at the first experience that cannot be converted, not skip it"
    )


class _Version(argparse.Action):
    """Looks the version up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from trinity_mq import __version__

        print(__version__)
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())

"""``trinity-mq chaos``: kills, freezes, disconnects and restarts parts of a run, and checks its invariants."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_mq.cli.arguments import add_broker, add_target, check_least
from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.report import as_json, lines
from trinity_mq.proof.chaos.scenes import FURTHER_STEPS, elsewhere, try_local_run, try_new_run
from trinity_mq.proof.chaos.schedule import KINDS, ROLES, ChaosSchedule
from trinity_mq.proof.chaos.targets.remote import ComposeTargets, KubernetesTargets
from trinity_mq.proof.chaos.trial import TrialOutcome
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.telemetry import mask_passwords
from trinity_mq.terminal import write_output

EPILOG = (
    "exit codes: 0 every invariant that was checked holds; 1 one is violated; 2 wrong usage, explained by the line "
    "on stderr"
)

DEFAULT_CLIENTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq chaos``."""
    parser.epilog = EPILOG
    add_target(parser, optional=True)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--attach", metavar="RUN_FOLDER", help="folder of a run that is running on this machine, instead of TARGET"
    )
    where.add_argument("--compose", metavar="PROJECT", help="TARGET runs in this project of docker compose")
    where.add_argument("--kubernetes", metavar="NAMESPACE", help="TARGET runs in pods of this namespace")
    parser.add_argument("--kills", metavar="N", type=int, default=20, help="number of faults (default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, help="seed of the schedule (default: random, and printed)")
    parser.add_argument(
        "--schedule", metavar="FILE", type=Path, help="inject the faults of this file instead of drawn faults"
    )
    for name, choices, text in (("--kinds", KINDS, "kinds of faults"), ("--roles", ROLES, "roles of the victims")):
        parser.add_argument(
            name, metavar="NAMES", type=_names, default=",".join(choices), help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=float,
        default=3.0,
        help="mean time from a recovery to the next fault (default: %(default)g)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="seconds within which the run must recover from a fault (default: %(default)g)",
    )
    parser.add_argument(
        "--after",
        metavar="STEPS",
        type=int,
        default=5,
        help="train steps before the first fault (default: %(default)s)",
    )
    parser.add_argument(
        "--further",
        metavar="STEPS",
        type=int,
        help=f"train steps after the last fault (default: until the run ends; {FURTHER_STEPS} with --attach)",
    )
    parser.add_argument(
        "--inside",
        metavar="SHARE",
        type=float,
        help="share of the faults at points inside agents, only if the command starts the run (default: 0.5 in mode "
        "serve)",
    )
    parser.add_argument(
        "--clients",
        metavar="N",
        type=int,
        default=DEFAULT_CLIENTS,
        help="clients that hold sessions during the trial, in mode serve (default: %(default)s)",
    )
    parser.add_argument("--fresh", action="store_true", help="move the run's folder aside first, as `run --fresh` does")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_broker(parser)


def chaos(arguments: argparse.Namespace) -> int:
    """Inject faults into a run. Print the recovery times and whether the invariants hold. Return 1 if an invariant is
    violated.
    """
    _check(arguments)
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 16)
    overrides = list(arguments.overrides)
    with contextlib.redirect_stdout(sys.stderr):  # keep the library's log output out of the report
        outcome, folder = run_until_complete(_run_trial(arguments))
        schedule, again = folder / "schedule.json", repeat_command(arguments, overrides, outcome.schedule)
        text = "\n".join(lines(outcome, schedule, again))
        report = json.dumps(as_json(outcome, schedule, again), indent=2)
        write_output(folder / "report.txt", text + "\n")
        write_output(folder / "report.json", report + "\n")
    print(report if arguments.json else text)
    return 0 if outcome.holds else 1


async def _run_trial(arguments: argparse.Namespace) -> tuple[TrialOutcome, Path]:
    if arguments.compose is not None:
        return await elsewhere(arguments, ComposeTargets(arguments.compose), tell)
    if arguments.kubernetes is not None:
        return await elsewhere(arguments, KubernetesTargets(arguments.kubernetes), tell)
    if arguments.attach is not None:
        return await try_local_run(arguments, tell)
    return await try_new_run(arguments, tell)


def tell(line: str) -> None:
    """Print a line on stderr for a person who watches the trial."""
    print(line, file=sys.stderr, flush=True)


def repeat_command(arguments: argparse.Namespace, overrides: Sequence[str], schedule: ChaosSchedule) -> str:
    """Return the command that repeats the same faults. The password of ``--broker`` is masked."""
    words = ["trinity-mq", "chaos"]
    if arguments.attach is None:
        words += [arguments.target]
    words += overrides
    for name in ("attach", "compose", "kubernetes", "schedule"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name}", str(value)]
    if arguments.broker is not None:
        words += ["--broker", mask_passwords(arguments.broker)]
    if arguments.schedule is None:
        words += ["--kills", str(arguments.kills), "--seed", str(schedule.seed), "--every", f"{arguments.every:g}"]
        for name, default in (("kinds", KINDS), ("roles", ROLES)):
            chosen = getattr(arguments, name)
            words += [f"--{name}", ",".join(chosen)] if chosen != list(default) else []
    words += ["--after", str(arguments.after), "--timeout", f"{arguments.timeout:g}"]
    words += [] if arguments.further is None else ["--further", str(arguments.further)]
    words += [] if arguments.inside is None else ["--inside", f"{arguments.inside:g}"]
    words += [] if arguments.clients == DEFAULT_CLIENTS else ["--clients", str(arguments.clients)]
    words += ["--fresh"] if arguments.attach is arguments.compose is arguments.kubernetes is None else []
    return shlex.join(words)


def _check(arguments: argparse.Namespace) -> None:
    """Check the arguments, and apply the overrides of ``--attach``.

    Raises:
        CommandError: An argument is not valid; the message names it and the expected values.
    """
    if arguments.target is None and arguments.attach is None:
        raise CommandError("name a run: a YAML file to start one, or --attach RUN_FOLDER")
    if arguments.attach is not None:
        if arguments.target is not None and "=" not in arguments.target:
            raise CommandError(f"{arguments.target!r} and --attach {arguments.attach} are two runs: give one of them")
        arguments.overrides = [word for word in (arguments.target, *arguments.overrides) if word is not None]
        arguments.target = arguments.attach
    check_least(arguments, kills=1, after=1, every=0, clients=0)
    if arguments.inside is not None and not 0 <= arguments.inside <= 1:
        raise CommandError(f"--inside is {arguments.inside:g}, wanted a share from 0 to 1")
    if arguments.timeout <= 0:
        raise CommandError(f"--timeout is {arguments.timeout:g}, wanted more than 0 seconds")
    for name, choices in (("kinds", tuple(KINDS)), ("roles", ROLES)):
        chosen = getattr(arguments, name)
        if not chosen or not set(choices).issuperset(chosen):
            raise CommandError(f"--{name} is {','.join(chosen)!r}, wanted some of {', '.join(choices)}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]

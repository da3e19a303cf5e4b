"""``trinity-mq broker``: runs a private node that outlives runs, prints permissions of users, cleans up after a run."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal

from trinity_mq.bus.permissions import permissions, rabbitmqctl_lines
from trinity_mq.cli.arguments import add_actions
from trinity_mq.cli.clean import add_arguments as add_clean_arguments
from trinity_mq.cli.clean import clean
from trinity_mq.errors import CommandError
from trinity_mq.targets.private_broker import READY_FD, broker_folder, serve_broker, spawn, wait_for_exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``trinity-mq broker`` and their arguments."""
    add = add_actions(parser)
    for name, words, run in (
        ("start", "start a node in the background and print its URL", start),
        ("stop", "stop the node", stop),
        ("status", "print whether the node runs, and its URL", status),
        ("serve", "run a node in the foreground until interrupted", serve),
    ):
        action = add(name, words, run)
        action.add_argument("folder", metavar="FOLDER", help="keeps the node's data, ports and password")
        if name == "serve":
            action.add_argument(READY_FD, type=int, help=argparse.SUPPRESS)
    users = add(
        "permissions",
        "print the rabbitmqctl lines for a user with the fewest permissions; changes nothing",
        show_permissions,
    )
    users.add_argument("run_name", metavar="RUN", help="the run's name")
    users.add_argument(
        "--role",
        choices=("agent", "submitter", "rewarder", "reviewer", "reader"),
        default="agent",
        help="agent: what every daemon needs; submitter: `submit`; rewarder: rewards of sessions; reviewer: "
        "verdicts of `review`; reader: `status`, `inspect`, `tap`, `regrade`, `dead list`, `review list`",
    )
    users.add_argument("--user", metavar="NAME", help="the broker's user (default: RUN-ROLE)")
    users.add_argument("--vhost", metavar="NAME", default="/", help="the virtual host (default: /)")
    users.add_argument("--replies", action="store_true", help="agent: may answer submitters; see deploy/permissions.md")
    users.add_argument("--taps", metavar="RUN", help="agent: another run, on whose stream it trains (source.tap)")
    add_clean_arguments(add("clean", "the same as `trinity-mq clean`", clean))


def serve(arguments: argparse.Namespace) -> int:
    """Run a broker in the foreground until interrupted."""
    home = broker_folder(arguments.folder)
    with home.locked():
        return asyncio.run(serve_broker(home, arguments.ready_fd))


def start(arguments: argparse.Namespace) -> int:
    """Start a broker in the background and print its URL. If it already runs, print its URL."""
    home = broker_folder(arguments.folder)
    if (url := home.live_broker_url()) is None:
        url = spawn(home)
    print(url)
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """Stop the broker of a folder and wait for its process to end with all data on disk."""
    home = broker_folder(arguments.folder)
    pid = home.holder()
    if pid is None:
        print(f"no broker runs in {home.path}")
        return 0
    os.kill(pid, signal.SIGTERM)
    asyncio.run(wait_for_exit(pid))
    print(f"stopped the broker in {home.path}")
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Print the process and the URL of a folder's broker. Return 0, or 1 if no broker runs."""
    home = broker_folder(arguments.folder)
    url = home.live_broker_url()
    print(f"runs as process {home.holder()}: {url}" if url else f"no broker runs in {home.path}")
    return 0 if url else 1


def show_permissions(arguments: argparse.Namespace) -> int:
    """Print the ``rabbitmqctl`` lines that make a user with the permissions of a role, without running them."""
    if arguments.replies and arguments.role != "agent":
        raise CommandError(
            f"--replies is for agents, which answer submitters; role {arguments.role} does not answer "
            "submitters: leave --replies out"
        )
    if arguments.taps and arguments.role != "agent":
        raise CommandError(
            f"--taps is for agents, which train on another run; role {arguments.role} does not train: leave --taps out"
        )
    try:
        patterns = permissions(arguments.run_name, arguments.role, replies=arguments.replies, taps=arguments.taps)
    except ValueError as error:
        raise CommandError(str(error)) from error
    user = arguments.user or f"{arguments.run_name}-{arguments.role}"
    print(f"# run once; it asks for the password:\nrabbitmqctl add_user {shlex.quote(user)}")
    print("\n".join(rabbitmqctl_lines(user, arguments.vhost, patterns)))
    return 0

"""``trinity-mq broker permissions``: the commands that give a broker's user what its part in a run needs."""

from __future__ import annotations

import argparse
import shlex

from trinity_mq.bus.permissions import permissions, rabbitmqctl_lines
from trinity_mq.cli.errors import CommandError


def show_permissions(arguments: argparse.Namespace) -> int:
    """Print ``rabbitmqctl`` lines; nothing is done."""
    if arguments.replies and arguments.role != "agent":
        raise CommandError(f"--replies is for agents, who answer submitters; role {arguments.role} answers nobody")
    try:
        wanted = permissions(arguments.run_name, arguments.role, replies=arguments.replies)
    except ValueError as error:
        raise CommandError(str(error)) from error
    user = arguments.user or f"{arguments.run_name}-{arguments.role}"
    print(f"# once, and it asks for the password:\nrabbitmqctl add_user {shlex.quote(user)}")
    print("\n".join(rabbitmqctl_lines(user, arguments.vhost, wanted)))
    return 0

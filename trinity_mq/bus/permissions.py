"""Broker permissions of each role in a run, as patterns for ``rabbitmqctl``; tested against a real broker."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Literal, get_args

from trinity_mq.bus.topology import Topology

Role = Literal["agent", "submitter", "rewarder", "reviewer", "reader"]
ROLES: tuple[Role, ...] = get_args(Role)
NOTHING = "^$"


@dataclass(frozen=True, slots=True)
class TopicPermission:
    """Patterns of the routing keys that a user may publish with and bind to on one exchange."""

    exchange: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class Permissions:
    """Regular expressions over the names of exchanges and queues, as RabbitMQ takes them."""

    configure: str
    write: str
    read: str
    topics: tuple[TopicPermission, ...] = ()


def permissions(run: str, role: Role, *, replies: bool = False, taps: str | None = None) -> Permissions:
    """Return the fewest permissions that suffice.

    Args:
        run: The run's name.
        role: ``agent`` runs explorer, runner, operator or trainer, declares everything and cleans up behind a run;
            ``submitter`` hands in tasks and gets their outcomes; ``rewarder`` rewards and ends sessions;
            ``reviewer`` reads requests for human review and gives verdicts; ``reader`` looks: status, inspect, tap,
            regrade, dead list, review list.
        replies: agent: may answer submitters. That takes the default exchange, by which a user can publish into every
            queue of the virtual host whose name it knows, so give it only where the virtual host is the run's own.
        taps: agent: another run on whose stream it trains (``source.tap``), and which it only reads.

    Raises:
        ValueError: A name is none of a run.
    """
    prefix = "^" + re.escape(Topology(run).prefix).replace("\\-", "-")
    if role == "agent":
        write = f"{prefix}|^amq\\.default$" if replies else prefix
        if taps is None:
            return Permissions(prefix, write, prefix)
        stream = Topology(taps).exchange("ready")  # its queue has the same name
        pattern = f"^{re.escape(stream)}$".replace("\\-", "-")
        return Permissions(
            prefix, f"{write}|{pattern}", f"{prefix}|{pattern}", (TopicPermission(stream, "^mark$", NOTHING),)
        )
    tasks, ready = Topology(run).exchange("tasks"), Topology(run).exchange("ready")
    if role == "submitter":
        own = rf"{prefix}replies\.submit\."
        return Permissions(own, f"{prefix}tasks$", own, (TopicPermission(tasks, "^submit$", NOTHING),))
    if role == "rewarder":
        own = rf"{prefix}replies\.reward\."  # it needs none; a pattern that matches nothing matches an empty name
        sessions = TopicPermission(Topology(run).exchange("sessions"), "^session$", NOTHING)
        return Permissions(own, f"{prefix}sessions$", own, (sessions,))
    review = Topology(run).exchange("review")
    if role == "reviewer":
        own = rf"{prefix}replies\.review\."  # it needs none, as a rewarder
        verdicts = TopicPermission(review, "^(verdict|mark)$", NOTHING)
        return Permissions(own, f"{prefix}review$", f"{prefix}review$", (verdicts,))
    own = rf"{prefix}telemetry\."
    return Permissions(
        own,
        rf"{prefix}(telemetry\.|ready$|review$)",  # the end of a stream is found by a mark of one's own
        rf"{prefix}(telemetry(\..*)?|ready|review|dead)$",
        (TopicPermission(ready, "^mark$", ".*"), TopicPermission(review, "^mark$", ".*")),
    )


def rabbitmqctl_lines(user: str, vhost: str, granted: Permissions) -> list[str]:
    """Return the commands that give a user these permissions, and take away others that it had on these exchanges."""
    on = ["-p", vhost, user]
    lines = [["rabbitmqctl", "set_permissions", *on, granted.configure, granted.write, granted.read]]
    lines += [
        ["rabbitmqctl", "set_topic_permissions", *on, one.exchange, one.write, one.read] for one in granted.topics
    ]
    return [shlex.join(line) for line in lines]

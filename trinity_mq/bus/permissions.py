"""Broker permissions of each kind of user of a run, as patterns for ``rabbitmqctl``. Tested against a real broker."""

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
    """Patterns for the routing keys that a user may publish with and bind to, on a single exchange."""

    exchange: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class Permissions:
    """Regular expressions for the names of exchanges and queues, in RabbitMQ's syntax."""

    configure: str
    write: str
    read: str
    topics: tuple[TopicPermission, ...] = ()


def permissions(run: str, role: Role, *, replies: bool = False, taps: str | None = None) -> Permissions:
    """Return the minimal permissions of a kind of user.

    Args:
        run: Name of the run.
        role: ``agent`` is any agent of the run: it declares all queues, and may clean up after the run.
            ``submitter`` submits tasks and receives their outcomes. ``rewarder`` rewards and ends sessions.
            ``reviewer`` reads requests for human review and answers with verdicts. ``reader`` only reads: status,
            inspect, tap, regrade, dead list, review list.
        replies: agent: may answer submitters. This needs the default exchange, which lets a user publish to every queue
            of the virtual host whose name it knows. Set it only if the virtual host belongs to the run alone.
        taps: agent: name of another run whose stream it trains on (``source.tap``) and which it only reads.

    Raises:
        ValueError: A name is not a valid run name.
    """
    prefix = "^" + re.escape(Topology(run).prefix).replace("\\-", "-")
    if role == "agent":
        write = f"{prefix}|^amq\\.default$" if replies else prefix
        if taps is None:
            return Permissions(prefix, write, prefix)
        stream = Topology(taps).exchange("ready")  # the stream's queue has the same name as its exchange
        pattern = f"^{re.escape(stream)}$".replace("\\-", "-")
        return Permissions(
            prefix, f"{write}|{pattern}", f"{prefix}|{pattern}", (TopicPermission(stream, "^mark$", NOTHING),)
        )
    tasks, ready = Topology(run).exchange("tasks"), Topology(run).exchange("ready")
    if role == "submitter":
        own_queues = rf"{prefix}replies\.submit\."
        return Permissions(own_queues, f"{prefix}tasks$", own_queues, (TopicPermission(tasks, "^submit$", NOTHING),))
    if role == "rewarder":
        # a rewarder needs no queue, but a pattern that matches nothing would match an empty name
        own_queues = rf"{prefix}replies\.reward\."
        sessions = TopicPermission(Topology(run).exchange("sessions"), "^session$", NOTHING)
        return Permissions(own_queues, f"{prefix}sessions$", own_queues, (sessions,))
    review = Topology(run).exchange("review")
    if role == "reviewer":
        own_queues = rf"{prefix}replies\.review\."  # a reviewer needs no queue either
        verdicts = TopicPermission(review, "^(verdict|mark)$", NOTHING)
        return Permissions(own_queues, f"{prefix}review$", f"{prefix}review$", (verdicts,))
    own_queues = rf"{prefix}telemetry\."
    return Permissions(
        own_queues,
        rf"{prefix}(telemetry\.|ready$|review$)",  # a reader finds the end of a stream by publishing its own mark
        rf"{prefix}(telemetry(\..*)?|ready|review|dead)$",
        (TopicPermission(ready, "^mark$", ".*"), TopicPermission(review, "^mark$", ".*")),
    )


def rabbitmqctl_lines(user: str, vhost: str, granted: Permissions) -> list[str]:
    """Return the commands that give a user these permissions on a virtual host instead of all its earlier permissions
    there. Topic permissions are replaced only on the exchanges in ``granted.topics``.
    """
    on = ["-p", vhost, user]
    lines = [["rabbitmqctl", "set_permissions", *on, granted.configure, granted.write, granted.read]]
    lines += [
        ["rabbitmqctl", "set_topic_permissions", *on, topic.exchange, topic.write, topic.read]
        for topic in granted.topics
    ]
    return [shlex.join(line) for line in lines]

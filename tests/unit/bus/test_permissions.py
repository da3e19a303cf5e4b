"""The patterns that are printed for a user, and how they are printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from trinity_mq.bus.permissions import NOTHING, ROLES, permissions, rabbitmqctl_lines
from trinity_mq.bus.topology import Topology

OF_THE_RUN = Topology("a-b")
OTHERS = (Topology("a"), Topology("a-b-c"), Topology("b"), Topology("xa-b"))


@pytest.mark.parametrize("role", ROLES)
def test_no_pattern_reaches_into_another_run(role: str) -> None:
    wanted = permissions("a-b", role)  # type: ignore[arg-type]
    for other in OTHERS:
        names = [queue.name for queue in other.durable] + [*other.exchanges, other.lock("trainer"), "amq.default", ""]
        for pattern in (wanted.configure, wanted.write, wanted.read):
            assert [name for name in names if re.search(pattern, name)] == []


def test_an_agent_may_use_every_name_of_its_run() -> None:
    wanted = permissions("a-b", "agent")
    names = [queue.name for queue in OF_THE_RUN.durable] + [*OF_THE_RUN.exchanges, OF_THE_RUN.lock("explorer")]
    names += [OF_THE_RUN.batch_queue(1, "t").name, OF_THE_RUN.listener("runner-0", "x", "sync").name]
    for pattern in (wanted.configure, wanted.write, wanted.read):
        assert all(re.search(pattern, name) for name in names)
    assert not re.search(wanted.write, "amq.default")
    assert re.search(permissions("a-b", "agent", replies=True).write, "amq.default")


def test_submitters_and_readers_make_only_queues_of_their_own() -> None:
    for role in ("submitter", "reader"):
        wanted = permissions("a-b", role)  # type: ignore[arg-type]
        assert [name for name in OF_THE_RUN.exchanges if re.search(wanted.configure, name)] == []
        assert [queue.name for queue in OF_THE_RUN.durable if re.search(wanted.configure, queue.name)] == []
    assert re.search(permissions("a-b", "submitter").configure, OF_THE_RUN.listener("submit", "x", "replies").name)
    assert re.search(permissions("a-b", "reader").configure, OF_THE_RUN.listener("status", "x", "telemetry").name)
    assert permissions("a-b", "submitter").topics[0].read == NOTHING


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a-b", "--role", "reader", "--vhost", "/x"), None),
        (("A.B",), "run name 'A.B' must be"),
        (("a", "--role", "reader", "--replies"), "--replies is for agents"),
        (("a", "--role", "king"), "no 'king'; "),
    ],
)
def test_the_command_prints_lines_that_survive_a_shell(words: tuple[str, ...], said: str | None) -> None:
    argv = [sys.executable, "-m", "trinity_mq.cli.main", "broker", "permissions", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if said else 0)
    assert "Traceback" not in done.stderr
    if said:
        assert said in done.stderr
        return
    assert "rabbitmqctl add_user a-b-reader" in done.stdout
    assert all(line in done.stdout for line in rabbitmqctl_lines("a-b-reader", "/x", permissions("a-b", "reader")))
    lines = rabbitmqctl_lines("it's me", "/v h", permissions("a-b", "submitter"))
    for line, verb in zip(lines, ("set_permissions", "set_topic_permissions"), strict=True):
        assert shlex.split(line)[:5] == ["rabbitmqctl", verb, "-p", "/v h", "it's me"]
    assert shlex.split(lines[1])[5:] == ["tmq.a-b.tasks", "^submit$", "^$"]

"""Judgements on a broker: facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trinity_mq.bus.permissions import permissions, rabbitmqctl_lines
from trinity_mq.cli.doctor.facts import Facts, Finding, Needs, size

OLDEST, NEWEST = (3, 10), (4, 99)
CAPABILITIES = ("publisher_confirms", "basic.nack", "consumer_cancel_notify", "connection.blocked")
FLAGS = ("quorum_queue", "stream_queue")
SKEW = 5.0
"""Seconds. Nothing in a run compares the clocks of two machines; people who read its logs do."""
CTL = "`rabbitmqctl {}` on the broker's machine"
TO_LOOK = {
    "limits": CTL.format("environment"),
    "alarms": CTL.format("status"),
    "permissions": CTL.format("list_permissions -p VHOST"),
    "feature flags": CTL.format("list_feature_flags"),
    "clock": "`date -u` on both machines",
    "disk": CTL.format("status"),
    "leftovers": "give CONFIG or --run NAME",
}


def judge_broker(facts: Facts, needs: Needs) -> Iterator[Finding]:
    """Judge everything about a broker but its policies."""
    yield _version(facts)
    yield _capabilities(facts)
    yield _consumer_timeout(facts, needs)
    yield _message_size(facts, needs)
    yield from _alarms(facts)
    yield from _disks(facts, needs)
    yield from _permissions(facts, needs)
    yield _feature_flags(facts)
    yield _clock(facts)
    yield from _leftovers(facts, needs)


def not_looked(subject: str, why: str, to_look: str) -> Finding:
    """Return the finding of what could not be looked at."""
    return Finding(subject=subject, verdict="not looked at", seen=why, do=f"to look: {to_look}")


def _version(facts: Facts) -> Finding:
    seen = f"{facts.product} {facts.version}"
    numbers = re.match(r"(\d+)\.(\d+)", facts.version or "")
    wanted = "RabbitMQ 3.10 to 4.x"
    if facts.product != "RabbitMQ" or numbers is None:
        do = "use RabbitMQ: quorum queues and streams are relied upon as it has them"
        return Finding(subject="version", verdict="warning", seen=seen, wanted=wanted, do=do)
    version = (int(numbers[1]), int(numbers[2]))
    if version < OLDEST:
        return Finding(subject="version", verdict="problem", seen=seen, wanted=wanted, do="upgrade the broker")
    if version > NEWEST:
        do = "read its list of breaking changes: nobody has run this system on it"
        return Finding(subject="version", verdict="warning", seen=seen, wanted=wanted, do=do)
    return Finding(subject="version", verdict="ok", seen=seen, wanted=wanted)


def _capabilities(facts: Facts) -> Finding:
    missing = [name for name in CAPABILITIES if not facts.capabilities.get(name)]
    wanted = ", ".join(CAPABILITIES)
    if missing:
        return Finding(
            subject="capabilities",
            verdict="problem",
            seen=f"the broker lacks {', '.join(missing)}",
            wanted=wanted,
            do="use RabbitMQ 3.10 or newer, and no proxy that speaks AMQP by itself between us and it",
        )
    return Finding(subject="capabilities", verdict="ok", seen="all that is needed", wanted=wanted)


def _consumer_timeout(facts: Facts, needs: Needs) -> Finding:
    subject, limit = "consumer timeout", facts.consumer_timeout_ms
    wanted = f"more than {needs.hold_seconds:g} s, the longest that an agent holds a message"
    if limit is None:
        return not_looked(subject, facts.why("consumer_timeout_ms"), TO_LOOK["limits"])
    seen = f"{limit / 1000:g} s" if limit else "no limit"
    if limit == 0 or limit / 1000 > needs.hold_seconds or (not needs.exact and limit / 1000 >= needs.hold_seconds):
        return Finding(subject=subject, verdict="ok", seen=seen, wanted=wanted)
    return Finding(
        subject=subject,
        verdict="problem" if needs.exact else "warning",
        seen=seen,
        wanted=wanted,
        do="set consumer_timeout in rabbitmq.conf (milliseconds; 1800000 is RabbitMQ's own) and restart the broker: "
        "what takes longer is taken away and done again, for ever",
    )


def _message_size(facts: Facts, needs: Needs) -> Finding:
    subject, limit = "message size", facts.max_message_bytes
    wanted = f"at least broker.max_message_bytes, {size(needs.max_message_bytes)}"
    if limit is None:
        return not_looked(subject, facts.why("max_message_bytes"), TO_LOOK["limits"])
    if limit >= needs.max_message_bytes:
        return Finding(subject=subject, verdict="ok", seen=size(limit), wanted=wanted)
    return Finding(
        subject=subject,
        verdict="problem",
        seen=size(limit),
        wanted=wanted,
        do=f"set broker.max_message_bytes to {limit} or less, or raise max_message_size in rabbitmq.conf: "
        "one larger message closes the channel under all others",
    )


def _alarms(facts: Facts) -> Iterator[Finding]:
    if facts.alarms:
        cure = {
            "memory": "free memory or raise vm_memory_high_watermark",
            "disk": "free space or lower disk_free_limit",
        }
        for alarm in facts.alarms:
            yield Finding(
                subject="alarms",
                verdict="problem",
                seen=f"{alarm} alarm: the broker takes nothing from publishers",
                wanted="none",
                do=cure.get(alarm.partition(" ")[0], "see `rabbitmqctl status`"),
            )
    elif facts.blocked:
        yield Finding(
            subject="alarms",
            verdict="problem",
            seen="the broker holds back what is published: an alarm, or it is overloaded",
            wanted="none",
            do=f"see {TO_LOOK['alarms']}: free memory or disk space there",
        )
    elif facts.alarms is not None or facts.blocked is False:
        how = "" if facts.alarms is not None else ": a message was published and confirmed"
        yield Finding(subject="alarms", verdict="ok", seen=f"none{how}", wanted="none")
    else:
        yield not_looked("alarms", facts.why("alarms"), TO_LOOK["alarms"])


def _disks(facts: Facts, needs: Needs) -> Iterator[Finding]:
    if not facts.disks:
        yield not_looked("broker's disk", facts.why("disks"), TO_LOOK["disk"])
        return
    for disk in facts.disks:
        left = disk.free - disk.limit
        enough = left >= needs.kept_bytes
        yield Finding(
            subject="broker's disk",
            verdict="ok" if enough else "problem" if left < 0 else "warning",
            seen=f"{size(disk.free)} free on {disk.node}, of which {size(disk.limit)} must stay free (disk_free_limit)",
            wanted=f"{size(needs.kept_bytes)} for the run's streams above that",
            do=""
            if enough
            else "free space there, or lower broker.ready_max_bytes and broker.results_max_bytes"
            + (" or disk_free_limit: publishing is blocked" if left < 0 else ""),
        )


def _permissions(facts: Facts, needs: Needs) -> Iterator[Finding]:
    subject, topology = "permissions", needs.topology
    if topology is None:
        yield not_looked(subject, "no run is named", "give CONFIG or --run NAME")
        return
    fewest = permissions(topology.run, "agent")
    wanted = f"user {facts.user!r} may configure, write and read {fewest.configure} on {facts.vhost!r}"
    command = "; ".join(rabbitmqctl_lines(facts.user, facts.vhost, fewest))
    refused = {what: words for what, words in facts.refused.items() if what != "look"}
    if facts.permissions is not None:
        lacking = [
            what
            for what, given in zip(("configure", "write", "read"), facts.permissions, strict=True)
            if not all(allows(given, name) for name in names_of(needs))
        ]
        shown = " ".join(repr(given) for given in facts.permissions)
        if lacking:
            seen = f"{', '.join(lacking)} not for all names of the run (configure, write, read: {shown})"
            yield Finding(subject=subject, verdict="problem", seen=seen, wanted=wanted, do=command)
        else:
            yield Finding(subject=subject, verdict="ok", seen=f"configure, write, read: {shown}", wanted=wanted)
    elif refused:
        seen = "; ".join(f"{what} refused: {words}" for what, words in refused.items())
        yield Finding(subject=subject, verdict="problem", seen=seen, wanted=wanted, do=command)
    elif set(facts.tried) >= {"configure", "write", "read"}:
        seen = "configure, write and read were tried on names of the run, and granted"
        yield Finding(subject=subject, verdict="ok", seen=seen, wanted=wanted)
    else:
        left = ", ".join(what for what in ("configure", "write", "read") if what not in facts.tried)
        why = f"{left}: the run has no exchanges yet to try it on, and the patterns are unknown: "
        yield not_looked(subject, why + facts.why("permissions"), TO_LOOK["permissions"])


def names_of(needs: Needs) -> list[str]:
    """Return one broker name of each kind of a run."""
    topology = needs.topology
    if topology is None:
        return []
    queues = (*topology.durable, topology.batch_queue(0, "0" * 32), topology.listener("runner-0", "0", "control"))
    return [*topology.exchanges, *(queue.name for queue in queues), topology.lock("trainer")]


def allows(pattern: str, name: str) -> bool:
    """Say whether a permission's pattern matches, as RabbitMQ does: anywhere, and an empty one nothing."""
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:  # a construct of Erlang's that Python does not know: do not accuse
        return True


def _feature_flags(facts: Facts) -> Finding:
    subject, flags = "feature flags", facts.feature_flags
    wanted = f"{', '.join(FLAGS)} enabled"
    if flags is None:
        return not_looked(subject, facts.why("feature_flags"), TO_LOOK["feature flags"])
    off = [name for name in FLAGS if flags.get(name) is False]  # one that is not listed is part of that version
    if off:
        return Finding(
            subject=subject,
            verdict="problem",
            seen=f"{', '.join(off)} disabled",
            wanted=wanted,
            do="rabbitmqctl enable_feature_flag all, once all nodes of the cluster have the new version",
        )
    return Finding(subject=subject, verdict="ok", seen=wanted, wanted=wanted)


def _clock(facts: Facts) -> Finding:
    subject, wanted = "clock", f"less than {SKEW:g} s between the broker's and ours"
    if facts.clock is None:
        return not_looked(subject, facts.why("clock"), TO_LOOK["clock"])
    ahead, error = facts.clock
    seen = f"the broker's is {abs(ahead):.1f} s {'ahead' if ahead >= 0 else 'behind'} (± {error:.1f} s)"
    if abs(ahead) - error <= SKEW:
        return Finding(subject=subject, verdict="ok", seen=seen, wanted=wanted)
    do = "set both by NTP: runs go on, but times in logs and metrics do not fit, and certificates may seem invalid"
    return Finding(subject=subject, verdict="warning", seen=seen, wanted=wanted, do=do)


def _leftovers(facts: Facts, needs: Needs) -> Iterator[Finding]:
    subject, topology, queues = "queues of the run", needs.topology, facts.queues
    if topology is None or queues is None:
        why = "no run is named" if topology is None else facts.why("queues")
        yield not_looked(subject, why, TO_LOOK["leftovers"])
        return
    wanted = "those of a run that is at work or is to go on, or none"
    known = {name: depth for name, depth in queues.items() if depth is not None}
    filled = ", ".join(f"{name} {depth[0]}" for name, depth in sorted(known.items()) if depth[0])
    seen = f"{len(queues)} queues" + (f" ({filled})" if filled else "") if queues else "none"
    clean = f"`trinity-mq broker clean {topology.run}` deletes them"
    if not queues:
        yield Finding(subject=subject, verdict="ok", seen=seen, wanted=wanted)
    elif any(depth[1] for depth in known.values()):
        yield Finding(subject=subject, verdict="ok", seen=f"{seen}, in use", wanted=wanted)
    elif needs.folder_finished:
        do = f"the run's folder says that it is over: {clean}"
        yield Finding(subject=subject, verdict="warning", seen=f"{seen}, nobody uses them", wanted=wanted, do=do)
    elif needs.folder_finished is None:
        do = f"a new run of this name would find the old one's tasks: {clean}, if no such run is to go on"
        yield Finding(subject=subject, verdict="warning", seen=f"{seen}, nobody uses them", wanted=wanted, do=do)
    else:
        yield Finding(subject=subject, verdict="ok", seen=f"{seen}, of a run that can go on", wanted=wanted)
    dead = known.get(topology.dead.name)
    if dead and dead[0]:
        do = f"`trinity-mq dead list --run {topology.run}` says why"
        yield Finding(subject="dead letters", verdict="warning", seen=str(dead[0]), wanted="none", do=do)

"""Policies of the broker that clash with what a run declares: policies in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trinity_mq.bus.topology import Queue
from trinity_mq.cli.doctor.broker import CTL, allows, not_looked
from trinity_mq.cli.doctor.facts import Facts, Finding, Needs, Policy, Verdict

LOSES = {
    "message-ttl": "messages that wait longer are dropped or dead-lettered",
    "max-length": "messages above it are dropped or refused",
    "max-length-bytes": "messages above it are dropped or refused",
    "max-age": "older results and processed batches are dropped before they are read",
    "expires": "queues that are not used for that long are deleted with what is in them",
}
"""Of what makes a run lose messages, what it does."""
KINDS = {"quorum": "quorum_queues", "stream": "streams", "exclusive": "classic_queues"}
NOT_OF_STREAMS = {"message-ttl", "expires", "delivery-limit", "overflow", "dead-letter-exchange"}
STREAMS_ONLY = {"max-age", "stream-max-segment-size-bytes"}


def judge_policies(facts: Facts, needs: Needs) -> Iterator[Finding]:
    """Judge the policies that apply to a run's names."""
    subject, wanted = "policies", "none that takes messages or queues of the run away"
    if needs.topology is None:
        yield not_looked(subject, "no run is named", "give CONFIG or --run NAME")
        return
    if facts.policies is None:
        look = CTL.format("list_policies -p VHOST") + " and `rabbitmqctl list_operator_policies -p VHOST`"
        yield not_looked(subject, facts.why("policies"), look)
        return
    unread = [policy.name for policy in facts.policies if not _is_readable(policy)]
    if unread:
        why = f"the pattern of {', '.join(unread)} is no regular expression to Python, which this is written in"
        yield not_looked(subject, why, "compare it by eye with " + needs.topology.prefix + "*")
    policies = [policy for policy in facts.policies if policy.name not in unread]
    clashes = list(_clashes(policies, needs))
    applied = {policy.name for policy in policies for name in _queues(needs) if _applies(policy, name)}
    if not clashes:
        seen = f"{', '.join(sorted(applied))}: no clash" if applied else "none applies to names of the run"
        yield Finding(subject=subject, verdict="ok", seen=seen, wanted=wanted)
    for policy, key, value, queues, harm, verdict in clashes:
        kind, command = ("operator policy", "clear_operator_policy") if policy.operator else ("policy", "clear_policy")
        shown = ", ".join(queues[:3]) + (f" and {len(queues) - 3} more" if len(queues) > 3 else "")
        yield Finding(
            subject=subject,
            verdict=verdict,
            seen=f"{kind} {policy.name!r} (pattern {policy.pattern!r}) sets {key}: {value} on {shown}: {harm}",
            wanted=wanted,
            do=f"change its pattern so that it does not match {needs.topology.prefix}*, or "
            f"`rabbitmqctl {command} -p {facts.vhost} {policy.name}`",
        )


Clash = tuple[Policy, str, Any, list[str], str, Verdict]


def _clashes(policies: list[Policy], needs: Needs) -> Iterator[Clash]:
    """Of each policy that is in force on a queue of the run, each setting that does harm, with the queues."""
    found: dict[tuple[str, bool, str], Clash] = {}
    for queue in _queues(needs):
        for operator in (False, True):
            policy = _in_force(policies, queue, operator)
            for key, value in (policy.definition if policy is not None else {}).items():
                harm = _harm(key, value, queue, needs)
                if policy is not None and harm is not None:
                    clash = found.setdefault((policy.name, operator, key), (policy, key, value, [], *harm))
                    clash[3].append(queue.name)
    yield from found.values()
    topology = needs.topology
    for exchange in topology.exchanges if topology is not None else ():
        matching = [one for one in policies if one.apply_to in {"all", "exchanges"} and allows(one.pattern, exchange)]
        policy = max(matching, key=lambda one: one.priority, default=None)
        if policy is not None and "alternate-exchange" in policy.definition:
            value = policy.definition["alternate-exchange"]
            words = "what belongs to no queue any more goes there instead of coming back"
            yield policy, "alternate-exchange", value, [exchange], words, "warning"
            return


def _queues(needs: Needs) -> list[Queue]:
    topology = needs.topology
    if topology is None:
        return []
    return [*topology.durable, topology.batch_queue(0, "0" * 32), topology.listener("runner-0", "0", "control")]


def _is_readable(policy: Policy) -> bool:
    try:
        re.compile(policy.pattern)
    except re.error:
        return False
    return True


def _applies(policy: Policy, queue: Queue) -> bool:
    return policy.apply_to in {"all", "queues", KINDS[queue.kind]} and allows(policy.pattern, queue.name)


def _in_force(policies: list[Policy], queue: Queue, operator: bool) -> Policy | None:
    """Return the one with the highest priority: no other has an effect."""
    matching = [policy for policy in policies if policy.operator == operator and _applies(policy, queue)]
    return max(matching, key=lambda policy: policy.priority, default=None)


def _harm(key: str, value: Any, queue: Queue, needs: Needs) -> tuple[str, Verdict] | None:
    """Return what a setting does to a queue of ours, and how bad that is; None: nothing."""
    if key in (NOT_OF_STREAMS if queue.kind == "stream" else STREAMS_ONLY):
        return None
    if key == "delivery-limit":
        return _harm_of_limit(value, queue, needs)
    if key == "consumer-timeout" and isinstance(value, int):
        if value / 1000 > needs.hold_seconds:
            return None
        return f"agents hold messages for up to {needs.hold_seconds:g} s", "problem"
    own = {"max-length-bytes": queue.max_length_bytes, "expires": queue.expires_ms}.get(key)
    if own is not None and isinstance(value, int) and value >= own:
        return None  # what the run itself declares is lower, and the lower one is in force
    if key in LOSES:
        return LOSES[key], "warning" if queue.kind == "exclusive" else "problem"
    return None


def _harm_of_limit(value: Any, queue: Queue, needs: Needs) -> tuple[str, Verdict] | None:
    """The lower one of policy and declaration is in force."""
    if queue.kind != "quorum" or not isinstance(value, int):
        return None
    if value < 0:
        return "RabbitMQ 3.10 drops messages at the first redelivery then", "problem"
    if value <= needs.delivery_limit:
        limit = f"broker.delivery_limit ({needs.delivery_limit})"
        return f"the broker dead-letters a task before our own {limit} ends it with an outcome", "problem"
    return None

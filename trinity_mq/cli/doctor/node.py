"""What a broker's own tools tell of it, where it is a private node of ours."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from trinity_mq.cli.doctor.facts import Disk, Facts
from trinity_mq.cli.doctor.management import ASKED, policy_from
from trinity_mq.local_broker.node import NodeError

Ctl = Callable[..., Awaitable[str]]
"""Runs rabbitmqctl with some words and returns what it prints."""
ALL = ("consumer_timeout_ms", "max_message_bytes", "clock", *ASKED)

# One call for everything: each costs up to a second. Names are given as bytes, so nothing in them is read as code.
QUESTION = """
V = %(vhost)s, U = %(user)s, N = %(prefix)s,
E = fun(K) -> case application:get_env(rabbit, K) of {ok, X} when is_integer(X) -> X; _ -> 0 end end,
D = fun(X) when is_integer(X) -> X; (_) -> null end,
P = fun(L) -> [#{name => proplists:get_value(name, X), pattern => proplists:get_value(pattern, X),
  'apply-to' => proplists:get_value('apply-to', X), priority => proplists:get_value(priority, X),
  definition => maps:from_list(proplists:get_value(definition, X))} || X <- L, proplists:get_value(vhost, X) =:= V] end,
R = try rabbit_auth_backend_internal:list_user_vhost_permissions(U, V) of
  [X | _] -> [proplists:get_value(K, X) || K <- [configure, write, read]]; [] -> null catch _:_ -> null end,
A = [case X of {{resource_limit, W, _}, _} -> W; {W, _} -> W end || X <- rabbit_alarm:get_alarms()],
Q = [B || X <- rabbit_amqqueue:list(V), B <- [element(4, amqqueue:get_name(X))],
  N =/= <<>>, byte_size(B) >= byte_size(N), binary:part(B, 0, byte_size(N)) =:= N],
io:put_chars(rabbit_json:encode(#{node => node(), consumer_timeout => E(consumer_timeout),
  max_message_size => E(max_message_size), alarms => A, policies => P(rabbit_policy:list()),
  operator_policies => P(rabbit_policy:list_op()), permissions => R,
  enabled => maps:keys(rabbit_feature_flags:list(enabled)), disabled => maps:keys(rabbit_feature_flags:list(disabled)),
  free => D(rabbit_disk_monitor:get_disk_free()), limit => D(rabbit_disk_monitor:get_disk_free_limit()),
  queues => Q, time => os:system_time(millisecond)})), io:nl(), ok.
"""


async def ask_node(ctl: Ctl, facts: Facts, prefix: str | None) -> None:
    """Fill in all that a node's tools tell; what they do not stays unknown, with the reason.

    Args:
        ctl: Runs rabbitmqctl on the node.
        facts: Filled in.
        prefix: Of the run's queues; None: no run is named.
    """
    question = QUESTION % {
        "vhost": _binary(facts.vhost), "user": _binary(facts.user), "prefix": _binary(prefix or "")
    }  # fmt: skip
    before = time.time()
    try:
        printed = await ctl("eval", " ".join(question.split()))
        told = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        _take(told, facts, prefix)
    except (NodeError, StopIteration, ValueError, KeyError, TypeError) as error:
        facts.missing(f"rabbitmqctl does not tell it ({' '.join(str(error).split()) or type(error).__name__})", *ALL)
        return
    after = time.time()
    facts.clock = (told["time"] / 1000 - (before + after) / 2, (after - before) / 2)


def _take(told: dict[str, Any], facts: Facts, prefix: str | None) -> None:
    node = str(told["node"])
    facts.consumer_timeout_ms, facts.max_message_bytes = told["consumer_timeout"], told["max_message_size"] or None
    facts.alarms = [f"{what} ({node})" for what in told["alarms"]]
    facts.policies = [
        policy_from(one, operator)
        for operator, key in ((False, "policies"), (True, "operator_policies"))
        for one in told[key]
    ]
    if told["permissions"] is not None:
        configure, write, read = told["permissions"]
        facts.permissions = (configure, write, read)
    else:
        facts.missing(f"the broker knows no permission of user {facts.user!r} on {facts.vhost!r}", "permissions")
    facts.feature_flags = {**dict.fromkeys(told["enabled"], True), **dict.fromkeys(told["disabled"], False)}
    if told["free"] is not None and told["limit"] is not None:
        facts.disks = [Disk(node=node, free=told["free"], limit=told["limit"])]
    else:
        facts.missing("the node does not know its disk", "disks")
    if prefix is not None:
        facts.queues = {name: (facts.queues or {}).get(name) for name in told["queues"]}


def _binary(text: str) -> str:
    return f"<<{','.join(str(byte) for byte in text.encode())}>>"

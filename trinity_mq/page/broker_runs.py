"""The runs that share a broker, derived from the queue names in its management API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from trinity_mq.operations.doctor.facts import API_PATHS, DoctorFacts, ask_management, management_url

QUEUE = re.compile(r"tmq\.(?P<run>[a-z0-9-]{1,40})\.(?P<name>.+)")


def runs_of(queues: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each run among queues: its name, and its numbers of messages, dead letters, consumers and
    queues.

    A run without consumers is over or stopped.
    """
    rows: dict[str, dict[str, Any]] = {}
    for queue in queues:
        match = QUEUE.fullmatch(str(queue.get("name", "")))
        if match is None:
            continue
        row = rows.setdefault(
            match["run"], {"run": match["run"], "messages": 0, "dead": 0, "consumers": 0, "queues": 0}
        )
        messages = int(queue.get("messages") or 0)
        row["queues"] += 1
        row["consumers"] += int(queue.get("consumers") or 0)
        row["messages"] += messages
        if match["name"] == "dead":
            row["dead"] = messages
    return [rows[name] for name in sorted(rows)]


async def broker_runs(url: str) -> tuple[list[dict[str, Any]], str]:
    """Return the runs on a broker's virtual host, or an empty list and why they are unknown.

    Args:
        url: AMQP URL of the broker. Of several comma-separated URLs the first is used.
    """
    first = url.split(",", maxsplit=1)[0]
    parts = urlsplit(first)
    no_answers = dict.fromkeys(name for name in API_PATHS if name != "queues")
    facts = DoctorFacts(
        vhost=unquote(parts.path[1:]) or "/", user=unquote(parts.username or "guest"), clock=None, **no_answers
    )
    await ask_management(management_url(first, None), None, facts)
    queues = facts.get("queues")
    return (runs_of(queues), "") if queues is not None else ([], facts.why("queues"))

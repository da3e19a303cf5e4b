"""What the management API tells of a broker."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from trinity_mq.cli.doctor.facts import Disk, Facts, Policy

TIMEOUT = 10.0
TAGS = {
    401: "user name or password are wrong there, or the user has no tag for it",
    403: "the user lacks the tag for it",
}
ASKED = ("alarms", "disks", "policies", "permissions", "feature_flags", "queues")


def management_url(broker: str, given: str | None) -> str:
    """Return where the API should be, without a slash at the end: as given, else on the broker's host.

    >>> management_url("amqp://u:p@host/v", None)
    'http://u:p@host:15672'
    """
    parts = urlsplit(broker)
    login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else "guest:guest@"
    if given:
        own = urlsplit(given if "://" in given else f"http://{given}")
        return f"{own.scheme}://{'' if '@' in own.netloc else login}{own.netloc}{own.path}".rstrip("/")
    secure = parts.scheme == "amqps"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{'https' if secure else 'http'}://{login}{host}:{15671 if secure else 15672}"


class Refusal(Exception):
    """One question was not answered."""


class Management:
    """The API at ``url``, which holds the user and the password."""

    def __init__(self, url: str, facts: Facts) -> None:
        parts = urlsplit(url)
        self._base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._user, self._password = unquote(parts.username or "guest"), unquote(parts.password or "")
        self._facts = facts
        self._session: Any = None

    async def tell(self, prefix: str | None, ssl: Any = None) -> None:
        """Fill in what is not known yet; what is refused stays unknown, with the reason.

        Args:
            prefix: Of the run's queues; None: no run is named.
            ssl: The TLS context, for https.
        """
        import aiohttp

        facts = self._facts
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        login = {"Authorization": aiohttp.encode_basic_auth(self._user, self._password, "utf-8")}
        connector = aiohttp.TCPConnector(ssl=ssl if ssl is not None else True)
        async with aiohttp.ClientSession(headers=login, timeout=timeout, connector=connector) as self._session:
            try:
                await self._get("/api/overview")
            except Refusal as refusal:
                facts.missing(str(refusal), *ASKED, *(() if facts.clock else ("clock",)))
                return
            vhost = quote(facts.vhost, safe="")
            for name, path, read in (
                ("nodes", "/api/nodes", self._nodes),
                ("policies", f"/api/policies/{vhost}", self._policies),
                ("permissions", f"/api/permissions/{vhost}/{quote(facts.user, safe='')}", self._permissions),
                ("feature_flags", "/api/feature-flags", self._flags),
                ("queues", f"/api/queues/{vhost}", self._queues),
            ):
                try:
                    await read(path, prefix)
                except Refusal as refusal:
                    facts.missing(str(refusal), *(("alarms", "disks") if name == "nodes" else (name,)))
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    facts.missing(f"{path} answers what it should not ({error!r})", name)

    async def _get(self, path: str) -> Any:
        import aiohttp
        from yarl import URL

        before = time.time()
        try:
            async with self._session.get(URL(self._base + path, encoded=True)) as answer:
                self._clock(answer.headers.get("Date"), before, time.time())
                if answer.status != 200:
                    raise Refusal(
                        f"{self._base}{path} answers {answer.status}: {TAGS.get(answer.status, answer.reason)}"
                    )
                return await answer.json(content_type=None)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise Refusal(f"no management API at {self._base} ({why}); is rabbitmq_management enabled?") from error

    def _clock(self, date: str | None, before: float, after: float) -> None:
        """A date has whole seconds, cut off: the moment is half a second later on average."""
        if date is None or self._facts.clock is not None:
            return
        try:
            theirs = email.utils.parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        self._facts.clock = (theirs + 0.5 - (before + after) / 2, 0.5 + (after - before) / 2)

    async def _nodes(self, path: str, _prefix: str | None) -> None:
        alarms, disks = [], []
        for node in await self._get(path):
            for key, words in (("mem_alarm", "memory"), ("disk_free_alarm", "disk")):
                if node.get(key):
                    alarms.append(f"{words} ({node['name']})")
            if isinstance(node.get("disk_free"), int) and isinstance(node.get("disk_free_limit"), int):
                disks.append(Disk(node=node["name"], free=node["disk_free"], limit=node["disk_free_limit"]))
        self._facts.alarms, self._facts.disks = alarms, disks
        if not disks:
            self._facts.missing("the node has not measured its disk yet", "disks")

    async def _policies(self, path: str, _prefix: str | None) -> None:
        found = []
        for operator in (False, True):
            for one in await self._get(path.replace("/api/", "/api/operator-") if operator else path):
                found.append(policy_from(one, operator))
        self._facts.policies = found

    async def _permissions(self, path: str, _prefix: str | None) -> None:
        seen = await self._get(path)
        self._facts.permissions = (seen["configure"], seen["write"], seen["read"])

    async def _flags(self, path: str, _prefix: str | None) -> None:
        self._facts.feature_flags = {one["name"]: one["state"] == "enabled" for one in await self._get(path)}

    async def _queues(self, path: str, prefix: str | None) -> None:
        if prefix is None:
            return
        listed = await self._get(f"{path}?columns=name,messages,consumers")
        ours = [one for one in listed if one["name"].startswith(prefix)]
        self._facts.queues = {one["name"]: _depth(one) for one in ours}


def _depth(queue: Mapping[str, Any]) -> tuple[int, int] | None:
    if not isinstance(queue.get("messages"), int):
        return None  # not counted yet
    return queue["messages"], int(queue.get("consumers", 0))


def policy_from(told: Mapping[str, Any], operator: bool) -> Policy:
    """Return a policy as the API, or rabbitmqctl, tells it. Raises KeyError or TypeError for anything else."""
    return Policy(
        name=told["name"],
        pattern=told["pattern"],
        apply_to=told["apply-to"],
        priority=int(told["priority"]),
        definition=dict(told["definition"]),
        operator=operator,
    )

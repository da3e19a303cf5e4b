"""Clients for a trial in mode ``serve``: they hold sessions through all gateways, and record the answers that
they get.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from trinity_mq.config import Config
from trinity_mq.gateway.app import RECORDED_HEADER, RETRIED_HEADER
from trinity_mq.gateway.session import SETTLED
from trinity_mq.gateway.settings import AppSettings

AGAIN_SECONDS = 0.25
"""Seconds until a request that failed is sent again."""
REQUEST_SECONDS = 8.0
"""Maximum seconds to wait for an answer, because a gateway may be frozen."""
PAUSE_SECONDS = 0.4
"""Mean seconds between two sessions of one client."""
IDLE_TTL, REWARD_TTL = 120.0, 90.0
"""Seconds requested for each session: longer than an outage."""
PASSING = {429, 502, 503, 504}
UNKNOWN = {401, 403, 404}
"""Statuses of a gateway that does not know a session. If they persist, the session is lost."""
UNKNOWN_SECONDS = 45.0
WAYS = ("with the end", "with the end", "before", "late", "twice", "of the call", "none", "discard")
LOST_SHARE, GROUP_SHARE, TURNS = 0.15, 0.25, 2


class TrafficOver(Exception):
    """No further requests are sent."""


@dataclass
class ClientRequest:
    """One request of a client, including its retries. Only requests to the model set ``call`` and ``recorded``."""

    tries: int = 0
    call: str = ""
    """Id of the answer that the client has; empty: no answer."""
    recorded: str = ""
    """The gateway's report whether the answer is recorded: ``yes``, ``no`` or ``off``."""


@dataclass
class ClientSession:
    """A session as known to its client."""

    id: str
    key: str
    group: str = ""
    recorded: bool = True
    """The gateway's report at the opening whether the session is recorded."""
    asked: list[ClientRequest] = field(default_factory=list)
    reward: float | None = None
    """The last accepted reward of the whole session."""
    rewarded: bool = False
    """True if a reward of the session or of a call was accepted."""
    ended: bool = False
    discarded: bool = False
    unsure: list[str] = field(default_factory=list)
    """Requests that a gateway refused, so that their effect is unknown: an earlier attempt may have counted."""
    state: str = ""
    """The state that a gateway reported last."""

    @property
    def must_train(self) -> bool:
        """True if the session must become training data or get a stated reason: an answer was recorded, a reward and
        the end were accepted, the session was not discarded, and no request has an unknown effect.
        """
        is_whole = self.recorded and self.rewarded and self.ended and not (self.discarded or self.unsure)
        return is_whole and any(request.recorded == "yes" for request in self.asked)


@dataclass
class Traffic:
    """Answers that all clients got."""

    sessions: list[ClientSession] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests, by status or error."""
    refused: list[str] = field(default_factory=list)
    """Requests that a gateway refused, although it had to accept them."""
    settled: bool = False
    """True if every session that must be trained on was settled in time after the last request."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of sessions and requests for the report, by description."""
        requests = [request for session in self.sessions for request in session.asked]
        return {
            "sessions": len(self.sessions),
            "rewarded": sum(session.rewarded for session in self.sessions),
            "calls": len(requests),
            "recorded": sum(request.recorded == "yes" for request in requests),
            "unrecorded": sum(request.recorded == "no" for request in requests),
            "repeated": sum(request.tries > 1 for request in requests),
            "failed requests": self.failures.total(),
        }


class Clients:
    """Clients that hold sessions until they are asked to finish.

    Args:
        config: The run's configuration, in mode ``serve``.
        seed: Seed of the clients' random choices.
        at_once: Number of clients.
    """

    def __init__(self, config: Config, seed: int, at_once: int) -> None:
        gateway, settings = config.gateway, AppSettings.of(config)
        scheme = "https" if gateway.cert_file else "http"
        host = gateway.host if gateway.is_local else "127.0.0.1"
        self.urls = [f"{scheme}://{host}:{gateway.port + number}" for number in range(gateway.num_gateways)]
        self._tls = ssl.create_default_context(cafile=gateway.cert_file) if gateway.cert_file else None
        if self._tls is not None:
            self._tls.check_hostname = False  # the certificate is issued for the external address
        self._key = _first_key(gateway.key_file)
        self._grouped, self._size = settings.compares_runs, max(settings.group_size, 2)
        self._seed, self._at_once = seed, at_once
        self._stopping, self._over = asyncio.Event(), asyncio.Event()
        self.traffic = Traffic()

    async def work(self) -> None:
        """Hold sessions until :meth:`finish`. Sessions in progress are held to their end. Then wait until all sessions
        that must be trained on are settled.
        """
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=0)
        limit = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as self._http:
            async with asyncio.TaskGroup() as group:
                for number in range(self._at_once):
                    group.create_task(self._agent(number), name=f"client {number}")
            self._stopping.set()
            await self._settle()

    async def finish(self, working: asyncio.Task[None], seconds: float) -> None:
        """Stop opening sessions, wait up to ``seconds`` until :meth:`work` is done, then stop all requests. ``working``
        is the task that runs :meth:`work`.
        """
        self._stopping.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(working)
        self._over.set()
        await asyncio.wait([working])

    async def _agent(self, number: int) -> None:
        dice = random.Random(f"{self._seed} {number}")
        with contextlib.suppress(TrafficOver):
            while not self._stopping.is_set():
                if self._grouped or dice.random() < GROUP_SHARE:
                    group = uuid.uuid4().hex
                    for _ in range(self._size):
                        await self._session(dice, group)
                else:
                    await self._session(dice, "")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(dice.uniform(0, 2 * PAUSE_SECONDS)):
                        await self._stopping.wait()

    async def _session(self, dice: random.Random, group: str) -> None:
        body = {
            "idle_ttl": IDLE_TTL,
            "ttl": REWARD_TTL,
            **({"group": group, "group_size": self._size} if group else {}),
        }
        status, opened, _ = await self._send(dice, "POST", "/sessions", body, self._key)
        if status != 201:
            self.traffic.refused.append(f"POST /sessions: {status} {opened}")
            return
        session = ClientSession(opened["id"], opened["key"], group, bool(opened["recorded"]))
        self.traffic.sessions.append(session)
        for number in range(dice.randint(1, TURNS)):
            await self._ask(dice, session, number)
        reward_time = "with the end" if group else dice.choice(WAYS)
        reward = round(dice.random(), 6)
        if reward_time in {"before", "twice"}:
            await self._reward(dice, session, {"reward": reward})
        if reward_time == "twice":
            await self._reward(dice, session, {"reward": round(1 - reward, 6)})
        if reward_time == "of the call" and session.asked[-1].call:
            await self._reward(dice, session, {"reward": reward, "call": session.asked[-1].call})
        await self._end(dice, session, reward_time, reward)
        if reward_time == "late":
            await asyncio.sleep(dice.uniform(0.2, 2.0))
            await self._reward(dice, session, {"reward": reward})

    async def _ask(self, dice: random.Random, session: ClientSession, number: int) -> None:
        """Send a request to the model. Some clients give up at once, and repeat the request as an SDK does."""
        asked = ClientRequest()
        session.asked.append(asked)
        # each turn has new digits, so that only an SDK's retry repeats a request
        question = f"{number},{dice.randrange(10)},{dice.randrange(10)}="
        body = {"model": "any", "messages": [{"role": "user", "content": question}]}
        patience = dice.uniform(0.0, 0.03) if dice.random() < LOST_SHARE else None
        path = f"/s/{session.id}/v1/chat/completions"
        status, answer, headers = await self._send(dice, "POST", path, body, session.key, asked, patience)
        if status != 200:
            self._note_refusal(session, path, status, answer)
            return
        asked.call, asked.recorded = answer["id"], headers.get(RECORDED_HEADER, "")

    async def _reward(self, dice: random.Random, session: ClientSession, body: Mapping[str, Any]) -> None:
        sent = {**body, "key": uuid.uuid4().hex}
        tries = ClientRequest()
        status, answer, _ = await self._send(dice, "POST", f"/s/{session.id}/reward", sent, session.key, tries)
        if status == 200:
            session.rewarded = True
            session.reward = body["reward"] if "call" not in body else session.reward
        elif status == 409:  # the session is already decided; a refused retry of a lost request may have counted
            session.unsure += ["reward"] if tries.tries > 1 else []
        else:
            self._note_refusal(session, "reward", status, answer)

    async def _end(self, dice: random.Random, session: ClientSession, reward_time: str, reward: float) -> None:
        body: dict[str, Any] = {"outcome": "discard"} if reward_time == "discard" else {}
        body |= {"reward": reward} if reward_time == "with the end" else {}
        tries = ClientRequest()
        status, answer, _ = await self._send(dice, "POST", f"/s/{session.id}/end", body, session.key, tries)
        if status == 200:
            session.ended, session.discarded = True, reward_time == "discard"
            if reward_time == "with the end":
                session.reward, session.rewarded = reward, True
        elif status == 409:
            session.unsure.append("end")
        else:
            self._note_refusal(session, "end", status, answer)

    def _note_refusal(self, session: ClientSession, request: str, status: int, answer: Any) -> None:
        session.unsure.append(request)
        self.traffic.refused.append(f"session {session.id}, {request}: {status} {str(answer)[:300]}")

    async def _send(
        self,
        dice: random.Random,
        method: str,
        path: str,
        body: Any,
        key: str,
        request: ClientRequest | None = None,
        patience: float | None = None,
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Send a request, and return status, answer and headers. A request that fails, or is not answered within
        ``patience`` seconds, is sent again to the next gateway.

        Raises:
            TrafficOver: The clients are finished.
        """
        request = request or ClientRequest()
        first_gateway, clock = dice.randrange(len(self.urls)), asyncio.get_running_loop().time
        began = clock()
        while not self._over.is_set():
            url = self.urls[(first_gateway + request.tries) % len(self.urls)]
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            if request.tries and "/v1/" in path:
                headers[RETRIED_HEADER] = str(request.tries)
            request.tries += 1
            try:
                async with asyncio.timeout(patience):
                    status, answer, response_headers = await self._request(method, url + path, body, headers)
                if status not in PASSING and not (status in UNKNOWN and clock() - began < UNKNOWN_SECONDS):
                    return status, answer, response_headers
                self.traffic.failures[str(status)] += 1
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self.traffic.failures[type(error).__name__] += 1
            if patience is None:
                await asyncio.sleep(AGAIN_SECONDS)
            patience = None
        raise TrafficOver

    async def _request(
        self, method: str, url: str, body: Any, headers: Mapping[str, str]
    ) -> tuple[int, Any, Mapping[str, str]]:
        async with self._http.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None), dict(response.headers)

    async def _settle(self) -> None:
        """Query every session that must be trained on until all are settled."""
        dice = random.Random(self._seed)
        waiting: Sequence[ClientSession] = [session for session in self.traffic.sessions if session.must_train]
        with contextlib.suppress(TrafficOver):
            while waiting:
                for session in waiting:
                    _, reply, _ = await self._send(dice, "GET", f"/s/{session.id}", None, session.key)
                    session.state = str(reply.get("state", "unknown")) if isinstance(reply, dict) else "unknown"
                waiting = [session for session in waiting if session.state not in SETTLED]
                if waiting:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await self._over.wait()
            self.traffic.settled = True


def clients_of(config: Config, seed: int, at_once: int, tell: Callable[[str], None]) -> Clients | None:
    """Return ``at_once`` clients of a run; None: the run does not serve sessions, its port is unknown here, or
    ``at_once`` is 0.
    """
    if config.mode != "serve" or at_once == 0:
        return None
    if config.gateway.port == 0:
        tell("gateway.port is 0: the clients cannot know a random port; set a fixed port for traffic")
        return None
    return Clients(config, seed, at_once)


def _first_key(path: str | None) -> str:
    """Return the first key of a run's key file, for opening sessions."""
    lines = [] if path is None else Path(path).read_text(encoding="utf-8").splitlines()
    return next((line.strip() for line in lines if line.strip()), "")

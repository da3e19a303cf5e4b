"""Users of a simulated run's gateways: programs that have sessions, retry like an SDK, and send rewards in every way.
Each user keeps a diary of the responses, which the invariants compare with the trained experiences.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_agents.simulation.schedule import SessionLoad
from trinity_agents.simulation.sessions.gateways import Reply, SimulatedGateway, answer_number
from trinity_mq.bus import Bus, Envelope, Topology

TRIES = 6
"""Maximum tries of a request, as an SDK makes with max_retries."""
TIMEOUTS = (0.15, 1.0, 8.0, 40.0)
"""Seconds after which users time out a request and retry it."""
PAUSES = (0.0, 0.2, 1.0, 4.0)
PADDING = 8000
"""Characters of a request that fills the stream."""
WORTH = 1 / 64
"""Unit of rewards. Each reward is a distinct multiple, exactly representable as a float."""
REPEATED = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which an SDK retries."""


@dataclass
class UserRequest:
    """A user's request to the model, with all its tries, and the answers that the user received."""

    text: str
    """The last message of the request. It is unique."""
    tries: int = 0
    is_repeated: bool = False
    """True if a try carried a retry count above 0. The earlier tries may not have reached a gateway."""
    equal: int = 1
    """Number of equal concurrent requests."""
    answers: dict[int, str] = field(default_factory=dict)
    """Value of the gateway's ``X-TMQ-Recorded`` header of each answer that arrived, by the number of the answer in the
    whole simulation."""

    def take(self, reply: Reply) -> str:
        """Record the answer in a gateway's reply, and return its text."""
        text = str(reply.body["choices"][0]["message"]["content"])
        self.answers[answer_number(int(text.split(maxsplit=1)[0]))] = reply.headers.get("X-TMQ-Recorded", "")
        return text


@dataclass
class SentReward:
    """A reward, and the response to its sender."""

    reward: float
    accepted: bool | None = None
    """Whether the reward was accepted. None: unknown, because no clear response arrived or the reward was sent over
    AMQP.
    """
    call: str | None = None


@dataclass
class SessionDiary:
    """A user's knowledge about one session."""

    id: str
    record: str
    group: str
    story: str
    key: str = ""
    asked: list[UserRequest] = field(default_factory=list)
    rewards: list[SentReward] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    """The conversation so far."""
    call: str = ""
    """Id of the latest answer."""
    is_one_call: bool = False
    """True if a call outside of any session made this session."""

    @property
    def is_kept(self) -> bool:
        """True if the session must be on the stream. A session with :attr:`is_one_call` may be missing if its answer
        was not recorded.
        """
        return not self.is_one_call or "yes" in {
            recorded for asked in self.asked for recorded in asked.answers.values()
        }


class Users:
    """All users of a run.

    Args:
        sessions: Parameters of the users.
        group_size: Number of sessions in a group.
        dice: Random generator for the users' decisions.
        gateways: Returns the living gateways.
        bus: A client's connection for events sent over AMQP.
        topology: Names of the run's queues and exchanges.
        note: Called with the name of each incident, for the coverage.
    """

    def __init__(
        self,
        sessions: SessionLoad,
        group_size: int,
        dice: random.Random,
        gateways: Callable[[], Sequence[SimulatedGateway]],
        bus: Bus,
        topology: Topology,
        note: Callable[[str], None],
    ) -> None:
        self._sessions, self._group_size, self._dice, self._gateways = sessions, group_size, dice, gateways
        self._bus, self._topology, self._note = bus, topology, note
        self._requests, self._rewards = itertools.count(1), itertools.count(1)
        self._groups = itertools.count(1)
        self.diaries: list[SessionDiary] = []
        self.wrong: list[str] = []
        """Message ids of AMQP events that no session can take."""
        self._stories: Mapping[str, Callable[[SessionDiary], Awaitable[None]]] = {
            "ends with a reward": self._ends_with_reward,
            "rewarded late": self._rewarded_late,
            "rewarded, then ended": self._rewarded_then_ended,
            "rewarded twice": self._rewarded_twice,
            "each answer rewarded": self._answers_rewarded,
            "rewarded over AMQP": self._over_amqp,
            "rewarded after the decision": self._after_decision,
            "rewarded wrongly": self._rewarded_wrongly,
            "vanishes": self._vanishes,
            "discarded": self._discarded,
            "failed": self._failed,
        }

    async def user(self, number: int) -> None:
        """Run the sessions of user ``number``, or its groups of sessions, in sequence."""
        await asyncio.sleep(self._dice.uniform(0.0, self._sessions.within))
        for n in range(self._sessions.sessions):
            if number < self._sessions.parked and not n:
                await self._run_group(self._parked)
            elif not self._sessions.grouped and self._dice.random() < 0.15:
                await self._one_call()
            else:
                await self._run_group(self._random_story)
            await asyncio.sleep(self._dice.choice(PAUSES))

    async def filler(self) -> None:
        """Run sessions that end with a reward until cancelled, so that the simulated run reaches its last batch."""
        while True:
            await self._run_group(self._ends_with_reward)
            await asyncio.sleep(0.2)

    async def noise(self) -> None:
        """Run evaluated sessions that fill the stream, until cancelled."""
        while True:
            diary = await self._open("eval", "")
            if diary is not None:
                await self._ask(diary, padding=PADDING)
                await self._post(diary, "end", {"reward": 0.5})
            await asyncio.sleep(self._sessions.noise)

    # -- sessions and their requests to the model

    async def _random_story(self, diary: SessionDiary) -> None:
        diary.story = self._dice.choice(list(self._stories))
        await self._stories[diary.story](diary)

    async def _run_group(self, story: Callable[[SessionDiary], Awaitable[None]]) -> None:
        """Run a session or, if sessions are compared, the sessions of a group concurrently. A group may have one
        session too few or too many.
        """
        if not self._sessions.grouped:
            record = self._dice.choice(["train"] * 6 + ["eval", "off"]) if story == self._random_story else "train"
            await self._run_session(record, "", story)
            return
        group = f"group-{next(self._groups)}"
        lacking = story == self._random_story and self._dice.random() < 0.1
        async with asyncio.TaskGroup() as members:
            for _ in range(self._group_size - lacking):
                members.create_task(self._run_session("train", group, story))
            if story == self._random_story and self._dice.random() < 0.2:
                members.create_task(self._run_session("train", group, story))

    async def _run_session(self, record: str, group: str, story: Callable[[SessionDiary], Awaitable[None]]) -> None:
        diary = await self._open(record, group)
        if diary is None:
            return
        self.diaries.append(diary)
        for _ in range(self._dice.choice([1, 1, 2, 3])):
            await self._ask(diary)
            await asyncio.sleep(self._dice.choice(PAUSES))
        await story(diary)

    async def _open(self, record: str, group: str) -> SessionDiary | None:
        asked = {"record": record, **({"group": group} if group else {})}
        reply = await self._send("POST", "/sessions", asked, {})
        if reply is None or reply.status != 201:
            return None
        return SessionDiary(reply.body["id"], record, group, "", reply.body["key"])

    async def _ask(self, diary: SessionDiary, padding: int = 0) -> None:
        """Send a request to the model, occasionally two equal requests concurrently."""
        equal = 2 if not padding and self._dice.random() < 0.1 else 1
        text = f"request {next(self._requests)}" + " " * padding
        asked = UserRequest(text, equal=equal)
        diary.asked.append(asked)
        messages = [*diary.messages, {"role": "user", "content": text}]
        path = f"/s/{diary.id}/v1/chat/completions"
        if equal > 1:
            self._note("equal requests at once")

        async def once() -> Reply | None:
            return await self._send("POST", path, {"messages": messages}, _key(diary), asked)

        for reply in await asyncio.gather(*[once() for _ in range(equal)]):
            if reply is None or reply.status != 200:
                continue
            diary.call = reply.body["id"]
            diary.messages = [*messages, {"role": "assistant", "content": asked.take(reply)}]

    async def _one_call(self) -> None:
        """Send a request without a session, and reward the answer by its id."""
        asked = UserRequest(f"request {next(self._requests)}")
        body = {"messages": [{"role": "user", "content": asked.text}]}
        reply = await self._send("POST", "/v1/chat/completions", body, {}, asked)
        if reply is None or reply.status != 200:
            return
        diary = SessionDiary(reply.body["id"], "train", "", "one call", asked=[asked], is_one_call=True)
        asked.take(reply)
        self.diaries.append(diary)
        await asyncio.sleep(self._dice.choice(PAUSES))
        sent = self._new_reward(diary)
        reply = await self._send("POST", "/feedback", {"reward": sent.reward, "msg_ids": [diary.id]}, {})
        _note_answer(sent, reply)
        self._note("one call, and feedback")

    # -- stories: rewards and ends of sessions

    async def _ends_with_reward(self, diary: SessionDiary) -> None:
        await self._end_with(diary)

    async def _rewarded_late(self, diary: SessionDiary) -> None:
        await self._post(diary, "end", {})
        await asyncio.sleep(self._dice.choice([3.0, 12.0, 30.0]))
        await self._reward(diary)
        self._note("rewarded late")

    async def _parked(self, diary: SessionDiary) -> None:
        """Send the reward after retention has cut the beginning of the stream."""
        diary.story = "parked"
        await self._post(diary, "end", {})
        await asyncio.sleep(self._dice.choice([150.0, 220.0]))
        await self._reward(diary)
        self._note("rewarded behind the cut")

    async def _rewarded_then_ended(self, diary: SessionDiary) -> None:
        await self._reward(diary)
        await self._post(diary, "end", {})

    async def _rewarded_twice(self, diary: SessionDiary) -> None:
        await self._reward(diary)
        await asyncio.sleep(self._dice.choice(PAUSES))
        await self._reward(diary, how=self._dice.choice(["replace", "add"]))
        await self._post(diary, "end", {})
        self._note("rewarded twice")

    async def _answers_rewarded(self, diary: SessionDiary) -> None:
        if diary.call:
            await self._reward(diary, call=diary.call)
        await self._end_with(diary)
        self._note("an answer rewarded")

    async def _over_amqp(self, diary: SessionDiary) -> None:
        sent = self._new_reward(diary)
        final = self._dice.random() < 0.5
        await self._publish("session_reward", session=diary.id, reward=sent.reward, final=final)
        if not final:
            await self._post(diary, "end", {})
        self._note("rewarded over AMQP")

    async def _after_decision(self, diary: SessionDiary) -> None:
        await self._end_with(diary)
        await asyncio.sleep(self._dice.choice([2.0, 8.0]))
        if self._dice.random() < 0.5:
            await self._reward(diary)
        else:
            sent = self._new_reward(diary)
            await self._publish("session_reward", session=diary.id, reward=sent.reward)
        self._note("rewarded after the end")

    async def _rewarded_wrongly(self, diary: SessionDiary) -> None:
        await self._post(diary, "reward", {"reward": "much"})
        self.wrong += [
            await self._publish("session_reward", session="nobody", reward=1.0),
            await self._publish("session_reward", session=diary.id, reward=1.0, call="chatcmpl-typo"),
            await self._publish("session_reward", session=diary.id, reward="much"),
        ]
        await self._end_with(diary)
        self._note("rewarded wrongly")

    async def _vanishes(self, diary: SessionDiary) -> None:
        self._note("vanishes")

    async def _discarded(self, diary: SessionDiary) -> None:
        if self._dice.random() < 0.5:
            await self._post(diary, "end", {})
        await self._send("DELETE", f"/s/{diary.id}", {}, _key(diary))
        self._note("discarded")

    async def _failed(self, diary: SessionDiary) -> None:
        await self._post(diary, "end", {"outcome": "failed", "reason": "the agent failed"})
        self._note("failed")

    # -- sending rewards and HTTP requests

    def _new_reward(self, diary: SessionDiary, call: str | None = None) -> SentReward:
        sent = SentReward(next(self._rewards) * WORTH, call=call)
        diary.rewards.append(sent)
        return sent

    async def _reward(self, diary: SessionDiary, call: str | None = None, how: str = "replace") -> None:
        sent = self._new_reward(diary, call)
        body = {"reward": sent.reward, "key": f"{sent.reward}", "how": how, **({} if call is None else {"call": call})}
        _note_answer(sent, await self._post(diary, "reward", body))

    async def _end_with(self, diary: SessionDiary) -> None:
        sent = self._new_reward(diary)
        _note_answer(sent, await self._post(diary, "end", {"reward": sent.reward}))

    async def _post(self, diary: SessionDiary, what: str, body: Mapping[str, Any]) -> Reply | None:
        return await self._send("POST", f"/s/{diary.id}/{what}", body, _key(diary))

    async def _publish(self, kind: str, **fields: Any) -> str:
        """Publish an event like an external program with a broker connection. Return the message id."""
        name = f"outside-{next(self._requests)}"
        sent = Envelope(body=json.dumps(fields).encode(), kind=kind, content_type="application/json", message_id=name)
        await self._bus.publish(self._topology.exchange("sessions"), "session", sent)
        return name

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        asked: UserRequest | None = None,
    ) -> Reply | None:
        """Make a request. Like an SDK, retry without a response or after certain statuses, possibly at another
        gateway.
        """
        chosen: SimulatedGateway | None = None
        sent_to = None
        for tries in range(TRIES):
            living = list(self._gateways())
            if living and (chosen not in living or self._dice.random() < 0.5):
                chosen = self._dice.choice(living)
            if chosen is not None and chosen in living:
                if asked is not None:
                    asked.tries += 1
                    asked.is_repeated = asked.is_repeated or tries > 0
                if tries and sent_to is not None and asked is not None:
                    self._note("asked again" if sent_to == chosen.id else "asked again elsewhere")
                sent_to = chosen.id
                counted = {**headers, "x-stainless-retry-count": str(tries)}
                timeout = self._dice.choices(TIMEOUTS, [1, 2, 4, 4])[0]
                reply = await chosen.request(method, path, body, counted, timeout)
                if reply is not None and reply.status not in REPEATED:
                    return replace(reply, tries=tries + 1)
            await asyncio.sleep(0.5 * 2 ** min(tries, 3) * self._dice.uniform(0.75, 1.0))
        return None


def _key(diary: SessionDiary) -> dict[str, str]:
    return {"Authorization": f"Bearer {diary.key}"}


def _note_answer(sent: SentReward, reply: Reply | None) -> None:
    """Record the response to a reward. A refused retry says nothing about an earlier try without a response."""
    if reply is not None and (reply.status == 200 or reply.tries == 1):
        sent.accepted = reply.status == 200

"""Requests that a client repeats: the answer that it got is trained on, and no other request's."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.unit.gateway.serving import Serving, serving, serving_config
from trinity_mq.gateway.conversations import Conversation
from trinity_mq.gateway.session_store import MemorySessionStore, SessionsUnavailable
from trinity_mq.messages import SampledChoice, SessionCall, SessionOpened
from trinity_mq.workflows.sessions.assembly import session_experiences, superseded_calls

ASK = {"messages": [{"role": "user", "content": "hi"}]}
AGAIN = {"x-stainless-retry-count": "1"}


class Hold:
    """Makes the n-th use of a coroutine function wait for its release, behind its effect or before it."""

    def __init__(self, work: Callable[..., Awaitable[Any]], number: int, *, behind: bool) -> None:
        self._work, self._number, self._behind = work, number, behind
        self._uses = 0
        self.entered, self.release, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any) -> Any:
        self._uses += 1
        if self._uses != self._number:
            return await self._work(*args)
        if self._behind:
            await self._work(*args)
        self.entered.set()
        try:
            await self.release.wait()
        finally:
            self.left.set()
        return await self._work(*args)


async def ask(at: Serving, session: str, headers: dict[str, str] | None = None) -> str:
    url = f"{at.url}/s/{session}/v1/chat/completions"
    async with at.http.post(url, json=ASK, headers=headers) as response:
        assert response.status == 200
        text: str = (await response.json())["choices"][0]["message"]["content"]
        return text


async def give_up(at: Serving, session: str, hold: Hold) -> None:
    """Ask, and leave once the request is where it is held."""
    asking = asyncio.create_task(ask(at, session))
    await hold.entered.wait()
    asking.cancel()
    await hold.left.wait()
    await asyncio.gather(asking, return_exceptions=True)


def trained_on(at: Serving, session: str) -> list[str]:
    calls = list(at.session(session).calls.values())
    found = session_experiences(calls, reward=1.0, call_rewards={}, merge="prefix", turn_discount=1.0)
    return [one.response_text or "" for one in found]


def hold_record(at: Serving, number: int) -> Hold:
    hold = Hold(at.store.record, number, behind=True)
    at.store.record = hold  # type: ignore[method-assign, assignment]
    return hold


def hold_engine(at: Serving, number: int) -> Hold:
    hold = Hold(at.calls.ask, number, behind=False)
    at.calls.ask = hold  # type: ignore[method-assign, assignment]
    return hold


@pytest.mark.parametrize("headers", [AGAIN, {}])
async def test_an_answer_whose_client_left_during_the_confirm_is_not_trained_on_beside_its_repeat(
    headers: dict[str, str],
) -> None:
    async with serving(["one", "two"]) as at:
        name = (await at.open())["id"]
        await give_up(at, name, hold_record(at, 1))
        assert await ask(at, name, headers) == "two"
        assert len(at.session(name).calls) == 2
        assert trained_on(at, name) == ["two"]


async def test_a_repeat_that_reaches_another_gateway_replaces_the_answer_as_well() -> None:
    async with serving(["one"]) as at, serving(["two"], store=at.store) as other:
        name = (await at.open())["id"]
        await give_up(at, name, hold_record(at, 1))
        await ask(other, name, AGAIN)
        assert trained_on(at, name) == ["two"]


async def test_the_repeat_of_a_request_without_an_answer_leaves_that_of_its_sibling() -> None:
    async with serving(["one", "two", "three"]) as at:
        name = (await at.open())["id"]
        hold = hold_engine(at, 2)
        assert await ask(at, name) == "one"
        await give_up(at, name, hold)
        assert await ask(at, name, AGAIN) == "two"
        assert trained_on(at, name) == ["one", "two"]


async def test_parallel_equal_requests_are_all_trained_on() -> None:
    async with serving(lambda prompt: "same") as at:
        name = (await at.open())["id"]
        answers = await asyncio.gather(*(ask(at, name) for _ in range(3)))
        assert trained_on(at, name) == answers == ["same"] * 3


async def test_a_repeat_does_not_replace_the_answer_to_a_request_that_was_under_way_beside_it() -> None:
    async with serving(lambda prompt: "same") as at:
        name = (await at.open())["id"]
        hold = hold_engine(at, 1)
        repeat = asyncio.create_task(ask(at, name, AGAIN))  # its first try was lost before any gateway got it
        await hold.entered.wait()
        await ask(at, name)
        hold.release.set()
        await repeat
        assert len(trained_on(at, name)) == 2


async def test_a_request_that_failed_and_its_repeat_leave_the_answer_to_an_equal_one() -> None:
    async with serving(["one", "two"]) as at:
        name = (await at.open())["id"]
        await ask(at, name)
        engine = at.calls.ask

        async def broken(*args: Any) -> Any:
            at.calls.ask = engine  # type: ignore[method-assign, assignment]
            raise ConnectionError("the engine is away")

        at.calls.ask = broken  # type: ignore[method-assign, assignment]
        async with at.http.post(f"{at.url}/s/{name}/v1/chat/completions", json=ASK) as response:
            assert response.status >= 500
        await ask(at, name, AGAIN)
        assert trained_on(at, name) == ["one", "two"]


async def test_a_second_repeat_replaces_the_first_one() -> None:
    async with serving(["one", "two", "three"]) as at:
        name = (await at.open())["id"]
        for number in range(3):
            await ask(at, name, {"x-stainless-retry-count": f"{number}"})
        first, second, third = at.session(name).calls.values()
        assert [second.supersedes, third.supersedes] == [first.call, second.call]
        assert trained_on(at, name) == ["three"]


class Away(MemorySessionStore):
    async def open(self, opened: SessionOpened, *, at_once: bool = False) -> None:
        raise SessionsUnavailable("the broker is away")


class Stuck(MemorySessionStore):
    async def open(self, opened: SessionOpened, *, at_once: bool = False) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("store", [Away, Stuck])
async def test_an_agent_without_a_session_is_answered_while_nothing_is_kept(store: type[MemorySessionStore]) -> None:
    config = serving_config(gateway={"record_timeout": 0.05})
    async with serving(lambda prompt: "hello", config=config, store=store()) as at:
        async with asyncio.timeout(10), at.http.post(f"{at.url}/v1/chat/completions", json=ASK) as response:
            assert response.status == 200
            assert response.headers["X-TMQ-Recorded"] == "no"
            assert (await response.json())["choices"][0]["message"]["content"] == "hello"
        assert (at.app.counts["calls"], at.app.counts["unrecorded"]) == (1, 1)
        assert list(at.store.ledger) == []


def elsewhere(call: str, at: float, *, began: float, retry: int = 0, **fields: Any) -> SessionCall:
    choice = SampledChoice(ids=[len(call)], logprobs=[0.0], text=call, finish_reason="stop")
    return SessionCall(
        session="s", call=call, at=at, began=began, retry=retry, digest="same", prompt=[1], choices=[choice], **fields
    )


FIRST = elsewhere("first", 1.4, began=1.0)
REPEAT = elsewhere("repeat", 1.2, began=1.1, retry=1)


@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        ([FIRST, REPEAT], {"first"}),
        ([REPEAT, FIRST], {"first"}),
        ([REPEAT, elsewhere("asked afterwards", 2.0, began=1.3)], set()),
        ([FIRST, elsewhere("another", 1.4, began=1.1)], set()),
        (
            [elsewhere("beside", 1.4, began=1.0), elsewhere("repeat", 1.2, began=1.1, retry=1, siblings=["beside"])],
            set(),
        ),
        ([elsewhere("beside", 1.4, began=1.0, siblings=["repeat"]), REPEAT], set()),
        ([elsewhere("third", 3.0, began=2.0, retry=2), REPEAT, FIRST], {"repeat", "first"}),
        ([FIRST.model_copy(update={"digest": "other"}), REPEAT], set()),
        ([FIRST.model_copy(update={"began": 0.0}), REPEAT], set()),
        ([FIRST, REPEAT.model_copy(update={"supersedes": "first"}), elsewhere("equal", 1.4, began=1.0)], {"first"}),
    ],
    ids=range(10),
)
def test_a_repeat_replaces_an_answer_that_another_gateway_recorded(calls: list[SessionCall], wanted: set[str]) -> None:
    """Whichever of the two the stream has first: neither gateway may have read the answer of the other."""
    assert superseded_calls(calls) == wanted
    found = session_experiences(calls, reward=1.0, call_rewards={}, merge="per_call", turn_discount=1.0)
    assert {one.response_text for one in found} == {call.call for call in calls} - wanted


def attempt_like(number: int, draws: random.Random) -> SessionCall:
    at, began, retry = draws.randint(1, 9), draws.randint(0, 9), draws.randint(0, 3)
    fields = {
        "digest": draws.choice(["", "a", "b"]),
        "siblings": [f"c{draws.randint(0, 6)}"] if draws.random() < 0.2 else [],
        "supersedes": f"c{draws.randint(0, 6)}" if draws.random() < 0.1 else "",
    }
    return elsewhere(f"c{number}", at, began=began, retry=retry).model_copy(update=fields)


@pytest.mark.parametrize("seed", range(50))
def test_of_equal_requests_a_repeat_replaces_the_one_with_the_highest_retry_count(seed: int) -> None:
    draws = random.Random(seed)
    calls = [attempt_like(number, draws) for number in range(draws.randint(2, 8))]
    wanted = {call.supersedes for call in calls if call.supersedes}
    for repeat in (call for call in calls if call.retry and call.digest and not call.supersedes):
        equal = [
            call
            for call in calls
            if call.digest == repeat.digest
            and call.retry < repeat.retry
            and 0.0 < call.began <= repeat.at
            and call.call not in {*wanted, *repeat.siblings}
            and repeat.call not in call.siblings
        ]
        wanted |= {call.call for call in sorted(equal, key=lambda call: -call.retry)[:1]}
    assert superseded_calls(calls) == wanted


@pytest.mark.parametrize("digests", [1, 5000])
def test_many_repeats_take_no_quadratic_time(digests: int) -> None:
    calls = [
        elsewhere(f"c{n}", n + 0.5, began=n + 0.1, retry=n % 1001).model_copy(update={"digest": f"{n % digests}"})
        for n in range(5000)
    ]
    started = time.process_time()
    assert len(superseded_calls(calls)) == (4995 if digests == 1 else 0)
    assert time.process_time() - started < 3.0


def fail(conversation: Conversation, call: str, retry: int, beside: str = "") -> None:
    """Have a try end without an answer, while an equal request is under way."""
    other = conversation.trying(beside, "same", retry=0, began=1.0) if beside else contextlib.nullcontext()
    with other, contextlib.suppress(ConnectionError), conversation.trying(call, "same", retry=retry, began=1.0):
        raise ConnectionError("the engine is away")


@pytest.mark.parametrize(
    ("retry", "calls", "wanted"),
    [
        (0, [elsewhere("between", 2.0, began=1.5, retry=1)], {"between"}),
        (1, [elsewhere("first", 2.0, began=0.5)], {"first"}),
        (0, [elsewhere("beside", 1.5, began=1.0)], set()),
        (1, [], set()),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_third_try_replaces_the_answer_that_only_another_gateway_gave(
    retry: int, calls: list[SessionCall], wanted: set[str], is_known: bool
) -> None:
    """One of the tries before it failed here; of the other this gateway knows the answer, or none."""
    conversation = Conversation()
    fail(conversation, "failed", retry, beside="beside")
    with conversation.trying("third", "same", retry=2, began=3.0) as mine:
        named = conversation.repeated_by(mine, calls if is_known else [])
    known = {"supersedes": named, "retry": mine.unknown_tries, "siblings": sorted(mine.siblings)}
    third = elsewhere("third", 3.5, began=3.0).model_copy(update=known)
    assert superseded_calls([*calls, third]) == wanted

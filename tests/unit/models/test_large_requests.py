"""Large requests are read in threads, a bounded number of bytes at a time, while others are answered."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from tests.waiting import until
from trinity_mq.engines.generation import text
from trinity_mq.engines.generation.text import Prompt, TextCodec
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.models.clients import EngineClients, json_text
from trinity_mq.models.errors import EngineNotReady, PromptTooLong
from trinity_mq.runtime import http
from trinity_mq.runtime.http import BodyReader
from trinity_mq.testing.scripted import ScriptedGenerator, byte_codec

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "1+1=" * 5000
SHORT = {"messages": [{"role": "user", "content": "1+1="}]}


class Held:
    """Holds the reading of long texts until it is released."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Semaphore(0), threading.Event()
        self.threads: list[str] = []

    def wait(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        assert self.release.wait(30)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, True, 30)


class WatchedCodec(TextCodec):
    """The codec of bytes: notes what it reads, and lets long texts wait."""

    def __init__(self, held: Held | None = None) -> None:
        vars(self).update(vars(byte_codec()))
        self.held, self.messages, self.characters = held, list[int](), list[int]()

    def prompt(self, messages: Any, *args: Any, **keys: Any) -> Prompt:
        self.messages.append(len(messages))
        if self.held is not None and sum(len(message["content"]) for message in messages) > 4096:
            self.held.wait()
        return super().prompt(messages, *args, **keys)

    def encode(self, text: str, **keys: Any) -> list[int]:
        self.characters.append(len(text))
        if self.held is not None and len(text) > 4096:
            self.held.wait()
        return super().encode(text, **keys)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.release.set()


@pytest.fixture
def codec(request: pytest.FixtureRequest) -> WatchedCodec:
    return WatchedCodec(request.getfixturevalue("held") if "held" in request.fixturenames else None)


@pytest.fixture
async def server(serving: Callable[..., Any], codec: WatchedCodec) -> AsyncIterator[EngineServer]:
    generator = ScriptedGenerator(lambda prompt: "2", max_model_len=1000)
    generator.codec = codec
    async with serving(generator) as server:
        yield server


@contextlib.asynccontextmanager
async def asked(work: Any) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "1"}] * 5000}]}),
        (COMPLETIONS, {"prompt": LONG}),
        ("/v1/tokenize", {"prompt": LONG}),
    ],
)
async def test_others_are_answered_while_a_long_request_is_read(
    server: EngineServer, held: Held, path: str, body: dict[str, Any]
) -> None:
    async with aiohttp.ClientSession() as session, asked(session.post(server.url + path, json=body)) as long:
        await held.has_begun()
        async with session.post(server.url + CHAT, json=SHORT) as response:
            assert response.status == 200
        assert not long.done()
        held.release.set()
        async with await long as response:
            assert response.status == (200 if path == "/v1/tokenize" else 400)
    assert all(name.startswith("tmq-body") for name in held.threads)


async def test_a_long_request_of_a_group_holds_up_none_of_the_group(
    server: EngineServer, held: Held, clients: EngineClients
) -> None:
    async def ask(body: dict[str, Any]) -> Any:
        return await clients.post_async(server.url + CHAT, {**body, "return_token_ids": True}, {}, 30.0)

    await ask(SHORT)  # after it the client knows that the server takes groups
    async with asked(ask({"messages": [{"role": "user", "content": LONG}]})) as long, asked(ask(SHORT)) as short:
        await held.has_begun()
        assert (await short)["choices"][0]["message"]["content"] == "2"
        held.release.set()
        with pytest.raises(PromptTooLong):
            await long


async def test_more_bytes_than_may_wait_are_refused_and_small_requests_are_not(
    server: EngineServer, held: Held, clients: EngineClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MOST_BYTES", 30_000)

    async def ask(text: str) -> Any:
        return await clients.post_async(server.url + COMPLETIONS, {"prompt": text}, {}, 30.0)

    async with asked(ask(LONG)):
        await held.has_begun()
        with pytest.raises(EngineNotReady, match="has 20013 bytes, and 20013 bytes of others are being read"):
            await ask(LONG)
        assert (await ask("1"))["choices"][0]["text"] == "2"


async def test_a_reader_counts_what_waits_and_what_runs_and_forgets_who_left() -> None:
    reader, release, begun = BodyReader(10), threading.Event(), threading.Semaphore(0)

    def read() -> str:
        begun.release()
        assert release.wait(30)
        return "read"

    running = [asyncio.create_task(reader.run(100, read)) for _ in range(http.THREADS)]
    for _ in running:
        assert await asyncio.to_thread(begun.acquire, True, 30)
    waiting = asyncio.create_task(reader.run(100, read))
    await until(lambda: reader.held == 100 * (http.THREADS + 1))
    waiting.cancel()
    running[0].cancel()
    await asyncio.wait({waiting, running[0]})
    assert reader.held == 100 * http.THREADS, "who waited has gone; the thread of the other one still works"
    assert await reader.run(10, lambda: "at once") == "at once"
    release.set()
    assert await running[1] == "read"
    await until(lambda: reader.held == 0)
    assert await reader.run(100, read) == "read", "its thread is free again"


def test_of_a_text_that_is_too_long_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = WatchedCodec()
    monkeypatch.setattr(text, "CHARACTERS_PER_TOKEN", 4)
    assert len(codec.encode_within("1" * 100_000, 10)) == (10 + text.JOINED) * 4 == max(codec.characters)
    assert codec.encode_within("123", 10) == codec.encode("123")
    marks = "<|im_end|>" * 15  # few tokens for so long a text: its beginning does not say that it is too long
    assert codec.encode_within(marks, 10) == codec.encode(marks)


async def test_of_more_messages_than_tokens_the_beginning_is_rendered(
    server: EngineServer, codec: WatchedCodec
) -> None:
    body = {"messages": SHORT["messages"] * 20_000}
    async with aiohttp.ClientSession() as session, session.post(server.url + CHAT, json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["code"], error["limit"], len(error["prompt_token_ids"])) == ("context_length_exceeded", 999, 1000)
    assert max(codec.messages) == 1000


@pytest.mark.parametrize("text", ["\u03c0 \U0001f642", "half a pair: \ud83d", 'quoted "\n'])
def test_bodies_of_requests_are_the_same_json_whoever_writes_them(text: str) -> None:
    content = {"text": text, "ids": [1, 2**40], "none": None, "number": 1e-7, "flag": True}
    assert json.loads(json_text(content)) == content

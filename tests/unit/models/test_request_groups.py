"""Requests that are made together go to the engine as one, and each gets what it would get on its own."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgpack
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from tests.waiting import until
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.models import EngineLost, EngineNotReady, EngineRefused, PromptTooLong, VersionMismatch
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.group_format import (
    GROUP_PATH,
    GROUPS_HEADER,
    AnswerReader,
    GroupedAnswer,
    GroupedRequest,
    pack_answer,
    pack_body,
    pack_group,
    pack_request,
    unpack_body,
    unpack_requests,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CHAT = "/v1/chat/completions"


def question(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": 4, "return_token_ids": True, **more}


def packed(*requests: GroupedRequest) -> bytes:
    bodies = [pack_request(request) for request in requests]
    return pack_group([body for body in bodies if body is not None])


@pytest.fixture
async def server(serving: Callable[..., Any], shared_generator: Any) -> AsyncIterator[EngineServer]:
    async with serving(shared_generator, max_batch_delay=0.05) as server:
        yield server


async def ask(clients: EngineClients, server: EngineServer, body: dict[str, Any], **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await clients.post_async(server.url + CHAT, body, names, 30.0)


@pytest.fixture
async def acquainted(clients: EngineClients, server: EngineServer) -> EngineClients:
    """Clients that know that the server takes groups."""
    await ask(clients, server, question("1+1="))
    return clients


async def test_what_is_asked_together_is_sampled_together_and_answered_as_alone(
    acquainted: EngineClients, server: EngineServer
) -> None:
    texts = [f"{number}+{number}=" for number in range(8)]
    async with EngineClients() as fresh:
        alone = []
        for text in texts[:1]:
            alone.append(await ask(fresh, server, question(text)))
    rounds = server.batcher.counters.batch_steps
    grouped = await asyncio.gather(*(ask(acquainted, server, question(text)) for text in texts))
    assert server.batcher.counters.batch_steps == rounds + 1
    unlike = {"id", "created"}
    assert {k: v for k, v in grouped[0].items() if k not in unlike | {"choices"}} == {
        k: v for k, v in alone[0].items() if k not in unlike | {"choices"}
    }
    [found], [wanted] = grouped[0]["choices"], alone[0]["choices"]
    assert found.keys() == wanted.keys()
    assert found["token_ids"] == wanted["token_ids"]
    assert found["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-5)
    assert [answer["prompt_text"] for answer in grouped] != [grouped[0]["prompt_text"]] * 8
    assert all(answer["weight_version"] == [1, 7] for answer in grouped)


async def test_prompts_go_in_groups_too(acquainted: EngineClients, server: EngineServer) -> None:
    body = {"prompt": ["1+", "2+"], "max_tokens": 2, "temperature": 0}
    answers = await asyncio.gather(
        acquainted.post_async(server.url + "/v1/completions", body, {}, 30.0), ask(acquainted, server, question("3+4="))
    )
    assert [len(answer["choices"]) for answer in answers] == [2, 1]


async def test_each_of_a_group_has_an_error_of_its_own(acquainted: EngineClients, server: EngineServer) -> None:
    found = await asyncio.gather(
        ask(acquainted, server, question("1+2=")),
        ask(acquainted, server, question("1+2="), X_TMQ_Version="1.6"),
        ask(acquainted, server, question("1+2=", temprature=1)),
        ask(acquainted, server, question("1+2+3+4=", max_prompt_tokens=3)),
        ask(acquainted, server, question("1+2=", stream=True)),
        return_exceptions=True,
    )
    assert [type(one) for one in found] == [dict, VersionMismatch, EngineRefused, PromptTooLong, EngineRefused]
    assert "unknown option 'temprature'" in str(found[2])
    assert "stream with a request of its own" in str(found[4])
    server.state.version = None
    server.state.phase = "empty"
    with pytest.raises(EngineNotReady) as caught:
        await ask(acquainted, server, question("1+2="))
    assert caught.value.retry_after == 1.0


async def test_what_has_no_form_in_a_group_goes_alone_and_takes_no_other_along(
    acquainted: EngineClients, server: EngineServer
) -> None:
    found = await asyncio.gather(
        ask(acquainted, server, question("1+2=")),
        ask(acquainted, server, question("1+2=", seed=1 << 70)),
        ask(acquainted, server, question("1+2=", stop=object())),
        return_exceptions=True,
    )
    assert [type(one) for one in found] == [dict, EngineRefused, TypeError]


async def test_one_that_gives_up_takes_nothing_from_the_others(acquainted: EngineClients, server: EngineServer) -> None:
    server.state.pause(30.0)
    asking = [asyncio.create_task(ask(acquainted, server, question("1+2="))) for _ in range(3)]
    await until(lambda: server.batcher.load == 3)
    asking[1].cancel()
    with pytest.raises(EngineLost, match=r"no answer within 0\.1 s"):
        await acquainted.post_async(server.url + CHAT, question("5+5="), {}, 0.1)
    server.state.resume()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(one) for one in found] == [dict, asyncio.CancelledError, dict]


async def test_clients_that_are_closed_leave_nobody_waiting(acquainted: EngineClients, server: EngineServer) -> None:
    server.state.pause(30.0)
    asking = [asyncio.create_task(ask(acquainted, server, question("1+2="))) for _ in range(2)]
    await until(lambda: server.batcher.load == 2)
    await acquainted.aclose()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(one) for one in found] == [EngineLost, EngineLost]


# -- other servers


@pytest.fixture
async def fake() -> AsyncIterator[Callable[[Handler, Handler], Awaitable[str]]]:
    runners: list[web.AppRunner] = []

    async def start(single: Handler, group: Handler) -> str:
        application = web.Application()
        application.add_routes([web.post(CHAT, single), web.post(GROUP_PATH, group)])
        runners.append(runner := web.AppRunner(application))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site.port}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def alone(request: web.Request) -> web.Response:
    return web.json_response({"alone": True}, headers={GROUPS_HEADER: "yes"})


async def test_a_server_that_takes_no_groups_any_more_is_asked_for_each(
    fake: Callable[..., Any], clients: EngineClients
) -> None:
    async def gone(request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    url = await fake(alone, gone) + CHAT
    await clients.post_async(url, {}, {}, 5.0)
    answers = await asyncio.gather(*(clients.post_async(url, {}, {}, 5.0) for _ in range(3)))
    assert answers == [{"alone": True}] * 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the answer ended early"),
        (pack_answer(GroupedAnswer(0, 200, {}, pack_body({}))), "the answer ended early"),
        (pack_answer(GroupedAnswer(7, 200, {}, pack_body({}))), "an answer to request 7 of 2"),
        (msgpack.packb([0, 200, {}, b"\xc1"]) + msgpack.packb([1, 200, {}, b""]), "the body is not MessagePack"),
        (b"\xc1", "not a stream of answers"),
        (b"hello", "not a stream of answers"),
        (msgpack.packb([0, "200", {}, b"\x80"]), "not a stream of answers"),
        (msgpack.packb([0, 200, {}, {}]), "not a stream of answers"),
    ],
)
async def test_an_answer_that_is_none_is_a_lost_engine(
    fake: Callable[..., Any], clients: EngineClients, body: bytes, said: str
) -> None:
    async def broken(request: web.Request) -> web.Response:
        return web.Response(body=body)

    url = await fake(alone, broken) + CHAT
    await clients.post_async(url, {}, {}, 5.0)
    found = await asyncio.gather(*(clients.post_async(url, {}, {}, 5.0) for _ in range(2)), return_exceptions=True)
    lost = [one for one in found if isinstance(one, EngineLost)]
    assert len(lost) == (1 if body and said == "the answer ended early" else 2)
    assert all(said in str(one) for one in lost)


async def test_an_unexpected_failure_leaves_nobody_waiting(
    fake: Callable[..., Any], clients: EngineClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(request: web.Request) -> web.Response:
        return web.Response(body=pack_answer(GroupedAnswer(0, 200, {}, pack_body({}))))

    def broken(reader: AnswerReader, data: bytes) -> list[GroupedAnswer]:
        raise RuntimeError("a fault of ours")

    url = await fake(alone, answers) + CHAT
    await clients.post_async(url, {}, {}, 5.0)
    monkeypatch.setattr(AnswerReader, "feed", broken)
    with capture_logs() as logged, pytest.raises(EngineLost, match="RuntimeError: a fault of ours"):
        await clients.post_async(url, {}, {}, 5.0)
    assert [line["event"] for line in logged] == ["request_group_failed"]


# -- the format


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not MessagePack"),
        (b"\xc1", "not MessagePack"),
        (msgpack.packb({}), "wanted an array"),
        (msgpack.packb([]), "wanted an array"),
        (msgpack.packb([["/v1/x", {}]]), "wanted an array"),
        (msgpack.packb([["/v1/x", {"a": 1}, {}]]), "wanted an array"),
        (msgpack.packb([["/v1/x", {}, []]]), "wanted an array"),
        (msgpack.packb([[CHAT, {}, question("1+1=")]]) + b"x", "not MessagePack"),
    ],
)
async def test_what_is_no_group_is_refused(server: EngineServer, body: bytes, said: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(server.url + GROUP_PATH, data=body) as response:
        assert response.status == 400
        assert said in (await response.json())["error"]["message"]


async def test_other_routes_are_refused_in_a_group(server: EngineServer) -> None:
    body = packed(GroupedRequest("/admin/pause", {}, {}))
    async with aiohttp.ClientSession() as session, session.post(server.url + GROUP_PATH, data=body) as response:
        [answer] = AnswerReader().feed(await response.read())
    assert answer.status == 404
    assert not server.state.paused


def test_the_format_keeps_what_is_in_it_in_pieces_of_any_size() -> None:
    requests = [
        GroupedRequest(CHAT, {"X-TMQ-Version": "1.2"}, question("ä")),
        GroupedRequest("/v1/completions", {}, {}),
    ]
    assert unpack_requests(packed(*requests)) == requests
    body = {"x": [-1.5, -math.inf], "y": None}
    answers = [GroupedAnswer(1, 200, {"A": "b"}, pack_body(body)), GroupedAnswer(0, 503, {}, pack_body({}))]
    reader = AnswerReader()
    stream = b"".join(map(pack_answer, answers))
    assert [found for place in range(len(stream)) for found in reader.feed(stream[place : place + 1])] == answers
    assert unpack_body(answers[0].body) == body

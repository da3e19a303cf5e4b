"""Each API's options, logprobs, stop sequences and characters, streamed and not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from tests.unit.gateway.serving import Serving, serving
from trinity_mq.gateway import app
from trinity_mq.gateway.conversations import digest_of
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.sse import SurrogateRepairer
from trinity_mq.testing.scripted import logprob

HALF = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
TOOL = {"name": "add", "parameters": {"type": "object"}}
TOOLS = {
    "chat/completions": [{"type": "function", "function": TOOL}],
    "responses": [{"type": "function", **TOOL}],
    "messages": [{"name": "add", "input_schema": {"type": "object"}}],
}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 512},
}


async def ask(at: Serving, path: str, record: str = "train", **options: Any) -> tuple[int, Any]:
    made = await at.open(record=record)
    async with at.http.post(f"{made['base_url']}/{path}", json={**BODIES[path], **options}) as response:
        text = await response.text()
        if not options.get("stream") or response.status != 200:
            return response.status, json.loads(text)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return 200, [json.loads(event) for event in events if event != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "option", "value", "neutral"),
    [
        *[
            (path, name, value, neutral)
            for path in BODIES
            for name, value, neutral in [
                ("logit_bias", {"5": 100}, {}),
                ("presence_penalty", 0.5, 0),
                ("frequency_penalty", 0.5, 0.0),
                ("repetition_penalty", 1.2, 1),
                ("top_k", 5, -1),
                ("min_p", 0.1, 0),
                ("parallel_tool_calls", False, True),
            ]
        ],
        ("chat/completions", "top_logprobs", 3, 0),
        ("chat/completions", "response_format", {"type": "json_object"}, {"type": "text"}),
        ("responses", "top_logprobs", 3, 0),
        ("responses", "truncation", "auto", "disabled"),
        ("responses", "text", {"format": {"type": "json_object"}}, {"format": {"type": "text"}}),
        ("messages", "output_config", {"format": {"type": "json_schema"}}, {}),
        ("messages", "n", 2, 1),
    ],
)
async def test_an_option_that_does_not_exist_is_refused_by_name_and_its_default_is_taken(
    path: str, option: str, value: Any, neutral: Any
) -> None:
    async with serving(lambda prompt: "5") as at:
        for record, default in (("train", neutral), ("train", None), ("eval", neutral), ("off", neutral)):
            status, answer = await ask(at, path, record, **{option: value})
            assert status == 400, answer
            assert answer["error"]["message"].startswith(option)
            if path != "messages":  # whose errors have no field for it
                assert answer["error"]["param"].startswith(option)
            status, answer = await ask(at, path, record, **{option: default})
            assert status == 200, answer


async def test_calls_of_tools_one_at_a_time_cannot_be_promised_to_anthropics_clients_either() -> None:
    async with serving(lambda prompt: "5") as at:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        status, answer = await ask(at, "messages", tools=TOOLS["messages"], tool_choice=choice)
        assert (status, answer["error"]["message"][:37]) == (400, "tool_choice.disable_parallel_tool_use")
        choice["disable_parallel_tool_use"] = False
        assert (await ask(at, "messages", tools=TOOLS["messages"], tool_choice=choice))[0] == 200


@pytest.mark.parametrize("record", ["train", "eval", "off"])
async def test_logprobs_are_those_of_the_engine_streamed_and_not(record: str) -> None:
    async with serving(lambda prompt: "56") as at:
        wanted = [("5", logprob(0)), ("6", logprob(1)), ("<|im_end|>", logprob(2))]

        def read(entries: list[dict[str, Any]]) -> list[tuple[str, float]]:
            return [(entry["token"], entry["logprob"]) for entry in entries]

        for options in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
            _, answer = await ask(at, "chat/completions", record, **options)
            assert read(answer["choices"][0]["logprobs"]["content"]) == wanted
            _, chunks = await ask(at, "chat/completions", record, stream=True, **options)
            parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            assert read([entry for part in parts if part for entry in part["content"]]) == wanted
        _, answer = await ask(at, "completions", record, logprobs=0)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [value for _, value in wanted]
        _, chunks = await ask(at, "completions", record, logprobs=0, stream=True)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [value for part in parts if part for value in part["token_logprobs"]] == [value for _, value in wanted]
        include = ["message.output_text.logprobs"]
        _, answer = await ask(at, "responses", record, include=include)
        assert read(answer["output"][0]["content"][0]["logprobs"]) == wanted
        _, events = await ask(at, "responses", record, include=include, stream=True)
        assert read(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == wanted
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        sent = [entry for delta in deltas for entry in delta["logprobs"]]
        assert read(sent) == wanted[: len(sent)]
        assert sent
        for path in BODIES:
            _, answer = await ask(at, path, record)
            assert '"logprob"' not in json.dumps(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "ending"),
    [
        ("one STOP two", {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}),
        ("one END STOP", {"stop_reason": "stop_sequence", "stop_sequence": "END"}),
        ("one two", {"stop_reason": "end_turn", "stop_sequence": None}),
    ],
)
async def test_a_stop_sequence_is_named(stream: bool, said: str, ending: dict[str, Any]) -> None:
    async with serving(lambda prompt: said) as at:
        _, answer = await ask(at, "messages", stop_sequences=["STOP", "END"], stream=stream)
        if stream:
            texts = [event["delta"]["text"] for event in answer if event["type"] == "content_block_delta"]
            (last,) = [event["delta"] for event in answer if event["type"] == "message_delta"]
            assert ("".join(texts), last) == (said.split("STOP", maxsplit=1)[0].split("END", maxsplit=1)[0], ending)
        else:
            assert answer["content"][0]["text"] == said.split("STOP", maxsplit=1)[0].split("END", maxsplit=1)[0]
            assert {name: answer[name] for name in ending} == ending
        status, answer = await ask(at, "messages", stop_sequences="STOP")
        assert (status, answer["error"]["message"]) == (400, "stop_sequences is a str, wanted a list")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOOLS)
async def test_half_a_surrogate_pair_in_the_arguments_of_a_call_is_replaced(path: str, stream: bool) -> None:
    async with serving(lambda prompt: HALF) as at:
        status, answer = await ask(at, path, tools=TOOLS[path], stream=stream)
        assert status == 200, answer
        text = json.dumps(answer, ensure_ascii=False)
        assert text.encode().decode() == text
        assert '{"a": "\ufffd"}' in text.replace("\\\\", "\\").replace("\\ufffd", "\ufffd").replace('\\"', '"')


@pytest.mark.parametrize("path", BODIES)
async def test_a_character_whose_bytes_are_several_tokens_is_streamed_whole(path: str) -> None:
    said = "a\U0001f600\u00e9"
    async with serving(lambda prompt: said) as at:
        _, events = await ask(at, path, stream=True)
        texts: dict[str, Callable[[Any], str]] = {
            "chat/completions": lambda event: event["choices"][0]["delta"].get("content", ""),
            "completions": lambda event: event["choices"][0]["text"],
            "responses": lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
            "messages": lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
        }
        pieces = [texts[path](event) for event in events]
        assert "".join(pieces) == said
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_mender_joins_halves_of_each_choice_and_replaces_what_stays_alone() -> None:
    mender = SurrogateRepairer()

    def mended(index: int, piece: str, finish: str | None = None) -> str:
        chunk: dict[str, Any] = {"choices": [{"index": index, "delta": {"content": piece}, "finish_reason": finish}]}
        mender.mend(chunk)
        return str(chunk["choices"][0]["delta"]["content"])

    assert [mended(0, "a\ud83d"), mended(1, "b\ud83d"), mended(0, "\ude00c"), mended(1, "d")] == [
        "a",
        "b",
        "\U0001f600c",
        "\ufffdd",
    ]
    assert [mended(0, "\ud83d"), mended(0, ""), mended(0, "\ude00")] == ["", "", "\U0001f600"]
    assert [mended(0, "\ude00"), mended(0, "\ud83d", "stop")] == ["\ufffd", "\ufffd"]


async def test_halves_of_a_pair_from_another_server_make_one_character() -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "a\ud83d"}, "token_ids": [1], "token_logprobs": [-1.0]}]},
        {
            "prompt_token_ids": [7],
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": "\ude00"},
                    "token_ids": [2],
                    "token_logprobs": [-1.0],
                    "finish_reason": "stop",
                }
            ],
        },
    ]

    async def answer(request: web.Request) -> web.Response:
        if (await request.json()).get("stream"):
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            return web.Response(text="".join([*events, "data: [DONE]\n\n"]), content_type="text/event-stream")
        choice = {"index": 0, "token_ids": [1], "token_logprobs": [-1.0], "finish_reason": "stop"}
        message = {"role": "assistant", "content": "a\ud83d\ude00\ud83d"}
        return web.json_response({"prompt_token_ids": [7], "choices": [{**choice, "message": message}]})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with serving(lambda prompt: "") as at:
            at.engines.models = [InferenceModel("other", f"http://127.0.0.1:{site.port}", "other")]
            status, events = await ask(at, "chat/completions", stream=True)
            assert (status, [event["choices"][0]["delta"]["content"] for event in events]) == (200, ["a", "\U0001f600"])
            status, whole = await ask(at, "chat/completions")
            assert (status, whole["choices"][0]["message"]["content"]) == (200, "a\U0001f600\ufffd")
            texts = [call.choices[0].text for session in at.store.ledger for call in session.calls.values()]
            assert sorted(texts) == ["a\U0001f600", "a\U0001f600\ufffd"]
    finally:
        await runner.cleanup()


async def test_a_long_request_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()

    def held(path: str, body: Any) -> str:
        if len(body["messages"]) > 1:
            begun.set()
            assert release.wait(30)
        return digest_of(path, body)

    monkeypatch.setattr(app, "digest_of", held)
    async with serving(lambda prompt: "5") as at, asyncio.TaskGroup() as group:
        many = group.create_task(ask(at, "messages", messages=BODIES["messages"]["messages"] * 4000))
        assert await asyncio.to_thread(begun.wait, 30)
        try:
            assert (await ask(at, "messages"))[0] == 200
        finally:
            release.set()
        assert (await many)[0] in {200, 400}

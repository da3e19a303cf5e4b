"""The parts of ``debug workflow``: which task, the proxy, calls and tokens as they are shown."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

from trinity_mq.cli import debug
from trinity_mq.cli import main as cli
from trinity_mq.config import Config, ModelConfig, TinyModelConfig, load_config
from trinity_mq.errors import CommandError
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.observability.experiences.token_texts import TokenTexts, tokenizer_folder
from trinity_mq.operations.debug.proxy import ProxiedCall, RecordingProxy
from trinity_mq.operations.debug.report import call_json, choices, show_call
from trinity_mq.operations.debug.run import find_task
from trinity_mq.terminal import escape_unsafe


def test_the_words_lead_to_functions() -> None:
    words = ["workflow", "c.yaml", "a.b=c", "--task", "3", "--engine", "http://h", "--json"]
    arguments = cli.argument_parser().parse_args(["debug", *words])
    assert arguments.function is debug.workflow
    assert (arguments.overrides, arguments.task, arguments.engine) == (["a.b=c"], "3", "http://h")


@pytest.mark.parametrize(
    "module",
    [
        "cli.debug",
        "cli.inspect",
        "operations.debug.engine",
        "observability.experiences.token_texts",
        "observability.experiences.show_experience",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(module: str) -> None:
    program = f"import sys, trinity_mq.{module}; print(*({{'torch', 'transformers', 'openai'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


# -- which task

ROOT = Path(__file__).parents[3]
TASKSET = {"storage_type": "file", "workflow": "math_workflow", "reward_fn": "exact_match", "selector": "shuffle"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("train", "held"):
        rows = [json.dumps({"question": f"{name} {n}", "answer": str(n)}) for n in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    held = {**TASKSET, "name": "held", "path": str(tmp_path / "held.jsonl"), "rollout_args": {"temperature": 0}}
    buffer = {"taskset": {**TASKSET, "path": str(tmp_path / "train.jsonl")}, "eval_tasksets": [held]}
    return load_config({"model": {"tiny": {}}, "buffer": buffer})


def test_a_record_by_its_number_as_it_lies_there(config: Config) -> None:
    number, body = find_task(config, "3", None)
    assert (number, body.raw_task["question"], body.workflow) == (3, "train 3", "math_workflow")
    assert (body.repeat_times, body.is_eval) == (1, False)
    _, body = find_task(config, "4", "held")
    assert (body.raw_task["question"], body.is_eval, body.rollout_args) == ("held 4", True, {"temperature": 0})


@pytest.mark.parametrize("number", ["5", "-1", "+99"])
def test_a_record_that_is_not_there(config: Config, number: str) -> None:
    with pytest.raises(CommandError, match=r"has records 0 to 4"):
        find_task(config, number, None)


def test_a_taskset_that_is_not_there(config: Config) -> None:
    with pytest.raises(CommandError, match=r"'other' is not an evaluation taskset; this configuration has 'held'"):
        find_task(config, "0", "other")


def test_a_task_of_ones_own_is_completed_from_its_taskset(config: Config) -> None:
    _, body = find_task(config, '{"raw_task": {"question": "mine"}, "repeat_times": 7}', None)
    assert (body.raw_task, body.workflow, body.reward_fn, body.repeat_times) == (
        {"question": "mine"},
        "math_workflow",
        "exact_match",
        1,
    )
    _, body = find_task(config, '{"workflow": "simple_workflow"}', "held")
    assert (body.workflow, body.rollout_args) == ("simple_workflow", {"temperature": 0})
    with pytest.raises(CommandError, match="not JSON"):
        find_task(config, "three", None)


def test_a_queue_has_no_records() -> None:
    config = load_config({"model": {"tiny": {}}})
    with pytest.raises(CommandError, match="has no records"):
        find_task(config, "0", None)
    assert find_task(config, '{"raw_task": {"question": "1"}}', None)[1].workflow == "async_simple_workflow"


# -- the proxy


class Upstream:
    """Answers as told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes, str]] = []
        self.hold = asyncio.Event()
        self.cut = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.method, request.path_qs, body, request.headers.get("X-TMQ-Version", "")))
        if request.path == "/busy":
            return web.json_response({"error": {"message": "no"}}, status=503, headers={"Retry-After": "7"})
        if request.path == "/hold":
            await self.hold.wait()
        if request.path != "/stream":
            return web.json_response({"seen": json.loads(body) if body else None})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for n in range(3):
            await out.write(f'data: {{"n": {n}}}\n\n'.encode())
        if self.cut:
            assert request.transport is not None
            request.transport.abort()
            return out
        await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out


@pytest.fixture
async def upstream() -> AsyncIterator[tuple[Upstream, str]]:
    one, application = Upstream(), web.Application()
    application.router.add_route("*", "/{path:.*}", one.handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield one, f"http://127.0.0.1:{site.port}"
    await runner.cleanup()


async def test_the_proxy_changes_nothing_and_tells_everything(upstream: tuple[Upstream, str]) -> None:
    one, url = upstream
    calls: list[ProxiedCall] = []
    async with RecordingProxy(url, calls.append).running() as near, aiohttp.ClientSession() as session:
        sent = {"question": "\u00e9"}
        async with session.post(f"{near}/a/b?c=d", json=sent, headers={"X-TMQ-Version": "1.2"}) as response:
            assert (response.status, await response.json()) == (200, {"seen": sent})
        async with session.get(f"{near}/busy") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "7")
        async with session.get(f"{near}/stream") as response:
            assert response.content_type == "text/event-stream"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert one.asked[0] == ("POST", "/a/b?c=d", json.dumps(sent).encode(), "1.2")
    first, second, third = calls
    assert (first.number, first.path, first.status, first.request, first.answer) == (
        1,
        "/a/b",
        200,
        sent,
        {"seen": sent},
    )
    assert (second.status, second.answer) == (503, {"error": {"message": "no"}})
    assert (third.is_stream, third.answer, third.error) == (True, [{"n": 0}, {"n": 1}, {"n": 2}], "")


async def test_an_engine_that_is_gone_is_an_answer_that_is_not_asked_for_again() -> None:
    calls: list[ProxiedCall] = []
    async with RecordingProxy("http://127.0.0.1:9", calls.append).running() as near, aiohttp.ClientSession() as session:
        async with session.post(f"{near}/v1/x", json={}) as response:
            assert response.status == 502
            assert "the engine gave no answer" in (await response.json())["error"]["message"]
    assert calls[0].status == 0
    assert "ClientConnectorError" in calls[0].error


async def test_a_stream_that_breaks_off_breaks_off_for_the_caller_too(upstream: tuple[Upstream, str]) -> None:
    one, url = upstream
    one.cut = True
    calls: list[ProxiedCall] = []
    async with RecordingProxy(url, calls.append).running() as near, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(f"{near}/stream") as response:
                await response.read()
        async with session.get(f"{near}/other") as response:
            assert response.status == 200
    assert "broke off" in calls[0].error


async def test_a_caller_that_goes_away_is_told_of(upstream: tuple[Upstream, str]) -> None:
    calls: list[ProxiedCall] = []
    told = asyncio.Event()

    def on_call(call: ProxiedCall) -> None:
        calls.append(call)
        told.set()

    async with RecordingProxy(upstream[1], on_call).running() as near, aiohttp.ClientSession() as session:
        with pytest.raises(TimeoutError):
            await session.get(f"{near}/hold", timeout=aiohttp.ClientTimeout(total=0.2))
        async with asyncio.timeout(10):
            await told.wait()
    assert calls[0].error == "the caller did not wait for the answer"


# -- calls as they are shown

CHAT = {
    "choices": [
        {"index": 1, "message": {"content": "b"}, "finish_reason": "stop", "token_ids": [4], "token_logprobs": [-0.5]},
        {"index": 0, "message": {"content": None, "tool_calls": [{"id": "c"}]}, "finish_reason": "tool_calls"},
    ]
}
VLLM = {
    "choices": [
        {
            "index": 0,
            "message": {"content": "7"},
            "finish_reason": "stop",
            "token_ids": [9],
            "logprobs": {"content": [{"token": "7", "logprob": -1.5}]},
        }
    ]
}
TEXT = {"choices": [{"text": "7", "finish_reason": "length", "logprobs": {"tokens": ["7"], "token_logprobs": [-2.0]}}]}
STREAM = [
    {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [2], "token_logprobs": [-0.1]}]},
    {"choices": [{"index": 0, "delta": {"content": "b"}, "token_ids": [3], "token_logprobs": [-0.2]}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {}},
]


def test_choices_of_every_kind_of_answer() -> None:
    tools, second = choices(CHAT)
    assert (tools.text, tools.tool_calls) == ("", [{"id": "c"}])
    assert (second.text, second.token_ids, second.logprobs) == ("b", [4], [-0.5])
    [vllm] = choices(VLLM)
    assert (vllm.token_ids, vllm.logprobs, vllm.pieces) == ([9], [-1.5], ["7"])
    [text] = choices(TEXT)
    assert (text.text, text.logprobs, text.pieces, text.finish_reason) == ("7", [-2.0], ["7"], "length")
    [stream] = choices(STREAM)
    assert (stream.text, stream.token_ids, stream.logprobs, stream.finish_reason) == (
        "ab",
        [2, 3],
        [-0.1, -0.2],
        "stop",
    )


@pytest.mark.parametrize(
    "answer",
    [None, 3, "x", [], [None], {}, {"choices": None}, {"choices": [None, {}]}, {"choices": [{"message": None}]},
     {"choices": [{"message": "odd", "token_ids": 3, "logprobs": "odd"}]}, {"error": "plain"}, {"error": None}],
)  # fmt: skip
def test_strange_answers_are_shown_and_stop_nothing(answer: Any) -> None:
    call = ProxiedCall(1, "POST", "/v1/x", {"messages": "odd", "prompt": ["1"], "tools": 3}, status=200, answer=answer)
    out = io.StringIO()
    show_call(Console(file=out), call, TokenTexts())
    assert "call 1" in out.getvalue()
    assert json.loads(json.dumps(call_json(call, TokenTexts())))["answer"] == answer


def test_what_a_model_writes_cannot_move_the_cursor_or_mean_markup() -> None:
    out = io.StringIO()
    hostile = "\x1b[2J\x07 [bold]x[/bold] [/] \u202e"
    answer = {"choices": [{"message": {"content": hostile}, "finish_reason": "stop"}]}
    request = {"messages": [{"role": hostile, "content": hostile}]}
    show_call(Console(file=out), ProxiedCall(1, "POST", "/v1/[/x]", request, status=200, answer=answer), TokenTexts())
    assert "[bold]x[/bold] [/]" in out.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(out.getvalue())
    assert escape_unsafe("a\tb\n\x1b\u00e9") == "a\tb\n\\u001b\u00e9"


# -- tokens


def test_tokens_have_texts_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    model = ModelConfig(tiny=TinyModelConfig(characters="01\u00e9"))
    folder = tmp_path / "model"
    assert tokenizer_folder(model, tmp_path) is None
    ensure_model_folder(model, folder, 0)
    assert tokenizer_folder(model, tmp_path) == folder
    texts = TokenTexts(folder)
    assert texts.problem is None
    assert texts.of([2, 4, 1, 99, -1]) == ["0", "\u00e9", "<eos>", None, None]
    assert TokenTexts(tmp_path).of([2]) == [None]
    assert "cannot be loaded" in str(TokenTexts(tmp_path).problem)
    assert tokenizer_folder(ModelConfig(model_path="nobody/has-this"), tmp_path) is None
    assert tokenizer_folder(ModelConfig(model_path=str(folder)), tmp_path) == folder

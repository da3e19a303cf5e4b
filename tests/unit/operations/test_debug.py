"""``debug workflow`` on a real tiny engine in this process: what it shows, and what it says when things go wrong."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from rich.console import Console

from tests.unit.models.conftest import _plain_logprobs, engine_server
from trinity_mq.cli.main import main
from trinity_mq.config import Config, ModelConfig, TinyModelConfig, load_config
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.errors import CommandError
from trinity_mq.experience import Experience
from trinity_mq.messages import TaskBody
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.observability.experiences.token_texts import TokenTexts, tokenizer_folder
from trinity_mq.operations.debug.proxy import ProxiedCall, RecordingProxy
from trinity_mq.operations.debug.report import JsonReport, TextReport, call_json, choices, show_call
from trinity_mq.operations.debug.run import debug_task as _debug
from trinity_mq.operations.debug.run import find_task
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.terminal import escape_unsafe
from trinity_mq.workflows import Workflow

HERE = __name__

pytestmark = pytest.mark.timeout(180)  # the first one loads model and client libraries


class Fine(Workflow):
    """Asks twice, once for two answers."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        client = self.model.get_openai_async_client()
        await client.chat.completions.create(
            model=self.model.model_name, messages=[{"role": "user", "content": "1="}], n=2
        )
        [one] = await self.model.chat_async([{"role": "user", "content": "3,7,2="}])
        one.reward = 0.5
        return [one]


class SeveralTurns(Workflow):
    """Asks three times one after the other."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        turns = [await self.model.chat_async([{"role": "user", "content": f"{n}="}]) for n in range(3)]
        for [turn] in turns:
            turn.reward = 0.0
        return [turn for [turn] in turns]


class Fails(Workflow):
    """Asks, and stumbles over its own code, called by somebody else's."""

    def run(self) -> list[Experience]:
        self.model.chat([{"role": "user", "content": "3="}])
        return sorted([2, 1], key=self.stumble)  # type: ignore[arg-type,return-value]

    def stumble(self, number: int) -> int:
        return int({"a": number}["b"])  # the place


class Unbuildable(Workflow):
    def __init__(self, **given: Any) -> None:
        raise ArithmeticError("cannot be made")


class Slow(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await asyncio.Event().wait()
        return []


class Silent(Workflow):
    def run(self) -> list[Experience]:
        return []


class TooLong(Workflow):
    def run(self) -> list[Experience]:
        return self.model.chat([{"role": "user", "content": "1" * 40}], max_tokens=99, stop=3)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.endswith(text))


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> TextGenerator:
    config = settings(Path())
    folder = ensure_model_folder(config.model, tmp_path_factory.mktemp("tiny") / "model", 0)
    made = TextGenerator.build(config.model, folder, num_threads=1)
    made.folder = folder  # type: ignore[attr-defined]
    return made


@pytest.fixture
async def engine(generator: TextGenerator) -> AsyncIterator[EngineServer]:
    async with engine_server(generator, model_path=str(generator.folder)) as server:  # type: ignore[attr-defined]
        yield server


def settings(folder: Path, *overrides: str) -> Config:
    model = {"tiny": {}, "max_model_len": 64, "max_prompt_tokens": 32, "max_response_tokens": 4}
    return load_config({"name": "debugged", "run_dir": str(folder), "model": model}, overrides)


def words(url: str | None, weights: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(engine=url, weights=weights)


async def debugged(workflow: str, url: str, folder: Path, *overrides: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the events with their fields."""
    out = io.StringIO()
    body = TaskBody(workflow=f"{HERE}.{workflow}", raw_task={"question": "?"})
    code = await _debug(settings(folder, *overrides), body, 5, words(url), JsonReport(out))
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


async def test_every_message_token_logprob_and_reward_is_shown(
    engine: EngineServer, generator: TextGenerator, tmp_path: Path
) -> None:
    code, events = await debugged("Fine", engine.url, tmp_path)
    assert code == 0
    assert [event["event"] for event in events] == ["call", "call", "experience", "end"]
    first, second, experience, end = events
    assert first["request"]["messages"] == [{"role": "user", "content": "1="}]
    assert len(first["choices"]) == 2
    [choice] = second["choices"]
    prompt = generator.codec.encode("3,7,2=")
    assert experience["tokens"] == [*prompt, *choice["tokens"]]
    assert experience["token_texts"][: len(prompt)] == list("3,7,2=")
    assert "".join(choice["token_texts"]).startswith(choice["text"])
    assert experience["logprobs"] == pytest.approx(choice["logprobs"], abs=1e-6)
    assert choice["logprobs"] == pytest.approx(
        _plain_logprobs(generator, prompt, choice["tokens"], 1.0).tolist(), abs=1e-4
    )
    assert experience["action_mask"] == [True] * len(choice["tokens"])
    assert (experience["reward"], experience["eid"]["task"]) == (0.5, 5)
    assert experience["versions"] == [[0, 1, 7]]
    assert (end["ok"], end["calls"], end["error"], end["metrics"]["reward"]) == (True, 2, None, 0.5)


async def test_later_turns_are_shown_too_although_engines_take_requests_in_groups(
    engine: EngineServer, tmp_path: Path
) -> None:
    _, events = await debugged("SeveralTurns", engine.url, tmp_path)
    calls = [event for event in events if event["event"] == "call"]
    assert [call["request"]["messages"][0]["content"] for call in calls] == ["0=", "1=", "2="]
    assert all(call["choices"][0]["tokens"] for call in calls)


async def test_an_error_is_shown_with_its_place_in_the_workflow(engine: EngineServer, tmp_path: Path) -> None:
    code, events = await debugged("Fails", engine.url, tmp_path)
    end, error = events[-1], events[-1]["error"]
    assert (code, end["ok"], end["calls"]) == (1, False, 1), "tried once"
    assert (error["type"], error["message"], error["function"]) == ("KeyError", "'b'", "stumble")
    assert (error["file"], error["line"]) == (__file__, line_of("# the place"))
    assert "in stumble" in error["traceback"]
    assert "in run" in error["traceback"]
    assert "debug_watch" not in error["traceback"]


@pytest.mark.parametrize(
    ("workflow", "message", "kind"),
    [
        ("Unbuildable", "ArithmeticError: cannot be made", "ArithmeticError"),
        ("Silent", "returned no experience", None),
        ("TooLong", "stop", "EngineRefused"),
    ],
)
async def test_other_ways_to_fail(
    engine: EngineServer, tmp_path: Path, workflow: str, message: str, kind: str | None
) -> None:
    code, events = await debugged(workflow, engine.url, tmp_path)
    end = events[-1]
    assert code == 1
    assert message in end["message"]
    assert (end["error"] or {}).get("type") == kind


async def test_where_it_was_when_its_time_was_up(engine: EngineServer, tmp_path: Path) -> None:
    code, events = await debugged("Slow", engine.url, tmp_path, "explorer.max_timeout=0.3")
    error = events[-1]["error"]
    assert code == 1
    assert error["was_interrupted"]
    assert (error["file"], error["function"]) == (__file__, "run_async")
    assert error["line"] == line_of("await asyncio.Event().wait()")


async def test_a_person_reads_the_same(engine: EngineServer, tmp_path: Path) -> None:
    out = io.StringIO()
    body = TaskBody(workflow=f"{HERE}.Fine", raw_task={"question": "3,7,2="})
    report = TextReport(out)
    report.task(5, body)
    assert await _debug(settings(tmp_path), body, 5, words(f"{engine.url}/v1/"), report) == 0
    text = out.getvalue()
    for part in (
        "task 5",
        "call 1: POST /v1/chat/completions 200",
        "answer 1",
        "user  1=",
        "reward  0.5",
        "5'3'",
        "mask",
    ):
        assert part in text, part
    out.truncate(0)
    body = body.model_copy(update={"workflow": f"{HERE}.Fails"})
    assert await _debug(settings(tmp_path), body, 5, words(engine.url), TextReport(out)) == 1
    assert f"failed at  {__file__}:{line_of('# the place')} in stumble" in out.getvalue()


# -- engines that are given and are none


async def test_an_engine_that_waits_for_weights_is_no_use(generator: TextGenerator, tmp_path: Path) -> None:
    async with engine_server(generator, version=None) as server:
        with pytest.raises(CommandError, match="holds no weights"):
            await debugged("Fine", server.url, tmp_path)


async def test_nobody_or_somebody_else_at_the_url(upstream: tuple[Upstream, str], tmp_path: Path) -> None:
    one, url = upstream
    one.answers = {"/v1/other": {}}
    with pytest.raises(CommandError, match=r"/v1/models answers with HTTP status 404"):
        await debugged("Fine", url, tmp_path)
    one.answers = {"/v1/models": {"data": []}}
    with pytest.raises(CommandError, match="names no model"):
        await debugged("Fine", url, tmp_path)
    with pytest.raises(CommandError, match="give --engine the URL"):
        await debugged("Fine", "http://127.0.0.1:9", tmp_path)


async def test_an_engine_without_our_routes_is_asked_all_the_same(
    upstream: tuple[Upstream, str], tmp_path: Path
) -> None:
    one, url = upstream
    one.answers = {"/v1/models": {"data": [{"id": "other"}]}}
    code, events = await debugged("Fails", url, tmp_path)
    assert code == 1
    assert (events[0]["status"], events[0]["choices"]) == (404, [])
    assert "404" in events[-1]["message"], "at once: nobody waits for another engine"


@pytest.mark.parametrize(
    ("workflow", "weights", "words_"),
    [("Fine", "w", "--weights is for an engine that this command starts"), ("", None, "names no workflow")],
)
async def test_wrong_words(tmp_path: Path, workflow: str, weights: str | None, words_: str) -> None:
    body = TaskBody(workflow=f"{HERE}.{workflow}" if workflow else "")
    with pytest.raises(CommandError, match=words_):
        await _debug(settings(tmp_path), body, 0, words("http://127.0.0.1:9", weights), JsonReport(io.StringIO()))


# -- which task

TASKSET = {"storage_type": "file", "workflow": "math_workflow", "reward_fn": "exact_match", "selector": "shuffle"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("train", "held"):
        rows = [json.dumps({"question": f"{name} {n}", "answer": str(n)}) for n in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    held = {**TASKSET, "name": "held", "path": str(tmp_path / "held.jsonl"), "rollout_args": {"temperature": 0}}
    buffer = {"taskset": {**TASKSET, "path": str(tmp_path / "train.jsonl")}, "eval_tasksets": [held]}
    return load_config({"model": {"tiny": {}}, "buffer": buffer})


def test_a_task_is_a_record_or_ones_own_completed_from_its_taskset(config: Config) -> None:
    number, body = find_task(config, "3", None)
    assert (number, body.raw_task["question"], body.workflow) == (3, "train 3", "math_workflow")
    assert (body.repeat_times, body.is_eval) == (1, False)
    _, body = find_task(config, "4", "held")
    assert (body.raw_task["question"], body.is_eval, body.rollout_args) == ("held 4", True, {"temperature": 0})
    _, body = find_task(config, '{"raw_task": {"question": "mine"}, "repeat_times": 7}', None)
    assert (body.raw_task, body.workflow) == ({"question": "mine"}, "math_workflow")
    assert (body.reward_fn, body.repeat_times) == ("exact_match", 1)
    _, body = find_task(config, '{"workflow": "simple_workflow"}', "held")
    assert (body.workflow, body.rollout_args) == ("simple_workflow", {"temperature": 0})


@pytest.mark.parametrize(
    ("task", "taskset", "words"),
    [
        *((number, None, r"has records 0 to 4") for number in ("5", "-1", "+99")),
        ("0", "other", r"'other' is in neither buffer.eval_tasksets nor .*; this configuration has 'held'"),
        ("three", None, "not JSON"),
    ],
)
def test_a_task_that_is_not_there(config: Config, task: str, taskset: str | None, words: str) -> None:
    with pytest.raises(CommandError, match=words):
        find_task(config, task, taskset)


def test_a_training_taskset_by_name_gives_tasks_of_a_training(config: Config) -> None:
    second = config.buffer.taskset.model_copy(update={"name": "second"})
    buffer = config.buffer.model_copy(update={"tasksets": (second,)})
    _, body = find_task(config.model_copy(update={"buffer": buffer}), "2", "second")
    assert (body.raw_task["question"], body.is_eval) == ("train 2", False)


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
        self.answers: dict[str, Any] | None = None
        """Answers by path, where it has no others."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.method, request.path_qs, body, request.headers.get("X-TMQ-Version", "")))
        if self.answers is not None:
            known = request.path in self.answers
            return web.json_response(self.answers.get(request.path), status=200 if known else 404)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_and_what_is_open_is_closed(number: signal.Signals) -> None:
    closed = False

    async def work() -> None:
        nonlocal closed
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed = True

    before = signal.getsignal(signal.SIGTERM)
    # a shell starts what it puts into the background with SIGINT ignored
    of_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_until_complete(work())
    finally:
        signal.signal(signal.SIGINT, of_interrupt)
    assert closed
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"tiny": {}}, "algorithm": {"repeat_times": 4}}))
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_its_checks(name: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "algorithm", str(run_file), f"algorithm.algorithm_type={name}"]) == 0
    out = capsys.readouterr().out
    assert "FAILED" not in out
    assert "ok      masked tokens do not affect the loss" in out


def test_a_kl_in_the_rewards_is_in_what_is_shown(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for more in ([], ["algorithm.reward_kl={coef: 0.5}"]):
        assert main(["debug", "algorithm", str(run_file), "algorithm.algorithm_type=reinforceplusplus", *more]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1]


LOSS = """
import torch

def falls_off(log_ratio, logprob, advantage, width=0.3):
    return -advantage * log_ratio.exp() * torch.exp(-(log_ratio.detach() / width).square())

def wrong_way(log_ratio, logprob, advantage):
    return advantage * log_ratio.exp()

def detached(log_ratio, logprob, advantage):
    return -advantage * log_ratio.detach().exp()

def looks_around(log_ratio, logprob, advantage):
    return -(advantage - advantage.mean()) * log_ratio.exp()
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("falls_off", 0, "ok      good tokens become likelier"),
        ("wrong_way", 1, "FAILED  good tokens become likelier: 40 of 40 tokens are pushed against their advantage"),
        ("looks_around", 1, "FAILED  micro-batches add up: the gradient of two halves differs"),
        ("detached", 2, "returns losses without a gradient: nothing would be learned"),
    ],
)
def test_a_loss_of_the_users_own(
    name: str, code: int, words: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_file.parent / f"losses_{name}.py").write_text(LOSS)
    surrogate = f"algorithm.surrogate={{kind: losses_{name}.{name}}}"
    settings = [f"plugin_dirs=[{run_file.parent}]", surrogate, "algorithm.repeat_times=16"]
    assert main(["debug", "algorithm", str(run_file), *settings]) == code
    assert words in "".join(capsys.readouterr())


def test_what_is_shown(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "algorithm", str(run_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "grpo on 2 tasks x 4 runs of 6 tokens"
    assert lines[2].split() == ["task/run", "token", "reward", "advantage", "ratio", "gradient"]
    assert sum("masked" in line for line in lines[3:27]) == 4
    assert any(line.startswith("loss ") for line in lines)

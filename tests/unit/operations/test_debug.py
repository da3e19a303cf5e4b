"""``debug workflow`` on a real tiny engine in this process: what it shows, and what it says when things go wrong."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.unit.models.conftest import _plain_logprobs, _serving
from trinity_mq.config import Config, load_config
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.errors import CommandError
from trinity_mq.experience import Experience
from trinity_mq.messages import TaskBody
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.operations.debug.report import JsonReport, TextReport
from trinity_mq.operations.debug.run import debug_task as _debug
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
    async with _serving(generator, model_path=str(generator.folder)) as server:  # type: ignore[attr-defined]
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


async def test_a_task_that_names_no_workflow(engine: EngineServer, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="names no workflow"):
        await _debug(settings(tmp_path), TaskBody(), 0, words(engine.url), JsonReport(io.StringIO()))


# -- engines that are given and are none


@pytest.fixture
async def elsewhere() -> AsyncIterator[Callable[..., Any]]:
    """A server that answers one path with one JSON value."""
    runners: list[web.AppRunner] = []

    async def serve(path: str, answer: Any) -> str:
        application = web.Application()

        async def handle(request: web.Request) -> web.Response:
            return web.json_response(answer)

        application.router.add_get(path, handle)
        runners.append(web.AppRunner(application, access_log=None))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site.port}"

    yield serve
    for runner in runners:
        await runner.cleanup()


async def test_an_engine_that_waits_for_weights_is_no_use(generator: TextGenerator, tmp_path: Path) -> None:
    async with _serving(generator, version=None) as server:
        with pytest.raises(CommandError, match="holds no weights"):
            await debugged("Fine", server.url, tmp_path)


async def test_nobody_or_somebody_else_at_the_url(elsewhere: Callable[..., Any], tmp_path: Path) -> None:
    url = await elsewhere("/v1/other", {})
    with pytest.raises(CommandError, match=r"/v1/models answers with HTTP status 404"):
        await debugged("Fine", url, tmp_path)
    url = await elsewhere("/v1/models", {"data": []})
    with pytest.raises(CommandError, match="names no model"):
        await debugged("Fine", url, tmp_path)
    with pytest.raises(CommandError, match="give --engine the URL"):
        await debugged("Fine", "http://127.0.0.1:9", tmp_path)


async def test_an_engine_without_our_routes_is_asked_all_the_same(
    elsewhere: Callable[..., Any], tmp_path: Path
) -> None:
    url = await elsewhere("/v1/models", {"data": [{"id": "other"}]})
    code, events = await debugged("Fails", url, tmp_path)
    assert code == 1
    assert (events[0]["status"], events[0]["choices"]) == (404, [])
    assert "404" in events[-1]["message"], "at once: nobody waits for another engine"


async def test_weights_are_for_an_engine_of_our_own(tmp_path: Path) -> None:
    body = TaskBody(workflow=f"{HERE}.Fine")
    with pytest.raises(CommandError, match="--weights is for an engine that this command starts"):
        await _debug(settings(tmp_path), body, 0, words("http://127.0.0.1:9", "w"), JsonReport(io.StringIO()))

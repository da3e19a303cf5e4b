"""The way to somebody else's server: a real one of few features on the other side, and what it was sent."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from trinity_agents.operator.chain_run import auxiliary_clients
from trinity_mq.config import AuxiliaryModelConfig, Config, ConfigError, load_config
from trinity_mq.config.model import LoraConfig
from trinity_mq.engines.external import ExternalServer
from trinity_mq.engines.host.host import EngineHost, auxiliary_hosts, rollout_hosts
from trinity_mq.engines.host.ready_file import engine_digest
from trinity_mq.models import EngineLost, EngineNotReady, EngineRefused, InferenceModel, ModelError, ModelWrapper
from trinity_mq.operations.validate import check_devices
from trinity_mq.runtime.plugins import UnknownNameError

ASK = [{"role": "user", "content": "7*6?"}]
TOKEN = "secret"


class Theirs:
    """An OpenAI-compatible server that is as strict as they come: fields it does not know are an error."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models = ["gpt-x"]
        self.answer: web.Response | None = None
        self.knows = {"model", "messages", "temperature", "top_p", "max_tokens", "n", "seed", "stream", "logprobs"}
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        application = web.Application()
        application.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
            ]
        )
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{site.port}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") == "Bearer wrong":
            return web.Response(status=401)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _taken(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return body

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._taken(request)
        if self.answer is not None:
            return self.answer
        if unknown := sorted(body.keys() - self.knows):
            return web.json_response({"error": {"message": f"unknown field {unknown}"}}, status=400)
        if body.get("stream"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            for piece in ("4", "2"):
                chunk = '{"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "gpt-x", "choices": '
                await stream.write(f'data: {chunk}[{{"index": 0, "delta": {{"content": "{piece}"}}}}]}}\n\n'.encode())
            await stream.write(b"data: [DONE]\n\n")
            return stream
        return web.json_response(self._completion(body))

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}
        ids: dict[str, Any] = {}
        if body.get("return_token_ids"):
            choice["token_ids"] = [4, 2]
            choice["logprobs"] = {"content": [{"token": t, "logprob": -0.5} for t in "42"]}
            ids["prompt_token_ids"] = [1, 2, 3]
        choices = [{"index": n, **choice} for n in range(body.get("n", 1))]
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "gpt-x", "choices": choices, **ids}

    async def _completions(self, request: web.Request) -> web.Response:
        body = await self._taken(request)
        rows = [None, *({str(token): {"logprob": -token / 10}} for token in body["prompt"][1:])]
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": rows}]})


@pytest.fixture
async def theirs() -> AsyncIterator[Theirs]:
    server = Theirs()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(autouse=True)
def frequent_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_mq.engines.external.HEALTH_INTERVAL", 0.1)


@contextlib.asynccontextmanager
async def serving(theirs: Theirs, key: str | None = "key", **settings: Any) -> AsyncIterator[ExternalServer]:
    model = AuxiliaryModelConfig(name="judge", engine="external", url=theirs.url, **{"timeout": 5.0, **settings})
    server = ExternalServer(model, engine_id="e", key=key, token=TOKEN, lease=30.0)
    ready = asyncio.Event()
    async with asyncio.timeout(40), asyncio.TaskGroup() as group:
        running = group.create_task(server.run(lambda url: ready.set()))
        await ready.wait()
        yield server
        server.stop("test")
        assert await running == "test"


@contextlib.asynccontextmanager
async def wrapped(server: ExternalServer, **options: Any) -> AsyncIterator[ModelWrapper]:
    wrapper = ModelWrapper(
        InferenceModel("e", server.url, "judge", role="auxiliary"), **{"not_ready_timeout": 0.0, **options}
    )
    try:
        yield wrapper
    finally:
        await wrapper.aclose()


async def until_trouble(server: ExternalServer, wanted: bool) -> None:
    async with asyncio.timeout(10):
        while (server.trouble is not None) is not wanted:  # noqa: ASYNC110  # it tells nobody but its host
            await asyncio.sleep(0.02)


async def test_a_chat_reaches_the_server_as_it_understands_it(theirs: Theirs) -> None:
    async with serving(theirs) as server, wrapped(server, max_prompt_tokens=9, seed=3) as model:
        answers = await model.chat_async(ASK, n=2)
        assert [one.response_text for one in answers] == ["42", "42"]
        client = model.get_openai_async_client()
        said = await client.chat.completions.create(model=model.model_name, messages=ASK)  # type: ignore[arg-type]
        assert said.choices[0].message.content == "42"
    assert {body["model"] for body in theirs.bodies} == {"gpt-x"}
    assert theirs.headers[0]["Authorization"] == "Bearer key"
    assert not {name for headers in theirs.headers for name in headers if name.lower().startswith("x-tmq")}


async def test_an_answer_that_is_begun_is_continued_where_the_server_can(theirs: Theirs) -> None:
    begun, flags = [*ASK, {"role": "assistant", "content": "4"}], {"add_generation_prompt", "continue_final_message"}
    async with serving(theirs) as server, wrapped(server) as model:
        await model.chat_async(begun)
    theirs.knows |= {"return_token_ids", *flags}
    async with serving(theirs, token_ids=True) as server, wrapped(server) as model:
        await model.chat_async(begun)
    assert [flags & body.keys() for body in theirs.bodies] == [set(), flags]


async def test_streams_pass_as_they_come(theirs: Theirs) -> None:
    async with serving(theirs) as server, aiohttp.ClientSession() as session:
        body = {"model": "judge", "messages": ASK, "stream": True}
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as answer:
            text = (await answer.read()).decode()
    assert answer.content_type == "text/event-stream"
    assert text.count("data: ") == 3
    assert text.endswith("[DONE]\n\n")


async def test_token_ids_where_the_server_gives_them(theirs: Theirs) -> None:
    theirs.knows |= {"return_token_ids"}
    async with serving(theirs, token_ids=True) as server, wrapped(server, enable_history=True) as model:
        await model.chat_async(ASK)
        (kept,) = model.extract_experience_from_history()
        assert kept.tokens.tolist() == [1, 2, 3, 4, 2]
        assert theirs.bodies[0]["logprobs"] is True
        assert (await model.logprobs_async([5, 1, 2], temperature=1.0)).tolist() == pytest.approx([-0.1, -0.2])
        with pytest.raises(EngineRefused, match="at temperature 1 only"):
            await model.logprobs_async([5, 1, 2], temperature=0.7)


async def test_what_needs_tokens_is_refused_where_there_are_none(theirs: Theirs) -> None:
    async with serving(theirs) as server, wrapped(server) as model:
        with pytest.raises(
            EngineRefused, match=r"does not return logprobs of given tokens.*set token_ids: true"
        ) as refused:
            await model.logprobs_async([1, 2])
        assert refused.value.code == "no_token_ids"
        with pytest.raises(EngineRefused, match="does not return the tokens of a text"):
            await model.convert_messages_to_experience_async(ASK)
    async with serving(theirs) as server, wrapped(server, enable_history=True) as model:
        with pytest.raises(EngineRefused, match="token"):
            await model.chat_async(ASK)


async def test_a_server_that_goes_away_is_waited_for(theirs: Theirs) -> None:
    port = int(theirs.url.split(":")[2].removesuffix("/v1"))
    async with serving(theirs) as server, wrapped(server) as model:
        await theirs.stop()
        with pytest.raises(EngineNotReady, match="auxiliary model 'judge'"):
            await model.chat_async(ASK)
        assert server.snapshot()["state"] == "unreachable"
        await theirs.start(port)
        await until_trouble(server, False)
        assert (await model.chat_async(ASK))[0].response_text == "42"
        assert server.load == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_again_when_it_says_and_its_refusals_are_passed_on(
    theirs: Theirs, status: int
) -> None:
    theirs.answer = web.Response(status=status, text="slow down", headers={"Retry-After": "7"})
    async with serving(theirs) as server, wrapped(server) as model:
        with pytest.raises(EngineNotReady, match="slow down") as busy:
            await model.chat_async(ASK)
        assert busy.value.retry_after == 7.0
        theirs.answer, theirs.knows = None, set()
        with pytest.raises(EngineRefused, match="unknown field"):
            await model.chat_async(ASK)


@pytest.mark.parametrize(
    ("models", "settings", "key", "says"),
    [
        (["a", "b"], {}, None, r"lists 2 models \(a, b\); choose one with served_name"),
        (["a"], {"api_key_env": "JUDGE_KEY"}, "wrong", "the key in JUDGE_KEY is not accepted"),
        (["a"], {}, "wrong", "it needs a key; set api_key_env"),
    ],
)
async def test_what_is_wrong_with_a_server_is_said(
    theirs: Theirs, models: list[str], settings: dict[str, Any], key: str | None, says: str
) -> None:
    theirs.models = models
    async with serving(theirs, key=key, **settings) as server, wrapped(server) as model:
        with pytest.raises(EngineNotReady, match=says):
            await model.chat_async(ASK)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'{"messages": 3}', b"\xff\xfe"])
async def test_bad_bodies_are_answered(theirs: Theirs, body: bytes) -> None:
    async with serving(theirs) as server, aiohttp.ClientSession() as session:
        async with session.post(f"{server.url}/v1/chat/completions", data=body) as answer:
            await answer.read()
        assert answer.status in {200, 400}
        async with session.get(f"{server.url}/health") as health:
            assert (await health.json())["state"] == "current"


async def test_the_admin_routes_want_the_token(theirs: Theirs) -> None:
    async with serving(theirs) as server, aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/admin/state") as answer:
            assert answer.status == 401
        async with session.get(f"{server.url}/admin/state", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert (await answer.json())["state"]["state"] == "current"


async def test_a_client_that_is_kept_follows_its_engine(theirs: Theirs) -> None:
    async with serving(theirs) as server, serving(theirs) as other:
        now: list[InferenceModel] = []

        def choose(name: str) -> InferenceModel:
            if not now:
                raise EngineLost(f"no living engine of auxiliary model {name!r} is known")
            return now[-1]

        (client,) = auxiliary_clients(["judge"], choose)["judge"]
        for at in (server, other):
            now.append(InferenceModel("e", at.url, "judge", role="auxiliary"))
            answer = await client.chat.completions.create(model="judge", messages=ASK)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == "42"
        await client.close()
    assert len(theirs.bodies) == 2


# -- engines as processes: with the weights of a folder, leading to another server, and of a class of the user's own


PROMPT = [{"role": "user", "content": "3,7="}]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def configured(folder: Path, *models: dict[str, object]) -> Config:
    small = {"tiny": {}, "max_model_len": 64, "max_prompt_tokens": 32, "max_response_tokens": 8}
    explorer = {"auxiliary_models": list(models), "rollout_model": {"engine_num": 2}}
    return load_config({"name": "a", "run_dir": str(folder), "model": small, "explorer": explorer})


def teacher(folder: Path, **more: object) -> Config:
    small = {"tiny": {}, "max_model_len": 64, "max_prompt_tokens": 32, "max_response_tokens": 8}
    return configured(folder, {"name": "teacher", "model": small, **more})


async def end(host: EngineHost) -> None:
    await host.stop()
    assert not host.snapshot.alive


@pytest.mark.timeout(150)
async def test_a_hosted_model_serves_the_weights_of_its_folder_at_once(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (host,) = auxiliary_hosts(teacher(tmp_path), "x")
    assert host.id == "x-auxiliary-teacher"
    await host.start()
    snapshot = host.snapshot
    assert (snapshot.state, snapshot.version, snapshot.name) == ("current", (0, 0), "teacher")
    model = ModelWrapper(snapshot.model("auxiliary"))
    tokens = (await model.chat_async(PROMPT, max_tokens=4))[0].tokens
    given = await model.logprobs_async(tokens.tolist(), temperature=1.0)
    await model.aclose()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model-teacher")
    with torch.inference_mode():
        logits = saved(input_ids=tokens[None].long()).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(-1, tokens[1:, None].long())[:, 0]
    assert torch.allclose(given, wanted, atol=1e-4)
    await host.pause()
    with pytest.raises(EngineRefused, match="takes no weights"):
        await host.receive({})
    await end(host)


@pytest.mark.parametrize("way", ["api_key_env", "api_key_file"])
async def test_an_external_one_is_hosted_as_any_engine(
    tmp_path: Path, theirs: Theirs, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    key = tmp_path.with_name(f"{tmp_path.name}.key")  # beside the run folder, which is looked through for it
    key.write_text("secret-key\n")
    place = "JUDGE_KEY" if way == "api_key_env" else str(key)
    judge = {"name": "judge", "engine": "external", "url": theirs.url, way: place}
    (host,) = auxiliary_hosts(configured(tmp_path, judge), "x")
    await host.start()
    assert (host.snapshot.alive, host.snapshot.state, host.snapshot.name) == (True, "current", "judge")
    assert "secret-key" not in str(host.snapshot.detail("auxiliary"))
    model = ModelWrapper(host.snapshot.model("auxiliary"))
    assert (await model.chat_async(ASK))[0].response_text == "42"
    await model.aclose()
    assert theirs.headers[-1]["Authorization"] == "Bearer secret-key"
    await host.detach()
    assert not any("secret-key" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    # our successor finds it
    (again,) = auxiliary_hosts(configured(tmp_path, judge), "x")
    await again.start()
    assert again.snapshot.url == host.snapshot.url
    await end(again)


@pytest.mark.parametrize(("way", "place"), [("api_key_env", "NO_SUCH_KEY"), ("api_key_file", "/no/such/key")])
async def test_a_key_that_is_not_there_is_said_before_anything_runs(tmp_path: Path, way: str, place: str) -> None:
    judge = {"name": "judge", "engine": "external", "url": "http://127.0.0.1:9/v1", way: place}
    (host,) = auxiliary_hosts(configured(tmp_path, judge), "x")
    with pytest.raises(ModelError, match=place):
        await host.start()


def test_engines_have_names_of_their_own_and_the_first_one_keeps_its(tmp_path: Path) -> None:
    config = teacher(tmp_path, engine_num=3)
    assert [host.id for host in rollout_hosts(config, "explorer-0")] == ["explorer-0-engine", "explorer-0-engine-1"]
    names = [host.id for host in auxiliary_hosts(config, "explorer-0")]
    assert names == ["explorer-0-auxiliary-teacher"] + [f"explorer-0-auxiliary-teacher-{n}" for n in (1, 2)]


def test_more_engines_are_no_reason_to_replace_those_there_are(tmp_path: Path) -> None:
    one, two = teacher(tmp_path), teacher(tmp_path, engine_num=2)
    assert engine_digest(one) == engine_digest(two)
    (first,), (second,) = one.explorer.auxiliary_models, two.explorer.auxiliary_models
    assert engine_digest(one, first) == engine_digest(two, second)
    assert engine_digest(one, first) != engine_digest(one)


@pytest.mark.parametrize(
    ("changed", "lora", "adopts"),
    [
        ({"pause_mode": "abort"}, None, False),
        ({"colocated": True}, None, False),
        ({"max_staleness": 7}, None, True),
        ({"max_staleness": 7}, LoraConfig(sync="merged"), True),
        ({"max_staleness": 7}, LoraConfig(sync="adapter"), False),
    ],
)
def test_an_engine_with_other_settings_of_its_syncs_is_not_adopted(
    changed: dict[str, Any], lora: LoraConfig | None, adopts: bool, tmp_path: Path
) -> None:
    config = teacher(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    other = config.model_copy(update={"synchronizer": config.synchronizer.model_copy(update=changed)})
    (model,) = config.explorer.auxiliary_models
    assert (engine_digest(config) == engine_digest(other)) is adopts
    assert engine_digest(config, model) == engine_digest(other, model)


@pytest.mark.parametrize("auxiliary", [False, True])
def test_an_engine_of_another_release_is_not_adopted(
    auxiliary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host and it speak an API of their own, which no version is promised for."""
    config = teacher(tmp_path)
    model = config.explorer.auxiliary_models[0] if auxiliary else None
    before = engine_digest(config, model)
    assert engine_digest(config, model) == before
    monkeypatch.setattr("trinity_mq.engines.host.ready_file.VERSION", "0.9.0")
    assert engine_digest(config, model) != before


# -- an engine of the user's own, in one file of plugin_dirs

PARROT = """
import contextlib
from trinity_mq.engines import Engine
from trinity_mq.models import ModelError
from trinity_mq.testing.scripted import ScriptedGenerator

class Parrot(Engine):
    @contextlib.asynccontextmanager
    async def serve(self, job):
        server = job.server(ScriptedGenerator(lambda prompt: "hello"), job.folder(), job.receiver)
        server.state.serve_fixed_weights()
        yield server

class Broken(Parrot):
    def check(self):
        raise ModelError("the parrot is not installed")
"""


def plugged(folder: Path, engine: str) -> Config:
    plugins = folder / "plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "parrot_engine.py").write_text(PARROT)
    explorer = {"rollout_model": {"engine": engine}}
    data = {"name": "a", "run_dir": str(folder / "runs"), "model": {"tiny": {}}, "explorer": explorer}
    return load_config({**data, "plugin_dirs": [str(plugins)]})


@pytest.mark.timeout(150)
async def test_an_engine_in_one_file_serves_a_request(tmp_path: Path) -> None:
    host = EngineHost(plugged(tmp_path, "parrot_engine.Parrot"), tmp_path / "run", "e0")
    await host.start()
    assert (host.snapshot.state, host.snapshot.version) == ("current", (0, 0))
    model = ModelWrapper(host.snapshot.model())
    assert (await model.chat_async(PROMPT))[0].response_text == "hello"
    await model.aclose()
    await end(host)


def test_an_engine_is_checked_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = plugged(tmp_path, "parrot_engine.Broken")
    monkeypatch.syspath_prepend(tmp_path / "plugins")
    with pytest.raises(ModelError, match="the parrot is not installed"):
        check_devices(config)
    with pytest.raises(UnknownNameError, match="has no 'Parot'; did you mean 'Parrot'"):
        check_devices(plugged(tmp_path, "parrot_engine.Parot"))
    with pytest.raises(UnknownNameError, match=r"wanted a subclass of trinity_mq\.engines\.protocol\.Engine"):
        check_devices(plugged(tmp_path, "pathlib.Path"))


def test_an_unknown_name_is_refused_when_the_configuration_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vlm'; wanted transformers, vllm or the dotted path"):
        plugged(tmp_path, "vlm")

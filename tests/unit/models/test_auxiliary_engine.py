"""Engines as processes: with the weights of a folder, leading to another server, and of a class of the user's own."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.unit.models.test_external import ASK, Theirs
from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.engines.host.host import EngineHost, auxiliary_hosts, rollout_hosts
from trinity_mq.engines.host.ready_file import engine_digest
from trinity_mq.models import EngineRefused, ModelError, ModelWrapper
from trinity_mq.operations.validate import check_devices
from trinity_mq.runtime.plugins import UnknownNameError

PROMPT = [{"role": "user", "content": "3,7="}]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@pytest.fixture
async def theirs() -> AsyncIterator[Theirs]:
    server = Theirs()
    await server.start()
    yield server
    await server.stop()


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

"""An engine of the user's own, in one file of ``plugin_dirs``: checked, hosted and asked as a built-in engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.unit.models.test_auxiliary_engine import PROMPT, end
from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.models import ModelError, ModelWrapper
from trinity_mq.operations.validate import check_devices
from trinity_mq.runtime.plugins import UnknownNameError

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


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def configured(folder: Path, engine: str) -> Config:
    plugins = folder / "plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "parrot_engine.py").write_text(PARROT)
    explorer = {"rollout_model": {"engine": engine}}
    data = {"name": "a", "run_dir": str(folder / "runs"), "model": {"tiny": {}}, "explorer": explorer}
    return load_config({**data, "plugin_dirs": [str(plugins)]})


@pytest.mark.timeout(150)
async def test_an_engine_in_one_file_serves_a_request(tmp_path: Path) -> None:
    host = EngineHost(configured(tmp_path, "parrot_engine.Parrot"), tmp_path / "run", "e0")
    await host.start()
    assert (host.snapshot.state, host.snapshot.version) == ("current", (0, 0))
    model = ModelWrapper(host.snapshot.model())
    assert (await model.chat_async(PROMPT))[0].response_text == "hello"
    await model.aclose()
    await end(host)


def test_an_engine_is_checked_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, "parrot_engine.Broken")
    monkeypatch.syspath_prepend(tmp_path / "plugins")
    with pytest.raises(ModelError, match="the parrot is not installed"):
        check_devices(config)
    with pytest.raises(UnknownNameError, match="has no 'Parot'; did you mean 'Parrot'"):
        check_devices(configured(tmp_path, "parrot_engine.Parot"))
    with pytest.raises(UnknownNameError, match=r"wanted a subclass of trinity_mq\.engines\.protocol\.Engine"):
        check_devices(configured(tmp_path, "pathlib.Path"))


def test_an_unknown_name_is_refused_when_the_configuration_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vlm'; wanted transformers, vllm or the dotted path"):
        configured(tmp_path, "vlm")

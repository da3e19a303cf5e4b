"""The reference of the settings: made from the models, complete, and up to date."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from trinity_mq.cli import schema as command
from trinity_mq.cli.agents import agent_id
from trinity_mq.cli.main import main
from trinity_mq.config import AlgorithmConfig, Config
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.algorithm.reference import RewardKL
from trinity_mq.config.settings_table import all_settings, page
from trinity_mq.messages import Message
from trinity_mq.messages.codec import CATALOGUE, UPGRADES
from trinity_mq.messages.schemas import json_schemas
from trinity_mq.targets.target import name_of_host

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_agrees_with_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: trinity-mq settings --out docs/settings.md"


def test_each_setting_has_its_meaning_and_stands_once() -> None:
    found = all_settings()
    assert [one.key for one in found if not one.meaning] == []
    keys = [one.key for one in found]
    assert len(keys) == len(set(keys))
    assert set(Config.model_fields) == {key.partition(".")[0] for key in keys}


def test_type_default_unit_and_limits() -> None:
    known = {one.key: one for one in all_settings()}
    total = known["buffer.total_steps"]
    assert (total.type, total.default, total.unit) == ("int or null, ≥ 1", "`null`", "batches")
    message = known["broker.max_message_bytes"]
    assert (message.type, message.default, message.unit) == ("int, ≥ 65 536, ≤ 16 777 216", "`8388608`", "bytes")
    assert known["trainer.num_threads"].type == "`auto` or int, ≥ 1"
    assert known["runner.blocking"].type == "`thread`, `process`"
    assert known["operator.operators.<n>.name"].default == "required"
    assert known["buffer.eval_tasksets"].type == "list of section as `buffer.taskset`"


def test_a_section_on_the_screen_and_the_page_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "supervisor"]) == 0
    out = capsys.readouterr().out
    assert "supervisor.grace  (float, > 0, seconds, default `30.0`)\n    Seconds that a process has to drain" in out
    assert "trainer." not in out
    assert main(["settings", "bufer"]) == 2
    assert "no section or setting 'bufer'; known sections: algorithm, " in capsys.readouterr().err
    assert main(["settings", "--out", str(tmp_path / "s.md")]) == 0
    assert (tmp_path / "s.md").read_text(encoding="utf-8") == page()
    assert main(["settings", "--out", str(tmp_path / "no" / "s.md")]) == 2


SCHEMAS = Path(__file__).parents[3] / "schemas"


def test_the_committed_schemas_are_those_of_the_models() -> None:
    assert command.schema_differences(SCHEMAS) == [], "the models have changed: see schemas/README.md, Evolution"


@pytest.mark.parametrize(("key", "cls"), CATALOGUE.items(), ids=str)
def test_a_schema_says_what_its_model_takes(key: tuple[str, int], cls: type[Message]) -> None:
    made = json_schemas()["{}.v{}".format(*key)]
    assert made["properties"].keys() == {"kind", "version_number"} | cls.model_fields.keys()
    assert (made["properties"]["kind"]["const"], made["properties"]["version_number"]["const"]) == key
    required = {name for name, field in cls.model_fields.items() if field.is_required()}
    assert set(made["required"]) == {"kind", "version_number"} | required
    assert made["additionalProperties"] is True
    assert made["$id"] == "urn:trinity-mq:schema:{}:{}".format(*key)
    assert "``" not in json.dumps(made)


def test_schemas_are_written_and_what_drifted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["schema", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{len(CATALOGUE)} schemas in {out}\n"
    assert json.loads((out / "mark.v1.schema.json").read_text()) == json_schemas()["mark.v1"]
    (out / "mark.v0.schema.json").write_text("as it was")
    monkeypatch.setitem(UPGRADES, ("mark", 0), dict)
    assert main(["schema", "--out", str(out), "--check"]) == 0, "those of old versions stay"
    capsys.readouterr()
    (out / "mark.v1.schema.json").write_text("{}")
    (out / "beat.v1.schema.json").unlink()
    (out / "mark.v7.schema.json").write_text("{}")
    assert main(["schema", "--out", str(out), "--check"]) == 1
    assert (out / "mark.v1.schema.json").read_text() == "{}"
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines[:-1]) == [
        f"{out}/beat.v1.schema.json: missing",
        f"{out}/mark.v1.schema.json: differs from the models",
        f"{out}/mark.v7.schema.json: not the schema of a known message body",
    ]
    assert "trinity-mq schema --out" in lines[-1]
    assert main(["schema", "--out", str(out / "mark.v1.schema.json")]) == 2
    assert "cannot be written: File exists" in capsys.readouterr().err


def test_each_algorithm_is_listed_with_its_pieces_and_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines() if line[:1].isalpha()} == set(PRESETS)
    assert max(map(len, out.splitlines())) <= 80
    assert "ratio sequence; surrogate clip(low 0.0003" in " ".join(out.split())


def test_what_is_shown_of_one_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "show", "gspo", "surrogate.low=0.1"]) == 0
    words, _, text = capsys.readouterr().out.partition("\nalgorithm:\n")
    assert "arXiv 2507.18071" in words
    assert "max(-A s" in words
    found = AlgorithmConfig.model_validate(yaml.safe_load(text))
    assert found == AlgorithmConfig.model_validate({"algorithm_type": "gspo", "surrogate": {"low": 0.1}})
    assert main(["algorithms", "show", "ppo", "kl=null", "reward_kl={coef: 0.1}"]) == 0
    words, _, text = capsys.readouterr().out.partition("\nalgorithm:\n")
    assert "needs: a reference model" in words
    assert AlgorithmConfig.model_validate(yaml.safe_load(text)).reward_kl == RewardKL(coef=0.1)
    assert main(["algorithms", "show", "gsp"]) == 2
    assert "did you mean gspo" in capsys.readouterr().err
    assert main(["algorithms", "show", "gspo", "surrogate.lo=1"]) == 2
    assert "lo" in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_each_can_be_shown_and_pasted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "show", name]) == 0
    text = capsys.readouterr().out.partition("\nalgorithm:\n")[2]
    shown = AlgorithmConfig.model_validate(yaml.safe_load(text))
    assert shown == AlgorithmConfig.model_validate({"algorithm_type": name})


def test_engines_only_hosts_under_a_name_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    def note(what: str) -> Any:
        return lambda config, agent_id: started.append((what, agent_id)) or 0

    agent, hosting = ModuleType("agent"), ModuleType("hosting")
    agent.main, hosting.host_engines = note("schedules"), note("hosts")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trinity_agents.explorer.agent", agent)
    monkeypatch.setitem(sys.modules, "trinity_agents.explorer.engine_hosting", hosting)
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://x")
    config = tmp_path / "run.yaml"
    config.write_text("name: r\nmodel: {tiny: {}}\n")
    for words in ([], ["--engines-only"], ["--engines-only", "--id", "engines-7"]):
        assert main(["explorer", str(config), *words]) == 0
    assert started == [("schedules", "explorer-0"), ("hosts", agent_id("engines-{host}")), ("hosts", "engines-7")]


@pytest.mark.parametrize(
    ("host", "name"), [("GPU-3.example.org", "gpu-3-example-org"), ("ünï", "n"), ("--", "host"), ("a" * 99, "a" * 40)]
)
def test_a_machines_name_fits_into_the_brokers(host: str, name: str) -> None:
    assert name_of_host(host) == name
    assert agent_id("engines-{host}") == f"engines-{name_of_host(socket.gethostname())}"
    assert agent_id("runner-0") == "runner-0"

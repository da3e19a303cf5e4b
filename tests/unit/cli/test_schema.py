from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_mq.cli import schema as command
from trinity_mq.cli.main import main
from trinity_mq.messages import Message
from trinity_mq.messages.codec import CATALOGUE, UPGRADES
from trinity_mq.messages.schemas import json_schemas

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


def test_docstrings_of_fields_are_their_descriptions() -> None:
    made = json_schemas()["task_submission.v1"]
    assert made["$defs"]["TaskBody"]["additionalProperties"] is True
    assert made["$defs"]["TaskBody"]["description"] == "The task of a workflow; the wire form of `Task`."
    assert made["properties"]["submission_id"]["description"] == (
        "De-duplicates repeated publishes; empty means the message's `message_id`."
    )


def test_it_writes_and_then_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["schema", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{len(CATALOGUE)} schemas in {out}\n"
    assert json.loads((out / "mark.v1.schema.json").read_text()) == json_schemas()["mark.v1"]
    assert main(["schema", "--out", str(out), "--check"]) == 0


def test_check_names_what_drifted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["schema", "--out", str(tmp_path)])
    capsys.readouterr()
    (tmp_path / "mark.v1.schema.json").write_text("{}")
    (tmp_path / "beat.v1.schema.json").unlink()
    (tmp_path / "mark.v7.schema.json").write_text("{}")
    assert main(["schema", "--out", str(tmp_path), "--check"]) == 1
    assert (tmp_path / "mark.v1.schema.json").read_text() == "{}"
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines[:-1]) == [
        f"{tmp_path}/beat.v1.schema.json: missing",
        f"{tmp_path}/mark.v1.schema.json: differs from the models",
        f"{tmp_path}/mark.v7.schema.json: not the schema of a known message body",
    ]
    assert "trinity-mq schema --out" in lines[-1]


def test_schemas_of_old_versions_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["schema", "--out", str(tmp_path)])
    (tmp_path / "mark.v0.schema.json").write_text("as it was")
    monkeypatch.setitem(UPGRADES, ("mark", 0), dict)
    assert command.schema_differences(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["schema", "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written: File exists" in capsys.readouterr().err

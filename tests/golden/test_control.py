"""Every control-plane body ever written decodes, for ever, to what its JSON form says; goldens are written once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import pytest

from tests.golden import make_goldens
from tests.golden.forms import CONTROL, EXPERIENCES, GOLDEN, SUMS, form, json_text
from trinity_mq.messages import JSON_CONTENT_TYPE, Message, decode_any, encode
from trinity_mq.messages.codec import CATALOGUE, UPGRADES

BODIES = sorted(CONTROL.glob("*.msgpack"))


def key_of(path: Path) -> tuple[str, int]:
    kind, version, _ = path.name.split(".", 2)
    return kind, int(version[1:])


CURRENT = [path for path in BODIES if key_of(path) in CATALOGUE]


def shown(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def fields_of(message: Message) -> str:
    """Return what the body gave, not what the model added; as text, so that 1, 1.0 and true differ."""
    return json_text(form(message.model_dump(exclude_unset=True)))


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    return type(whole) is type(part) and whole == part


@pytest.mark.parametrize("key", [*CATALOGUE, *UPGRADES], ids=str)
def test_every_kind_and_version_has_goldens(key: tuple[str, int]) -> None:
    assert len([path for path in BODIES if key_of(path) == key]) >= 2, "add cases to tests/golden/control_cases.json"


@pytest.mark.parametrize(("key", "cls"), CATALOGUE.items(), ids=str)
def test_every_field_is_in_a_golden(key: tuple[str, int], cls: type[Message]) -> None:
    given = {name for path in BODIES if key_of(path) == key for name in shown(path)}
    missing = cls.model_fields.keys() - given
    assert not missing, "fields without a golden: add a case to tests/golden/control_cases.json, run make_goldens.py"


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_decodes_from_msgpack_and_from_its_json_form(path: Path) -> None:
    body = path.read_bytes()
    assert json_text(form(msgpack.unpackb(body))) == json_text(shown(path))
    message = decode_any(body)
    assert message.kind == key_of(path)[0]
    from_json = decode_any(path.with_suffix(".json").read_bytes(), JSON_CONTENT_TYPE)
    assert fields_of(from_json) == fields_of(message)


@pytest.mark.parametrize("path", CURRENT, ids=lambda path: path.stem)
def test_has_the_fields_of_the_json_form_and_keeps_them_when_it_is_encoded_again(path: Path) -> None:
    wanted = {name: value for name, value in shown(path).items() if name not in {"kind", "version_number"}}
    message = decode_any(path.read_bytes())
    assert json.loads(fields_of(message)) == wanted
    whole, again = message.model_dump(), encode(message)
    assert contains(form(whole), wanted)
    assert contains(form(msgpack.unpackb(again)), shown(path))
    assert fields_of(decode_any(again)) == json_text(form(whole))


READ_FROM_TEXT = {"metrics.v1.nonfinite", "task_slice.v1.large_seed"}
"""JSON has no such numbers: readers take them as text, the schemas do not mention it."""


@pytest.mark.parametrize("path", CURRENT, ids=lambda path: path.stem)
def test_is_what_its_schema_says(path: Path) -> None:
    kind, version = key_of(path)
    schema = json.loads((CONTROL.parents[1] / f"{kind}.v{version}.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(shown(path)) == (path.stem not in READ_FROM_TEXT), list(
        validator.iter_errors(shown(path))
    )
    assert not validator.is_valid({**shown(path), "kind": "another"})


RULE = (
    "a golden body stands for bodies that others have sent and kept: never change or remove one. Make the reader read "
    "it again; for something new add a case, or a version with an upgrade function, and run "
    "`python tests/golden/make_goldens.py`, which adds what is missing (schemas/README.md, Evolution)"
)


def test_none_has_changed() -> None:
    sums = dict(reversed(line.split("  ", 1)) for line in SUMS.read_text(encoding="utf-8").splitlines())
    files = {path.relative_to(GOLDEN).as_posix(): path for path in GOLDEN.rglob("*") if path.is_file() and path != SUMS}
    changed = {name for name, path in files.items() if sums.get(name) != hashlib.sha256(path.read_bytes()).hexdigest()}
    wrong = sorted(changed | (sums.keys() - files.keys()))
    assert not wrong, f"changed, removed or not listed: {', '.join(wrong)}\n{RULE}"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_maker_only_adds(tmp_path: Path) -> None:
    kept = tmp_path / "control" / "mark.v1.full.msgpack"
    kept.parent.mkdir()
    kept.write_bytes(b"written long ago")
    made = make_goldens.make(tmp_path)
    assert "control/mark.v1.minimal" in made
    assert "control/mark.v1.full" not in made
    first = snapshot(tmp_path)
    assert first["control/mark.v1.full.msgpack"] == b"written long ago"
    assert "control/mark.v1.full.json" not in first
    assert len(first) == 2 * len(made) + len(("kept", "SHA256SUMS"))
    assert make_goldens.make(tmp_path) == []
    assert snapshot(tmp_path) == first


def test_every_case_has_its_body_and_its_json_form() -> None:
    names = make_goldens.control_cases.CASES.items()
    cases = {f"{kind}.v{version}.{case}" for (kind, version), found in names for case in found}
    cases |= {f"v1.{case}" for case in make_goldens.experience_cases.cases()}
    files = [path for folder in (CONTROL, EXPERIENCES) for path in folder.iterdir()]
    assert {path.stem for path in files if path.suffix == ".json"} == cases
    assert {path.stem for path in files if path.suffix in {".msgpack", ".tmqx"}} == cases

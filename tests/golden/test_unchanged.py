"""Goldens are written once: the maker adds what is missing and touches nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.golden import make_goldens
from tests.golden.forms import CONTROL, EXPERIENCES, GOLDEN, SUMS

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

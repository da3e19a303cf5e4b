"""The maker adds what is missing and touches nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.golden import make_goldens
from tests.golden.forms import CONTROL, EXPERIENCES


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_only_adds(tmp_path: Path) -> None:
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


def test_every_golden_has_its_case() -> None:
    cases = {
        *(
            f"{kind}.v{version}.{case}"
            for (kind, version), found in make_goldens.control_cases.CASES.items()
            for case in found
        ),
        *(f"v1.{case}" for case in make_goldens.experience_cases.cases()),
    }
    assert {path.stem for folder in (CONTROL, EXPERIENCES) for path in folder.glob("*.json")} == cases

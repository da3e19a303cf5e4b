"""Goldens are written once."""

from __future__ import annotations

import hashlib

from tests.golden.forms import GOLDEN, SUMS

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


def test_each_body_has_its_json_form() -> None:
    bodies = {path.with_suffix("") for kind in ("*.msgpack", "*.tmqx") for path in GOLDEN.rglob(kind)}
    assert bodies == {path.with_suffix("") for path in GOLDEN.rglob("*.json")}
    assert len(bodies) > 40

"""Licences, bill of materials and audit: what deploy/supply_chain.py says of the dependencies of the runtime."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from deploy import supply_chain
from deploy.supply_chain import (
    Advisory,
    answers_of,
    concerns,
    dependencies,
    from_checkout,
    is_allowed,
    licence,
    pins,
    refused,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"
SCRIPT = ROOT / "deploy" / "supply_chain.py"
PINS = ROOT / "constraints-cpu.txt"
OSI = "OSI Approved ::"


def metadata(expression: str = "", field: str = "", classifiers: tuple[str, ...] = ()) -> Any:
    found = Message()
    for name, value in (("License-Expression", expression), ("License", field)):
        if value:
            found[name] = value
    for one in classifiers:
        found["Classifier"] = f"License :: {one}"
    return found


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True, timeout=280, check=False
    )


class TestLicences:
    @pytest.mark.parametrize(
        ("given", "expression"),
        [
            ({"expression": "MIT OR Apache-2.0", "field": "GPL"}, "MIT OR Apache-2.0"),
            ({"field": "BSD-3-Clause", "classifiers": ("OSI Approved :: BSD License",)}, "BSD-3-Clause"),
            ({"field": "Apache 2.0 License"}, "Apache-2.0"),
            ({"field": "Copyright (c) 2005\nAll rights", "classifiers": (f"{OSI} BSD License",)}, "LicenseRef-BSD"),
            ({"classifiers": (f"{OSI} MIT License", f"{OSI} Apache Software License")}, "Apache-2.0 AND MIT"),
            ({"field": "do as you like"}, ""),
        ],
    )
    def test_what_metadata_say(self, given, expression):
        assert licence(metadata(**given)) == expression

    @pytest.mark.parametrize(
        ("expression", "allowed"),
        [
            ("MIT", True),
            ("Apache-2.0 WITH LLVM-exception AND BSL-1.0", True),
            ("GPL-3.0-only OR MIT", True),
            ("GPL-3.0-only AND MIT", False),
            ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
            ("MIT AND (GPL-3.0-only OR Apache-2.0)", False),
            ("AGPL-3.0-or-later", False),
            ("", False),
        ],
    )
    def test_which_are_allowed(self, expression, allowed):
        assert is_allowed(expression) == allowed

    def test_no_dependency_of_the_runtime_has_another_one(self):
        found = dependencies()
        assert {"torch", "aio-pika", "pydantic", "certifi"} <= set(found)
        assert not {"pytest", "mypy", "datasets", "playwright"} & set(found)
        assert refused(found) == {}
        assert set(found) - set(pins(PINS)) - {"setuptools"} == set(), "each is pinned"

    def test_a_dependency_of_a_dependency_is_refused(self, tmp_path, monkeypatch):
        for name, more in (
            ("harmless", "License-Expression: MIT\nRequires-Dist: rogue"),
            ("rogue", "License: GPL-3.0-only"),
        ):
            folder = tmp_path / f"{name}-1.0.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{more}\n")
        project = tmp_path / "pyproject.toml"
        project.write_text(
            "[project]\ndependencies = [\"harmless>=1; python_version > '3'\", \"rogue; python_version < '3'\"]"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert refused(dependencies(project)) == {"rogue": "GPL-3.0-only"}
        project.write_text('[project]\ndependencies = ["absent-package"]')
        with pytest.raises(SystemExit, match="absent-package is not installed: pip install"):
            dependencies(project)

    def test_the_page_says_what_is_installed(self):
        text = PAGE.read_text(encoding="utf-8")
        release = re.search(r"Python\s+(\d+\.\d+) ", text)
        assert release
        if release[1] != f"{sys.version_info[0]}.{sys.version_info[1]}" or sys.platform != "linux":
            pytest.skip(f"the page is of Python {release[1]} on Linux")
        said = "docs/licences.md is old: python deploy/supply_chain.py licences --out docs/licences.md"
        assert supply_chain.licences_page(dependencies()) == text, said


RANGE = {
    "type": "ECOSYSTEM",
    "events": [{"introduced": "0"}, {"fixed": "1.2"}, {"introduced": "2.0"}, {"fixed": "2.1"}],
}


class TestAdvisories:
    @pytest.mark.parametrize(
        ("version", "hit"),
        [("1.1.9", True), ("1.2", False), ("1.9", False), ("2.0", True), ("2.1", False), ("3", False)],
    )
    def test_ranges(self, version, hit):
        assert concerns({"ranges": [RANGE]}, version) == hit
        assert not concerns({"ranges": [RANGE | {"type": "GIT"}]}, version)

    @pytest.mark.parametrize(("version", "hit"), [("1.0", True), ("1.5", True), ("1.5.post1", False), ("0.9", False)])
    def test_the_last_affected_and_single_versions(self, version, hit):
        events = [{"introduced": "1.0"}, {"last_affected": "1.5"}]
        assert concerns({"ranges": [{"type": "ECOSYSTEM", "events": events}]}, version) == hit
        assert concerns({"versions": ["1.0", "1.5"]}, version) == hit

    def test_a_checkout(self, tmp_path):
        affected = [{"package": {"ecosystem": "PyPI", "name": "Jinja2"}, "ranges": [RANGE]}]
        folder = tmp_path / "vulns" / "jinja2"
        folder.mkdir(parents=True)
        (folder / "a.yaml").write_text(yaml.safe_dump({"id": "PYSEC-1", "affected": affected}))
        (folder / "b.json").write_text(
            json.dumps({"id": "PYSEC-2", "affected": affected, "withdrawn": "2026-01-01T00:00:00Z"})
        )
        assert list(from_checkout({"jinja2": "1.0", "torch": "1.0"}, tmp_path)) == [
            Advisory("jinja2", "1.0", "PYSEC-1")
        ]
        assert list(from_checkout({"jinja2": "1.2"}, tmp_path)) == []
        old = tmp_path / "pins.txt"
        old.write_text("# comment\nJinja2==1.0  # why\n")
        done = command("audit", "--pins", old, "--advisories", tmp_path / "vulns")
        assert done.returncode == 1, done.stderr
        assert "jinja2==1.0: PYSEC-1\n" in done.stdout
        assert "1 pins, 1 known vulnerabilities" in done.stdout
        (tmp_path / "empty").mkdir()
        done = command("audit", "--advisories", tmp_path / "empty")
        assert done.returncode == 1
        assert f"error: no advisory (*.yaml, *.json) below {tmp_path}" in done.stderr
        old.write_text("torch>=2\n")
        with pytest.raises(SystemExit, match="has no line NAME==VERSION"):
            pins(old)

    def test_a_service_that_could_look_up_nothing_has_not_answered(self):
        skipped = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}
        assert answers_of(json.dumps({"dependencies": [skipped], "fixes": []})) is None
        bad = {"name": "jinja2", "version": "2.10", "vulns": [{"id": "PYSEC-2021-66", "fix_versions": ["2.11.3"]}]}
        good = {"name": "idna", "version": "3.20", "vulns": []}
        answer = answers_of(json.dumps({"dependencies": [bad, good, skipped], "fixes": []}))
        assert answer == ([Advisory("jinja2", "2.10", "PYSEC-2021-66")], ["torch"])


@pytest.mark.extended
@pytest.mark.timeout(1200)
class TestWithTheTools:
    """Those of the extra ``supply``."""

    def test_no_pin_is_known_as_vulnerable(self):
        pytest.importorskip("pip_audit")
        done = command("audit")
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"constraints-cpu.txt: \d{3} pins, 0 known vulnerabilities; source: .+", done.stdout)

    def test_the_bill_of_materials_is_valid_and_complete(self, tmp_path):
        pytest.importorskip("cyclonedx_py")
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator

        out = tmp_path / "sbom.json"
        done = command("sbom", "--out", out)
        assert done.returncode == 0, done.stderr
        text = out.read_text(encoding="utf-8")
        document = json.loads(text)
        assert JsonStrictValidator(SchemaVersion.from_version(document["specVersion"])).validate_str(text) is None
        assert document["metadata"]["component"]["name"] == "trinity-mq"
        wanted = {name: one.version for name, one in dependencies().items()}
        normal = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one for one in document["components"]}
        assert {name: one["version"] for name, one in normal.items()} == wanted
        assert all(one.get("licenses") and one["purl"].startswith("pkg:pypi/") for one in normal.values())
        needs = {one["ref"]: set(one["dependsOn"]) for one in document["dependencies"]}
        reached, waiting = set(), [document["metadata"]["component"]["bom-ref"]]
        while waiting:
            reached.add(ref := waiting.pop())
            waiting += needs[ref] - reached
        assert {one["bom-ref"] for one in normal.values()} <= reached, "each is there because something needs it"


def test_every_dependency_but_torch_is_pinned_with_hashes():
    text = (ROOT / "deploy" / "requirements-hashed.txt").read_text(encoding="utf-8")
    hashed = {}
    for block in re.split(r"^(?=[a-zA-Z0-9])", text, flags=re.MULTILINE)[1:]:
        name, version = re.match(r"([\w.-]+)==([\w.]+)", block).groups()
        hashed[canonicalize_name(name)] = version
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), name
    assert "torch" not in hashed
    assert set(dependencies()) - {"torch"} <= set(hashed)
    versions = pins(PINS)
    assert [name for name, version in hashed.items() if versions.get(name, version) != version] == []

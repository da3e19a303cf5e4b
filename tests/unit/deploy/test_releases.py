"""Releases: their table, sections and goldens, and what ``scripts/release`` refuses."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.releases import GOLDENS, ROOT, ReleaseError, changelog, main, releases
from trinity_mq.release import FIRST, VERSION


def test_each_release_has_its_section_and_goldens_and_what_is_new_has_a_section_above() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["Unreleased", *reversed([one.version for one in releases()])]
    for one in releases():
        assert changelog(ROOT, one.version).startswith(f"## [{one.version}] - {one.date.isoformat()}\n")
        assert (ROOT / GOLDENS / one.version / "bodies.json").is_file()


@pytest.mark.parametrize("version", ["0.2", "v0.2.0", "0.2.0.dev0", "next"])
def test_no_version_to_release(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([version]) == 1
    assert f"{version!r} is no version to release" in capsys.readouterr().err
    for words in ((), ("0.2.0", version)):
        assert main(words) == 2
        assert capsys.readouterr().err == "usage: scripts/release VERSION | --check | --tags\n"


def test_versions_rise_and_that_of_the_tree_comes_after_the_last_release() -> None:
    versions = ("0.9.10", "0.10.0a1", "0.10.0b1", "0.10.0rc1", "0.10.0rc2", "0.10.0", "1.0.0")
    made = [replace(releases()[0], version=one) for one in versions]
    assert sorted(made, key=lambda one: one.order) == made
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert stated == VERSION
    released = [one.version for one in releases()]
    assert released[0] == FIRST
    base = re.sub(r"\.dev\d+$", "", VERSION)
    assert base not in released or released[-1] == VERSION, "raise the version after a release, with .dev0"
    assert tuple(map(int, base.split("."))) >= releases()[-1].order[:3]


def test_a_section_without_a_change_is_none(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n## [0.1.0]\n\n- A change.\n")
    with pytest.raises(ReleaseError, match=r"section \[0\.2\.0\] of CHANGELOG\.md names no change"):
        changelog(tmp_path, "0.2.0")

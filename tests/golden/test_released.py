"""Messages and files that released versions wrote, as their wheels wrote them: this release reads all of them.

``tests/upgrade/test_messages.py`` holds the other direction. The table of releases agrees with the change log.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import sqlite3
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from deploy.releases import GOLDENS, ROOT, Release, ReleaseError, changelog, git, has_commit, main, releases
from tests.golden.forms import batch_form, form
from tests.golden.released_state import read
from tests.golden.test_control import contains
from trinity_agents.explorer import state as explorer
from trinity_mq.experience import decode as decode_experiences
from trinity_mq.messages import decode_any, encode
from trinity_mq.messages.codec import CATALOGUE
from trinity_mq.messages.compatibility import OLDEST
from trinity_mq.release import FIRST, VERSION


def bodies(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / GOLDENS / version / "bodies.json").read_text(encoding="utf-8"))
    return found


RELEASED = [(one.version, name) for one in releases() for name in bodies(one.version)]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {one.version: bodies(one.version) for one in releases()}


@pytest.mark.parametrize(("version", "name"), RELEASED, ids=lambda word: word)
def test_is_read_whole(known: dict[str, Any], version: str, name: str) -> None:
    body, holds = base64.b64decode(known[version][name]["body"]), known[version][name]["holds"]
    if name.startswith("control/"):
        assert form(msgpack.unpackb(body)) == holds
        seen = form(msgpack.unpackb(encode(decode_any(body))))
        missing = {key: value for key, value in holds.items() if key not in {"kind", "version_number"}}
        assert contains(seen, missing)
    else:
        assert batch_form(decode_experiences(body)) == holds


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
async def test_a_run_goes_on_from_its_files(release: Release, tmp_path: Path) -> None:
    """All that the release itself found in them is found, and the next save brings their formats up."""
    kept = ROOT / GOLDENS / release.version
    run = shutil.copytree(kept / "run", tmp_path / "run")
    found = await read(run)
    assert contains(json.loads(json.dumps(found)), json.loads((kept / "run.json").read_text(encoding="utf-8")))
    with closing(sqlite3.connect(run / "state" / "explorer.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (explorer.NEWEST_FORMAT,)


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
def test_a_release_has_every_kind_that_it_knew(release: Release) -> None:
    kinds = {name.removeprefix("control/").split(".")[0] for name in bodies(release.version) if "control/" in name}
    assert kinds <= {kind for kind, _ in CATALOGUE}, "a kind that was released cannot go"
    if release.version == releases()[-1].version:
        assert len(kinds) >= 27
    assert release.writes >= OLDEST, "it is not read any more: its goldens go with it, and docs/upgrading.md says so"


def test_each_release_has_its_section_and_goldens_and_what_is_new_has_a_section_above() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["Unreleased", *reversed([one.version for one in releases()])]
    for one in releases():
        if has_commit(ROOT, one.commit):  # else the clone is shallow
            stated = tomllib.loads(git(ROOT, "show", f"{one.commit}:pyproject.toml"))["project"]["version"]
            assert stated == one.version, "the goldens are of another release"
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

"""``scripts/release`` on a clone: what is missing is said, and a release leaves row, goldens, commit and tag."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy.releases import GOLDENS, ROOT, TABLE, ReleaseError, changelog, has_commit, main, releases
from trinity_mq.release import FIRST, VERSION

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(shutil.which("git") is None, reason="needs git")]
TODAY = datetime.now(UTC).date().isoformat()
IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "A Person"), ("EMAIL", "person@example.org"))
}


def test_each_release_has_its_section_and_goldens_and_what_is_new_has_a_section_above() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["Unreleased", *reversed([one.version for one in releases()])]
    for one in releases():
        assert changelog(ROOT, one.version).startswith(f"## [{one.version}] - {one.date.isoformat()}\n")
        assert (ROOT / GOLDENS / one.version / "bodies.json").is_file()


class Clone:
    """A repository whose one commit is the present tree, and which knows the released commits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("clone", "-q", str(ROOT), str(folder), at=folder.parent)
        for name in self.git("ls-files", "-z", "--cached", "--others", "--exclude-standard", at=ROOT).split("\0"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.commit("The tree as it is")

    def git(self, *words: str, at: Path | None = None) -> str:
        folder, environment = at or self.folder, os.environ | IDENTITY
        command = ["git", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def change(self, name: str, old: str, new: str) -> None:
        path = self.folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def release(self, *words: str) -> tuple[int, str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= IDENTITY | {"PYTHON": sys.executable}
        command = [str(self.folder / "scripts" / "release"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


@pytest.mark.extended
def test_what_is_missing_is_said_step_by_step_and_then_it_is_released(clone: Clone) -> None:
    """Nothing is changed before all is ready."""

    def refused(words: str) -> None:
        code, said = clone.release("9.1.0")
        assert (code, words in said) == (1, True), said
        assert "v9.1.0" not in clone.git("tag")
        assert "9.1.0" not in (clone.folder / TABLE).read_text()

    (clone.folder / "notes.txt").write_text("not committed")
    refused("the tree has changes that are not committed: ?? notes.txt")
    (clone.folder / "notes.txt").unlink()
    refused(f"pyproject.toml says {VERSION}, wanted 9.1.0")
    clone.change("pyproject.toml", f'version = "{VERSION}"', 'version = "9.1.0"')
    clone.commit("Set the version in one place")
    refused("trinity_mq/release.py does not say 9.1.0")
    clone.change("trinity_mq/release.py", f'"{VERSION}"', '"9.1.0"')
    clone.commit("Set the version")
    refused("CHANGELOG.md has no section [9.1.0]")
    clone.change("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n## [9.1.0] - 2001-01-01\n")
    clone.commit("Give the changes their section")
    refused(f"wanted the date of today, {TODAY}")
    clone.change("CHANGELOG.md", "2001-01-01", TODAY)
    commit = clone.commit("Date it")

    code, said = clone.release("9.1.0")
    assert code == 0, said
    assert clone.git("rev-parse", "v9.1.0^{commit}") == commit
    assert clone.git("show", "-s", "--format=%s", "HEAD") == "Record release 9.1.0"
    last = releases(clone.folder)[-1]
    assert (last.version, last.commit, last.date.isoformat(), last.reads, last.writes) == (
        *("9.1.0", commit, TODAY),
        *(releases()[-1].reads, releases()[-1].writes),
    )
    assert last.formats == releases()[-1].formats
    kept = clone.folder / GOLDENS / "9.1.0"
    assert {path.name for path in kept.iterdir()} == {"bodies.json", "run", "run.json"}
    assert clone.git("status", "--porcelain") == ""
    code, said = clone.release("9.1.0")
    assert (code, "9.1.0 does not come after 9.1.0" in said) == (1, True)

    clone.git("tag", "-d", "v9.1.0")
    code, said = clone.release("--check")
    assert (code, "9.1.0: tag v9.1.0 is missing (scripts/release --tags)" in said) == (1, True)
    lost = [one for one in releases(clone.folder) if not has_commit(clone.folder, one.commit)]
    assert all(f"{one.version}: commit {one.commit} is not in this clone" in said for one in lost)
    if not lost:
        assert clone.release("--tags") == (0, "made: v0.1.0\nmade: v9.1.0\n")
        assert clone.git("rev-parse", "v9.1.0^{commit}") == commit
        assert clone.release("--check")[0] == 0


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

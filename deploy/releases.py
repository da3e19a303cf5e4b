"""The releases of ``deploy/releases.toml``: builds them from their commits, checks them, makes the next one.

``scripts/release`` is its command line; ``tests/upgrade`` runs earlier releases with it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = "deploy/releases.toml"
GOLDENS = "tests/golden/releases"
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(?:a|b|rc)\d+)?")
PROBE = """
import json
from trinity_agents.explorer import state as explorer
from trinity_agents.trainer import history
from trinity_mq.messages import OWN
from trinity_mq.sync.channels.checkpoint import files as weights
from trinity_mq.telemetry import sample_log
from trinity_mq.training.checkpoints import checkpoint
formats = {"explorer": explorer.NEWEST_FORMAT, "checkpoint": checkpoint.NEWEST_FORMAT, "history": history.NEWEST_FORMAT,
           "samples": int(sample_log.FORMAT), "weights": weights.FORMAT}
print(json.dumps({"version": OWN.release, "reads": OWN.reads, "writes": OWN.writes, "formats": formats}))
"""
"""Prints what a release says of itself."""


class ReleaseError(Exception):
    """Something is not as a release wants it; one line for a person."""


@dataclass(frozen=True)
class Release:
    """A row of the table."""

    version: str
    date: date
    commit: str
    reads: tuple[int, int]
    writes: int
    formats: dict[str, int]

    @property
    def tag(self) -> str:
        """Name of its tag."""
        return f"v{self.version}"

    @property
    def order(self) -> tuple[int, ...]:
        """Its place among others."""
        return _order(self.version)

    def row(self) -> str:
        """Return it as the table has it."""
        formats = ", ".join(f"{name} = {number}" for name, number in self.formats.items())
        return (
            f'\n[[release]]\nversion = "{self.version}"\ndate = {self.date.isoformat()}\ncommit = "{self.commit}"\n'
            f"reads = {list(self.reads)}\nwrites = {self.writes}\nformats = {{ {formats} }}\n"
        )


def _order(version: str) -> tuple[int, ...]:
    match = VERSION.fullmatch(version)
    if match is None:
        raise ReleaseError(f"{version!r} is no version to release, such as 0.2.0 or 1.0.0rc1 (no .dev)")
    pre = re.search(r"(a|b|rc)(\d+)$", version)
    stage = (3, 0) if pre is None else (("a", "b", "rc").index(pre[1]), int(pre[2]))
    return (*(int(one) for one in match.groups()), *stage)


def releases(root: Path = ROOT) -> list[Release]:
    """Return the rows of the table, oldest first."""
    rows = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))["release"]
    return [Release(**{**row, "reads": tuple(row["reads"])}) for row in rows]


def git(root: Path, *words: str) -> str:
    """Run git and return its output.

    Raises:
        ReleaseError: It fails.
    """
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def has_commit(root: Path, commit: str) -> bool:
    """Return whether a commit is in this clone, which a shallow one may lack."""
    words = ["git", "-C", str(root), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def build(root: Path, commit: str, folder: Path) -> Path:
    """Build the wheel of a commit, and an environment with it; return its Python.

    The environment has the packages of the running one beside it, which takes seconds where an installation of torch
    takes minutes.

    Args:
        root: A clone that has the commit.
        commit: The commit.
        folder: Receives the sources (``source``), the wheel and the environment (``environment``).

    Raises:
        ReleaseError: Git or pip fails, or another package than the one that was built is imported.
    """
    source, environment = folder / "source", folder / "environment"
    archive = subprocess.run(["git", "-C", str(root), "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        raise ReleaseError(f"git archive {commit}: {archive.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(source, filter="data")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)])
    (wheel,) = folder.glob("trinity_mq-*.whl")
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    _run([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)])
    # folders of a .pth file come behind the environment's own, and .pth files in them count for nothing
    own = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    dependencies = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (own / "dependencies.pth").write_text("".join(f"{one}\n" for one in dependencies), encoding="utf-8")
    imported = _run(
        [str(python), "-I", "-c", "import trinity_mq, trinity_agents as a; print(trinity_mq.__file__, a.__file__)"]
    )
    if not all(Path(one).is_relative_to(own) for one in imported.split()):
        raise ReleaseError(f"the environment of {commit} imports {imported.strip()}, wanted what is in {own}")
    return python


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(words[:4])} ... ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def write_bodies(python: Path, golden: Path, target: Path, root: Path = ROOT) -> None:
    """Write each golden body in ``golden`` as the release of ``python`` writes it.

    Raises:
        ReleaseError: It cannot.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _run([str(python), "-I", str(root / "tests" / "golden" / "released.py"), "write", str(golden), str(target)])


def write_state(python: Path, target: Path, root: Path = ROOT) -> None:
    """Write a run's folder as the release of ``python`` writes it (``target/run``), and what it reads in that
    (``target/run.json``).

    Raises:
        ReleaseError: It cannot.
    """
    script = str(root / "tests" / "golden" / "released_state.py")
    run = target / "run"
    _run([str(python), "-I", script, "write", str(run)])
    with tempfile.TemporaryDirectory(prefix="tmq-release-") as name:
        copy = shutil.copytree(run, Path(name) / "run")  # reading saves it again
        _run([str(python), "-I", script, "read", str(copy), str(target / "run.json")])
    (run / "state" / "explorer.db-journal").unlink()


def changelog(root: Path, version: str) -> str:
    """Return the section of a version in the changelog, its heading first.

    Raises:
        ReleaseError: There is none, or nothing is in it.
    """
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n.*?(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no section [{version}]: move what is under [Unreleased] there")
    if not re.search(r"^- ", found[0], re.MULTILINE):
        raise ReleaseError(f"section [{version}] of CHANGELOG.md names no change")
    return found[0]


def check(root: Path = ROOT) -> list[str]:
    """Return what is wrong with the releases in the table, a line each."""
    wrong: list[str] = []
    found = releases(root)
    if [one.order for one in found] != sorted({one.order for one in found}):
        wrong.append(f"{TABLE}: the versions do not rise: {', '.join(one.version for one in found)}")
    for one in found:
        for name in ("bodies.json", "run", "run.json"):
            if not (root / GOLDENS / one.version / name).exists():
                wrong.append(f"{one.version}: {GOLDENS}/{one.version}/{name} is missing")
        try:
            heading = changelog(root, one.version).splitlines()[0]
        except ReleaseError as error:
            wrong.append(f"{one.version}: {error}")
        else:
            if heading != f"## [{one.version}] - {one.date.isoformat()}":
                wrong.append(f"{one.version}: CHANGELOG.md says {heading!r}, {TABLE} says {one.date.isoformat()}")
        if not has_commit(root, one.commit):
            wrong.append(f"{one.version}: commit {one.commit} is not in this clone (git fetch --unshallow)")
            continue
        tagged = git(root, "tag", "--list", one.tag, "--format=%(objectname) %(*objectname)").split()
        if not tagged:
            wrong.append(f"{one.version}: tag {one.tag} is missing (scripts/release --tags)")
        elif tagged[-1] != one.commit:
            wrong.append(f"{one.version}: tag {one.tag} is {tagged[-1]}, {TABLE} says {one.commit}")
    return wrong


def make_tags(root: Path = ROOT) -> list[str]:
    """Make the tags that are missing, and return their names.

    Raises:
        ReleaseError: Git fails.
    """
    made = []
    for one in releases(root):
        if not git(root, "tag", "--list", one.tag).strip():
            git(root, "tag", "-a", one.tag, one.commit, "-m", f"Release {one.version}")
            made.append(one.tag)
    return made


def make(version: str, root: Path = ROOT, today: date | None = None) -> Release:
    """Release the present commit: goldens of what it writes, a row in the table, a commit of both, and the tag.

    Raises:
        ReleaseError: Something is not ready; nothing was changed.
    """
    today = today or datetime.now(UTC).date()
    earlier, order = releases(root), _order(version)
    if dirty := git(root, "status", "--porcelain").strip():
        raise ReleaseError(f"the tree has changes that are not committed: {dirty.splitlines()[0].strip()}")
    if order <= earlier[-1].order:
        raise ReleaseError(f"{version} does not come after {earlier[-1].version}, the last release")
    stated = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if stated != version:
        raise ReleaseError(f"pyproject.toml says {stated}, wanted {version}; trinity_mq/release.py likewise")
    if f'VERSION = "{version}"\n' not in (root / "trinity_mq" / "release.py").read_text(encoding="utf-8"):
        raise ReleaseError(f"trinity_mq/release.py does not say {version}, which pyproject.toml does")
    heading = changelog(root, version).splitlines()[0]
    if heading != f"## [{version}] - {today.isoformat()}":
        raise ReleaseError(f"CHANGELOG.md says {heading!r}, wanted the date of today, {today.isoformat()}")
    commit = git(root, "rev-parse", "HEAD").strip()
    with tempfile.TemporaryDirectory(prefix="tmq-release-") as name:
        folder = Path(name)
        python = build(root, commit, folder)
        said = json.loads(_run([str(python), "-I", "-c", PROBE]))
        assert said.pop("version") == version
        _run([str(python), "-I", "-m", "trinity_mq.cli.main", "schema", "--check", "--out", str(root / "schemas")])
        write_bodies(python, folder / "source" / "schemas" / "golden", root / GOLDENS / version / "bodies.json", root)
        write_state(python, root / GOLDENS / version, root)
    made = Release(version=version, date=today, commit=commit, **{**said, "reads": tuple(said["reads"])})
    with (root / TABLE).open("a", encoding="utf-8") as table:
        table.write(made.row())
    git(root, "add", TABLE, f"{GOLDENS}/{version}")
    git(root, "commit", "-q", "-m", f"Record release {version}")
    git(root, "tag", "-a", made.tag, commit, "-m", f"Release {version}")
    return made


def main(words: Sequence[str]) -> int:
    """Do what the command line says; 1 where something is wrong, 2 for wrong words."""
    if len(words) != 1 or words[0] in {"-h", "--help"}:
        print("usage: scripts/release VERSION | --check | --tags", file=sys.stderr)
        return 2
    try:
        if words[0] == "--check":
            wrong = check()
            print("\n".join(wrong or [f"{len(releases())} releases, each with commit, goldens, changelog and tag"]))
            return bool(wrong)
        if words[0] == "--tags":
            made = make_tags()
            print("\n".join(f"made: {tag}" for tag in made) or "none was missing")
            return 0
        release = make(words[0])
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{release.tag} is {release.commit}. Now `git push --follow-tags`, and set the next version, with .dev0")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

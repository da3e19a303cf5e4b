"""Messages and files that released versions wrote, as their wheels wrote them: this release reads all of them.

``tests/upgrade/test_messages.py`` holds the other direction.
"""

from __future__ import annotations

import base64
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest

from deploy.releases import GOLDENS, ROOT, Release, releases
from tests.golden.forms import batch_form, form
from tests.golden.released_state import read
from tests.golden.test_control import contains
from trinity_agents.explorer import state as explorer
from trinity_mq.experience import decode as decode_experiences
from trinity_mq.messages import decode_any, encode
from trinity_mq.messages.codec import CATALOGUE
from trinity_mq.messages.compatibility import OLDEST
from trinity_mq.release import FIRST


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
    beat = bodies(release.version)["control/beat.v1.minimal"]["holds"]
    assert beat.get("release", FIRST) == release.version, "another release wrote them"
    kinds = {name.removeprefix("control/").split(".")[0] for name in bodies(release.version) if "control/" in name}
    assert kinds <= {kind for kind, _ in CATALOGUE}, "a kind that was released cannot go"
    if release.version == releases()[-1].version:
        assert len(kinds) >= 27
    assert release.writes >= OLDEST, "it is not read any more: its goldens go with it, and docs/upgrading.md says so"

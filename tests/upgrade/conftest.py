"""The release before this one, built from its commit once a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.releases import ROOT, Release, build, has_commit, releases


@dataclass(frozen=True)
class Built:
    """A release in an environment of its own."""

    release: Release
    python: Path
    source: Path
    """Its tree."""

    @property
    def version(self) -> str:
        return self.release.version


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The last release of ``deploy/releases.toml``."""
    release = releases()[-1]
    if not has_commit(ROOT, release.commit):
        pytest.skip(
            f"release {release.version} is commit {release.commit}, which this clone does not have: it is a shallow "
            "one (git fetch --unshallow)"
        )
    folder = tmp_path_factory.mktemp("previous")
    return Built(release, build(ROOT, release.commit, folder), folder / "source")

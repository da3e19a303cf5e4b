"""Tests whether releases can work in one run: each release must read the message schema that the other writes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_mq.messages.base import SchemaRange
from trinity_mq.messages.codec import CATALOGUE
from trinity_mq.messages.telemetry import Heartbeat
from trinity_mq.release import VERSION

EXPERIENCES_VERSION = 1
"""Version of the experience bodies that ``trinity_mq.experience.codec`` writes."""
NEWEST = EXPERIENCES_VERSION + sum(version - 1 for _, version in CATALOGUE)
"""The message schema of this release. It rises by 1 with each new version of a message. A new field does not change it,
because readers ignore unknown fields."""
OLDEST = 1
"""The oldest message schema that this release reads. It rises when an upgrade function is removed."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The message schemas that a release reads and writes."""

    release: str
    reads: SchemaRange
    writes: int

    @classmethod
    def of(cls, beat: Heartbeat) -> Compatibility:
        """Return the compatibility that an agent's heartbeat reports."""
        return cls(beat.release, beat.reads, beat.writes)

    def fields(self, uptime: float) -> dict[str, Any]:
        """Return the heartbeat fields of this compatibility; ``uptime`` is the seconds since the agent's first
        heartbeat.
        """
        return {"release": self.release, "reads": self.reads, "writes": self.writes, "uptime": uptime}

    def fits(self, peer: Compatibility) -> bool:
        """Return whether each of the two releases reads the schema that the other writes."""
        return _within(self.writes, peer.reads) and _within(peer.writes, self.reads)

    def __str__(self) -> str:
        """Name the release and its schemas."""
        first, last = self.reads
        reads = f"{first}" if first == last else f"{first} to {last}"
        return f"release {self.release}, which reads message schema {reads} and writes {self.writes}"


OWN = Compatibility(VERSION, (OLDEST, NEWEST), NEWEST)
"""Compatibility of this release."""


def incompatibility_reason(ours: Compatibility, name: str, theirs: Compatibility) -> str:
    """Return a sentence that says why agent ``name`` of release ``theirs`` cannot work with an agent of release
    ``ours``, and which of the two to upgrade first.
    """
    which = f"upgrade {name}" if theirs.writes < ours.writes else "upgrade this one"
    return (
        f"this agent is of {ours}; {name} is of {theirs}. They cannot work in one run: {which} first, through a "
        "release that reads both schemas if a direct upgrade is not possible (docs/upgrading.md)"
    )


def mixture(beats: Iterable[Heartbeat]) -> dict[Compatibility, list[str]]:
    """Return the ids of agents grouped by their compatibility, sorted by release."""
    ids: defaultdict[Compatibility, list[str]] = defaultdict(list)
    for beat in beats:
        ids[Compatibility.of(beat)].append(beat.id)
    return {
        release: sorted(ids[release]) for release in sorted(ids, key=lambda release: (release.release, release.writes))
    }


def releases_line(mixed: Mapping[Compatibility, Sequence[str]]) -> str:
    """Return the agent ids of each release, in one line."""
    return "; ".join(f"{release.release}: {', '.join(names)}" for release, names in mixed.items())


def release_conflicts(mixed: Mapping[Compatibility, Sequence[str]]) -> list[str]:
    """Return a sentence for each pair of releases that cannot work in one run."""
    pairs = ((first, second) for first, second in itertools.combinations(mixed, 2) if not first.fits(second))
    return [
        f"{', '.join(mixed[first])}: {first}; {', '.join(mixed[second])}: {second}. They cannot work in one run: "
        f"upgrade {', '.join(mixed[min(first, second, key=lambda release: release.writes)])} first (docs/upgrading.md)"
        for first, second in pairs
    ]


def _within(number: int, bounds: SchemaRange) -> bool:
    return bounds[0] <= number <= bounds[1]

"""Version of this release. ``deploy/releases.toml`` lists the earlier releases, and ``scripts/release`` makes the
next.
"""

from __future__ import annotations

VERSION = "0.2.1.dev0"
"""Version of this release, as in ``pyproject.toml``."""
FIRST = "0.1.0"
"""Version of the first release. Its heartbeats do not contain a version."""

"""The release that this is. ``deploy/releases.toml`` has the earlier ones, and ``scripts/release`` makes the next."""

from __future__ import annotations

VERSION = "0.2.1.dev0"
"""As in ``pyproject.toml``."""
FIRST = "0.1.0"
"""The first release, whose heartbeats do not say theirs."""

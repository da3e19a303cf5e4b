"""The form of KEY=VALUE settings on a command line."""

from __future__ import annotations

import re

SETTING = re.compile(r"[A-Za-z_][\w.]*=")
"""Matches the key and the equals sign at the start of a KEY=VALUE argument."""

"""Modules with a new name: an import of the old name returns the new module and warns. docs/renamed.md lists the names.

The aliases stay until release 0.3.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED = {
    "trinity_mq.api": "trinity_mq.launch.api",
    "trinity_mq.cli.errors": "trinity_mq.errors",
    "trinity_mq.cli.interrupts": "trinity_mq.runtime.interrupts",
    "trinity_mq.cli.listening": "trinity_mq.runtime.http.listening",
    "trinity_mq.cli.output": "trinity_mq.terminal",
    "trinity_mq.cli.run_folder": "trinity_mq.targets.run_folder",
    "trinity_mq.cli.target": "trinity_mq.targets.target",
    "trinity_mq.config.migration": "trinity_mq.trinity_rft.migration",
    "trinity_mq.diagnosis": "trinity_mq.observability.diagnosis",
    "trinity_mq.models.engines": "trinity_mq.engines",
}
"""New names of modules by their old names. The modules of a package are renamed with it."""


def new_name(module: str) -> str | None:
    """Return the new name of a module, None if ``module`` is not an old name.

    >>> new_name("trinity_mq.models.engines.state"), new_name("trinity_mq.models")
    ('trinity_mq.engines.state', None)
    """
    for old, new in RENAMED.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old)
    return None


class RenamedFinder:
    """Finds modules by their old names. ``importlib.abc`` is not imported: it would double the time of ``--help``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the new module, None if ``fullname`` is not an old name."""
        name = new_name(fullname) if fullname.startswith("trinity_mq.") else None
        return None if name is None else ModuleSpec(fullname, _AliasLoader(fullname, name))  # type: ignore[arg-type]  # duck-typed


class _AliasLoader:
    """Returns the new module in place of the old one."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the new module."""
        warnings.warn(
            f"{self._old} is now {self._new}; the old name goes with release 0.3", DeprecationWarning, stacklevel=2
        )
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the new module, which the import system has replaced."""
        module.__spec__ = self._spec


def install() -> None:
    """Have the import system find modules by their old names, before the folders that an update may have left."""
    if not any(isinstance(finder, RenamedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedFinder())

"""The number of modules that only one other module imports does not grow: a small module belongs into its importer."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
RATCHET = 37
"""Maximum number of counted modules. Lower it when modules are merged."""
ROWS = {
    "trinity_agents.explorer.engine_hosting": "agent of a command",
    "trinity_mq.algorithms.estimators": "estimator",
    "trinity_mq.bus.rabbit.bus": "bus",
    "trinity_mq.config": "section of the settings, or its checks",
    "trinity_mq.data.files": "source of data",
    "trinity_mq.data.formatters": "formatter",
    "trinity_mq.data.selectors": "selector",
    "trinity_mq.data.sinks": "sink of data",
    "trinity_mq.data.synthetic": "source of data",
    "trinity_mq.families": "model family",
    "trinity_mq.gateway.protocols": "protocol",
    "trinity_mq.local_broker.container": "way to start a broker",
    "trinity_mq.observability.trackers": "tracker",
    "trinity_mq.operators": "operator",
    "trinity_mq.proof.chaos.targets": "target of faults",
    "trinity_mq.rewards.countdown": "reward",
    "trinity_mq.rewards.math.rewards": "rewards",
    "trinity_mq.rewards.reasoning_gym_scores": "rewards",
    "trinity_mq.sync.channels": "weight channel",
    "trinity_mq.workflows.builtin": "workflow",
    "trinity_mq.workflows.games": "game",
    "trinity_mq.workflows.sessions.program": "workflow",
}
"""Rows of tables: packages and modules that hold one entry of a table each, with the kind of the entry."""
CHILDREN = {
    "trinity_agents.runner.pool_child",
    "trinity_mq.runtime.processes.fork_server",
    "trinity_mq.training.memory.measure",
}
"""Entry points of child processes."""


def modules() -> dict[str, Path]:
    files = [path for folder in ("trinity_mq", "agents") for path in (ROOT / folder).rglob("*.py")]
    names = (str(path.relative_to(ROOT)).removeprefix("agents/")[:-3].replace("/", ".") for path in files)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, files, strict=True)}


def importers() -> dict[str, set[str]]:
    """Return the modules that import each module."""
    paths = modules()
    users: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [member for member in members if member in paths] or [node.module]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            for target in targets:
                if target in paths and target != name:
                    users[target].add(name)
    return users


def is_row(module: str) -> bool:
    return module in CHILDREN or any(module == row or module.startswith(f"{row}.") for row in ROWS)


def is_command_or_reexport(importer: str, path: Path) -> bool:
    """Return whether the importer is a command, or a package that re-exports public names."""
    return bool(re.match(r"trinity_mq\.cli\.|.*\.__main__$", importer)) or path.name == "__init__.py"


def test_few_modules_have_a_single_importer() -> None:
    paths = modules()
    counted = {
        module: importer
        for module, users in importers().items()
        if len(users) == 1 and paths[module].name != "__init__.py" and not is_row(module)
        for importer in users
        if not is_command_or_reexport(importer, paths[importer])
    }
    assert len(counted) <= RATCHET, f"{len(counted)} modules: {counted}"


def test_each_row_names_a_module_or_package() -> None:
    names = modules()
    assert (ROWS.keys() | CHILDREN) - names.keys() == set()

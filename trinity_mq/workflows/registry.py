"""Workflows by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trinity_mq.rewards.lookup import UnknownNameError, lookup

if TYPE_CHECKING:
    from trinity_mq.workflows.workflow import Workflow

WORKFLOWS: Mapping[str, str] = {
    "async_math_workflow": "trinity_mq.workflows.math:AsyncMathWorkflow",
    "async_simple_workflow": "trinity_mq.workflows.simple:AsyncSimpleWorkflow",
    "math_workflow": "trinity_mq.workflows.math:MathWorkflow",
    "simple_workflow": "trinity_mq.workflows.simple:SimpleWorkflow",
}
"""Built-in workflows. Installed packages add theirs under the entry-point group ``trinity_mq.workflows``."""

ENTRY_GROUP = "trinity_mq.workflows"


def load_workflow(name: str) -> type[Workflow]:
    """Return the workflow class that ``name`` means: a registered name, an entry point or a dotted path.

    Raises:
        UnknownNameError: There is none; the message lists near misses.
    """
    from trinity_mq.workflows.workflow import Workflow

    found = lookup("workflow", name, WORKFLOWS, ENTRY_GROUP)
    if not (inspect.isclass(found) and issubclass(found, Workflow)):
        raise UnknownNameError(f"workflow {name!r} is {found!r}, wanted a subclass of trinity_mq.workflows.Workflow")
    return found

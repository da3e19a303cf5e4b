"""Table of agent roles. To add a role, write ``trinity_agents/<role>/agent.py`` and a row here.

This module imports only the standard library, because the command line reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Role = Literal["explorer", "scheduler", "runner", "operator", "trainer", "engine", "gateway", "supervisor"]
"""The kinds of agents that send heartbeats and metrics."""
UNPLACED = 99
"""Position of a role that is listed last."""


class RoleRow(NamedTuple):
    """Facts about a role."""

    summary: str = ""
    """Work of an agent, for ``trinity-mq --help``. Empty: the role has no command of its own."""
    modes: tuple[str, ...] = ()
    """Modes whose ``trinity-mq run`` starts agents of the role."""
    number: str = ""
    """Setting with the number of agents that ``trinity-mq run`` starts. Empty: 1."""
    threads: str = ""
    """Setting with the CPU threads of an agent. Empty: 1."""
    env: str = ""
    """Setting with environment variables of the agents. If any are set, each agent starts as a new process, because
    some variables are read when libraries are loaded."""
    hears: tuple[Role, ...] | None = None
    """Roles whose heartbeats the role receives; None: all. If all agents received all heartbeats, N agents would cause
    N²/2 deliveries a second. Operators and trainers hear their own role, so that they can wait for the active agent of
    that role."""
    takes_work: bool = False
    """Whether its agents take messages that an agent of another run could take as well. Such an agent reads the id of
    its run from the run folder, if possible, before it hears an explorer."""
    told_of_end: bool = False
    """Whether its agents must receive the end of the run before the explorer ends."""
    allocates_much: bool = False
    """Whether its processes make so many objects that garbage collections have their own settings."""
    status: str = "AgentStatus"
    """Class of the status in its heartbeats, in ``trinity_mq.messages.status``."""
    phase: Literal["explore", "rollout", "operators", "train"] = "rollout"
    """Phase of the spans that it records for a batch. Spans for a weight version belong to the phase ``sync``."""
    flow: int = UNPLACED
    """Position in the flow of the data: in ``--help`` and on the page."""
    shown: int = UNPLACED
    """Position in ``status`` and in the display of a run."""


ALL_MODES = ("both", "train", "explore", "bench", "serve")
ROLES: Mapping[Role, RoleRow] = MappingProxyType(
    {
        "explorer": RoleRow(
            "schedules tasks, hosts rollout engines, evaluates",
            ("both", "explore", "bench", "serve"),
            threads="explorer.rollout_model.num_threads",
            allocates_much=True,
            status="ExplorerStatus",
            phase="explore",
            flow=0,
            shown=0,
        ),
        "trainer": RoleRow(
            "steps the optimizer",
            ALL_MODES,
            threads="trainer.num_threads",
            hears=("explorer", "operator", "engine", "trainer"),
            told_of_end=True,
            status="TrainerStatus",
            phase="train",
            flow=4,
            shown=5,
        ),
        "operator": RoleRow(
            "processes experiences",
            ("both", "explore", "serve"),
            number="operator.num_operators",
            hears=("explorer", "engine", "trainer", "operator"),
            takes_work=True,
            told_of_end=True,
            status="OperatorStatus",
            phase="operators",
            flow=3,
            shown=4,
        ),
        "runner": RoleRow(
            "runs the workflows of tasks",
            ("both", "explore", "bench", "serve"),
            number="runner.num_runners",
            env="runner.env",
            hears=("explorer", "scheduler", "engine", "trainer"),
            takes_work=True,
            told_of_end=True,
            allocates_much=True,
            status="RunnerStatus",
            flow=1,
            shown=3,
        ),
        "engine": RoleRow(hears=("explorer", "engine", "trainer"), status="EngineStatus", flow=2, shown=1),
        "gateway": RoleRow(
            "answers agents that know only a base URL",
            ("serve",),
            number="gateway.num_gateways",
            hears=("explorer", "engine", "trainer"),
            told_of_end=True,
            status="GatewayStatus",
            flow=5,
            shown=2,
        ),
        "scheduler": RoleRow(hears=("runner", "engine"), status="SchedulerStatus", phase="explore"),
        "supervisor": RoleRow(),
    }
)
"""The roles. ``trinity-mq run`` starts their agents, and a diagnosis blames silent agents, in this order. The explorer
comes first, because its silence includes its engines."""


def row_of(role: str) -> RoleRow:
    """Return the facts about a role; the defaults for an unknown role, which a newer release may have."""
    return ROLES.get(role, RoleRow())  # type: ignore[call-overload,no-any-return]


FLOW: list[str] = sorted(
    (role for role, row in ROLES.items() if row.flow < UNPLACED), key=lambda role: row_of(role).flow
)
"""Roles in the flow of the data."""
COMMAND_ROLES = [role for role in FLOW if row_of(role).summary]
"""Roles with a command ``trinity-mq ROLE``."""

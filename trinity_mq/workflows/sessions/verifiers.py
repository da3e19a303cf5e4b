"""Environments of `verifiers` as a workflow, in a Python of their own: their pins differ from ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field

from trinity_mq.gateway.local import LocalSession
from trinity_mq.workflows.sessions.children import Program, program_of
from trinity_mq.workflows.sessions.program import ProgramWorkflow, SessionArguments

CHILD = Path(__file__).with_name("verifiers_child.py")


class VerifiersArguments(SessionArguments):
    """Arguments of :class:`VerifiersWorkflow`."""

    python: str
    """The environment's Python, such as ``envs/math/bin/python``: verifiers, uv and the environment are installed
    beside it."""
    task: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """``module:function`` that makes a ``verifiers.v1.Task`` of a record; imported there."""
    harness: str = "null"
    """Id of the harness that runs the agent."""
    at_once: int = Field(default=8, ge=1)
    """Most rollouts at a time in each runner; harnesses are processes. Waiting counts towards ``explorer.max_timeout``.
    """
    max_turns: int | None = Field(default=None, ge=1)
    """Most turns of the model. None: as the environment says."""


class VerifiersWorkflow(ProgramWorkflow):
    """Runs a task of `verifiers`; its reward is the trace's. Failures of sandboxes, providers and harnesses are of
    these kinds, and tried again.
    """

    arguments_kind = VerifiersArguments

    def program(self) -> Program:
        """Return the child, which is kept: importing verifiers takes seconds."""
        given = self.arguments
        python = str(Path(given.python).expanduser().absolute())
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # harnesses are run by uv
        command = [python, str(CHILD), "--task", given.task, "--harness", given.harness]
        command += ["--at-once", str(given.at_once)]
        return program_of(command, {"PATH": path, **given.env}, given.cwd)

    @property
    def keeps(self) -> bool:
        return True

    def request(self, session: LocalSession) -> dict[str, Any]:
        """Return the request to the child."""
        return {**super().request(session), "max_turns": self.arguments.max_turns}

"""Environments of `verifiers` as a workflow, in a separate Python environment because their pinned packages differ from
ours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field

from trinity_mq.gateway.local import LocalSession
from trinity_mq.workflows.sessions.children import Program, make_program, missing_program
from trinity_mq.workflows.sessions.program import ProgramWorkflow, SessionArguments

CHILD = Path(__file__).with_name("verifiers_child.py")


class VerifiersArguments(SessionArguments):
    """Arguments of :class:`VerifiersWorkflow`."""

    python: str
    """The environment's Python, such as ``envs/math/bin/python``. Verifiers and the environment are installed there,
    and uv next to it.
    """
    task: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """``module:function`` that builds a ``verifiers.v1.Task`` from a record. It is imported in that Python."""
    harness: str = "null"
    """Id of the harness that runs the agent."""
    at_once: int = Field(default=8, ge=1)
    """Maximum concurrent rollouts in each runner, because harnesses are processes. Waiting counts towards
    ``explorer.max_timeout``.
    """
    max_turns: int | None = Field(default=None, ge=1)
    """Maximum turns of the model. None: the environment's default."""

    def missing(self) -> list[str]:
        reason = missing_program(str(Path(self.python).expanduser().absolute()), self.cwd)
        return [reason] if reason else []


class VerifiersWorkflow(ProgramWorkflow):
    """Runs a task of `verifiers`; the reward is the trace's reward. Failures of sandboxes, providers, tools and
    harnesses are not the task's fault, so the run is retried.
    """

    arguments_kind = VerifiersArguments

    def program(self) -> Program:
        """Return the child program. It is kept, because importing verifiers takes seconds."""
        arguments = self.arguments
        python = str(Path(arguments.python).expanduser().absolute())
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # harnesses are run by uv
        command = [python, str(CHILD), "--task", arguments.task, "--harness", arguments.harness]
        command += ["--at-once", str(arguments.at_once)]
        return make_program(command, {"PATH": path, **arguments.env}, arguments.cwd)

    @property
    def keeps(self) -> bool:
        return True

    def request(self, session: LocalSession) -> dict[str, Any]:
        """Return the request to the child."""
        return {**super().request(session), "max_turns": self.arguments.max_turns}

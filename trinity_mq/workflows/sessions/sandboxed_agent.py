"""An agent of another project as a workflow: it runs unchanged in a sandbox, and its work is judged afterwards.

In the sandbox of :mod:`trinity_mq.workflows.sessions.sandbox` the agent reaches only the gateway of its session.

The judge runs outside of the sandbox after all processes of the agent have ended, so that no command of the model can
change the reward.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from trinity_mq.experience import Experience
from trinity_mq.gateway.local import LocalSession
from trinity_mq.workflows.errors import SandboxFailed
from trinity_mq.workflows.sessions.children import Program, make_program, missing_program
from trinity_mq.workflows.sessions.program import ProgramWorkflow, RecordedArguments, environment_of
from trinity_mq.workflows.sessions.sandbox import PATH, WORK, Sandbox, missing_paths, read_text

__all__ = ["Judged", "Sandbox", "SandboxedAgentArguments", "SandboxedAgentWorkflow", "read_text"]


class SandboxedAgentArguments(RecordedArguments):
    """Arguments of :class:`SandboxedAgentWorkflow`."""

    command: list[str] = Field(min_length=1)
    """The agent and its first arguments. It is set only by the configuration, never by a task."""
    visible: list[str] = Field(default_factory=list)
    """Files and folders of the host that the agent may read, at the same paths, such as the folder where it is
    installed. ``/usr`` is always visible.
    """
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent. It gets none of the runner's variables."""
    seconds: float = Field(default=600.0, gt=0)
    """Time limit of the agent in seconds. At the limit the agent is killed, and its files are judged."""
    file_bytes: int = Field(default=1 << 28, gt=0)
    """Maximum size of each file that the agent writes."""

    def missing(self) -> list[str]:
        """Return a sentence for each program or file that this machine lacks. Paths in the sandbox's own folders are
        not checked.
        """
        reasons = missing_paths(self.visible)
        name = self.command[0]
        if "/" not in name or (name.startswith("/") and not name.startswith(f"{Path(WORK).parent}/")):
            reasons.append(missing_program(name, path=self.env.get("PATH", PATH)))
        return [reason for reason in reasons if reason]


class Judged(BaseModel):
    """Judgement of the work of an agent."""

    reward: float = Field(allow_inf_nan=False)
    metrics: dict[str, float] = Field(default_factory=dict)


class SandboxedAgentWorkflow(ProgramWorkflow):
    """Runs an agent in a sandbox with ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and
    ``ANTHROPIC_API_KEY`` set, and judges the files that it leaves. Subclasses define :meth:`judge`.
    """

    arguments_kind: ClassVar[type[RecordedArguments]] = SandboxedAgentArguments

    def prompt(self) -> str:
        """Return the text for the agent, which is the last argument of its command."""
        return str(self.task.task_desc or "")

    def files(self, session: LocalSession) -> Mapping[str, str]:
        """Return the first files of the agent: text by path, ``~/`` for its home. Default: none."""
        return {}

    def judge(self, work: Path) -> Judged:
        """Judge the files in the working directory of the agent. Read them with
        :func:`read_text`; run nothing of them outside of a sandbox.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method judge(work)")

    def program(self) -> Program:
        """Return the agent's command without the sandbox."""
        return make_program([*self.arguments.command, self.prompt()], self.arguments.env)

    async def run_async(self) -> list[Experience]:
        """Run the agent once; return the recorded answers with rewards.

        Raises:
            EngineLost: The engine did not answer the agent.
            SandboxFailed: The agent could not be started, or ended or was killed before the model answered it.
            RunFailedError: No answer could be rewarded.
        """
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="trinity-mq-agent-"))
        sandbox = Sandbox(folder, self.arguments.visible, file_bytes=self.arguments.file_bytes)
        try:
            return await self._recorded(lambda session: self._run(sandbox, session), sandbox.socket)
        finally:
            await asyncio.shield(sandbox.remove())

    async def _run(self, sandbox: Sandbox, session: LocalSession) -> dict[str, Any]:
        await asyncio.to_thread(sandbox.prepare, self.files(session))
        program, env = self.program(), {**environment_of(session), **self.arguments.env}
        ended = await sandbox.run(program.command, env, session.port, self.arguments.seconds)
        if not session.session.calls and not session.engine.is_lost:
            if ended.code is None:
                raise SandboxFailed(
                    f"{program.name} got no answer within {self.arguments.seconds:g} s: raise workflow_args.seconds, "
                    f"or use a faster engine: {ended.output}"
                )
            raise SandboxFailed(f"{program.name} ended with {ended.code} before it asked the model: {ended.output}")
        judged = await asyncio.to_thread(self.judge, sandbox.work)
        ending = {"agent_timed_out": float(ended.code is None), "agent_failed": float(bool(ended.code))}
        return {"reward": judged.reward, "metrics": ending | judged.metrics}

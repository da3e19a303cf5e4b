"""A program as a workflow: it is given a base URL and a task, asks the model as it likes, and prints a reward.

What is trained on is what the engine sampled for it, recorded below the URL; see
:mod:`trinity_mq.workflows.sessions.assembly`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from trinity_mq.config.modes.gateway import Merge
from trinity_mq.experience import Experience
from trinity_mq.gateway.local import LocalSession, local_session
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.errors import RunFailedError, SandboxFailed
from trinity_mq.workflows.sessions.assembly import session_experiences, session_metrics
from trinity_mq.workflows.sessions.children import Program, kept, program_of, run_once
from trinity_mq.workflows.workflow import Task, Workflow

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper


class SessionArguments(Arguments):
    """Arguments of all workflows that run a program."""

    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the program's environment, over those of the runner."""
    cwd: str | None = None
    """Folder in which it runs. None: the runner's."""
    merge: Merge = "prefix"
    """How its calls become experiences, as ``gateway.merge``."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """As ``gateway.turn_discount``."""


class ProgramArguments(SessionArguments):
    """Arguments of :class:`ProgramWorkflow`."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments. It comes from the configuration alone, never from a task."""
    keep: bool = False
    """The program answers many runs: see :mod:`trinity_mq.workflows.sessions.children`."""


class ProgramWorkflow(Workflow):
    """Runs a program with ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``
    set, and the task as JSON on its standard input; the last line of what it prints says ``{"reward": 1.0}``, and if it
    likes ``metrics``, and ``rewards`` of single answers: ``[{"call": 0, "reward": 0.5}]``.
    """

    is_async = True
    arguments_kind: ClassVar[type[SessionArguments]] = ProgramArguments

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments: Any = arguments_of(task, self.arguments_kind)

    def program(self) -> Program:
        """Return the program to run."""
        return program_of(self.arguments.command, self.arguments.env, self.arguments.cwd)

    @property
    def keeps(self) -> bool:
        """Whether it answers many runs."""
        return bool(self.arguments.keep)

    def request(self, session: LocalSession) -> dict[str, Any]:
        """Return what the program is told."""
        return {
            "task": self.task.raw_task,
            "base_url": session.base_url,
            "url": session.url,
            "key": session.key,
            "model": self.model.model_name,
        }

    async def run_async(self) -> list[Experience]:
        """Run the program once; return what it asked, rewarded.

        Raises:
            SandboxFailed: The program failed, or something that it needs.
            RunFailedError: It asked the model nothing, or gave no usable reward.
        """
        sampling = self.model.sampling
        async with local_session(
            self.model.model,
            self.model.clients,
            temperature=float(sampling.get("temperature", 1.0)),
            top_p=float(sampling.get("top_p", 1.0)),
            max_response_tokens=sampling.get("max_tokens"),
            not_ready_timeout=self.model.not_ready_timeout,
            request_timeout=self.model.request_timeout,
            merge=self.arguments.merge,
        ) as session:
            request, program = self.request(session), self.program()
            if self.keeps:
                said = await kept(program).ask(request)
            else:
                said = await run_once(program, request, _environment(session))
            return self._experiences(session, said, program)

    def _experiences(self, session: LocalSession, said: Mapping[str, Any], program: Program) -> list[Experience]:
        if (kind := said.get("kind")) is not None:
            raise SandboxFailed(str(said.get("error") or kind), kind=str(kind))
        calls = list(session.session.calls.values())
        reward = said.get("reward")
        rewards = {_call(one, session): one.get("reward") for one in said.get("rewards") or ()}
        for each in (reward, *rewards.values()):
            if each is not None and not (isinstance(each, int | float) and math.isfinite(each)):
                raise RunFailedError(f"{program.name} gave the reward {each!r:.80}, wanted a finite number")
        if reward is None and not rewards:
            why = said.get("error") or "it has no key reward"
            raise RunFailedError(f'{program.name} gave no reward: {why}; wanted such as {{"reward": 1.0}}')
        if not calls:
            raise RunFailedError(f"{program.name} has not asked the model: did it use the base URL that it was given?")
        found = session_experiences(
            calls,
            reward=reward,
            call_rewards={key: float(value) for key, value in rewards.items() if value is not None},
            merge=self.arguments.merge,
            turn_discount=self.arguments.turn_discount,
        )
        for step, experience in enumerate(found):
            experience.eid.run, experience.eid.step = self.run_id_base, step
        given = {str(name): float(value) for name, value in dict(said.get("metrics") or {}).items()}
        found[-1].metrics |= session_metrics(calls, len(found)) | given
        return found


def _call(one: Mapping[str, Any], session: LocalSession) -> tuple[str, int | None]:
    call = session.session.call_of(one.get("call", -1))
    if call is None:
        raise RunFailedError(f"the program rewarded call {one.get('call')!r}; it made {session.session.asked}")
    return call.call, one.get("choice")


def _environment(session: LocalSession) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": session.url,
        "ANTHROPIC_API_KEY": session.key,
    }

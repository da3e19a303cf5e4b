"""A program as a workflow: it receives a base URL and a task, calls the model as often as it likes, and prints a
reward.

The engine's answers below the URL are recorded and trained on; see :mod:`trinity_mq.workflows.sessions.assembly`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field, ValidationError

from trinity_mq.config.modes.gateway import Merge, SharedPrefix, Switches
from trinity_mq.experience import Experience
from trinity_mq.gateway.local import LocalSession, local_session
from trinity_mq.gateway.session import Session
from trinity_mq.models.errors import EngineLost
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.errors import KIND, RunFailedError, SandboxFailed
from trinity_mq.workflows.sessions.assembly import session_experiences, session_metrics
from trinity_mq.workflows.sessions.children import Program, kept, make_program, missing_program, run_once
from trinity_mq.workflows.workflow import Task, Workflow

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper


class RecordedArguments(Arguments):
    """Arguments of all workflows whose answers a session records."""

    merge: Merge = "renderer"
    """Rule that merges calls into experiences, as ``gateway.merge``."""
    switches: Switches = "agent"
    """Whether the program may switch thinking, as ``gateway.switches``. ``configured``: only ``rollout_args`` and
    ``model.chat_template_kwargs`` do."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn, as ``gateway.turn_discount``."""
    shared_prefix: SharedPrefix = "first"
    """Credit of answers that several branches share, as ``gateway.shared_prefix``."""


class SessionArguments(RecordedArguments):
    """Arguments of all workflows that run a program."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, which override the runner's variables. The program does not get the
    runner's ``TRINITY_MQ_*``, such as the broker's URL.
    """
    cwd: str | None = None
    """Working directory of the program. None: the runner's directory."""


class ProgramArguments(SessionArguments):
    """Arguments of :class:`ProgramWorkflow`."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments. It is set only by the configuration, never by a task."""
    keep: bool = False
    """One process of the program answers many runs: see :mod:`trinity_mq.workflows.sessions.children`."""

    def missing(self) -> list[str]:
        reason = missing_program(self.command[0], self.cwd, self.env.get("PATH"))
        return [reason] if reason else []


class CallReward(BaseModel):
    """Reward of one answer, or of a lineage."""

    call: str | int | None = None
    """Id of the call, or its number from 0. A negative number counts from the end."""
    lineage: str | int | None = None
    """Id or number of any call of the lineage that is rewarded, instead of ``call``."""
    choice: int | None = None
    """Index of the answer among several answers to the same request. None: all of them."""
    reward: float = Field(allow_inf_nan=False)


class ProgramResult(BaseModel):
    """The last line of a program's output, or an answer of a kept program. Other keys are ignored."""

    reward: float | None = Field(default=None, allow_inf_nan=False)
    rewards: list[CallReward] = Field(default_factory=list)
    metrics: dict[str, float] = Field(default_factory=dict)
    kind: str | None = Field(default=None, pattern=KIND.pattern)
    """Kind of a failure that is not the task's fault. None: no such failure."""
    error: str | None = None


class ProgramWorkflow(Workflow):
    """Runs a program with ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``
    set, and the task as JSON on its standard input. The last line of its output is ``{"reward": 1.0}``. It may also
    hold ``metrics``, and ``rewards`` of single answers or of lineages: ``[{"call": 0, "reward": 0.5}, {"lineage": 3,
    "reward": 1.0}]``.
    """

    is_async = True
    arguments_kind: ClassVar[type[RecordedArguments]] = ProgramArguments

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments: Any = arguments_of(task, self.arguments_kind)

    def program(self) -> Program:
        """Return the program to run."""
        return make_program(self.arguments.command, self.arguments.env, self.arguments.cwd)

    @property
    def keeps(self) -> bool:
        """Whether one process answers many runs."""
        return bool(self.arguments.keep)

    def request(self, session: LocalSession) -> dict[str, Any]:
        """Return the request to the program."""
        return {
            "task": self.task.raw_task,
            "base_url": session.base_url,
            "url": session.url,
            "key": session.key,
            "model": self.model.model_name,
        }

    async def run_async(self) -> list[Experience]:
        """Run the program once; return the recorded answers with rewards.

        Raises:
            EngineLost: The engine did not answer the program.
            SandboxFailed: The program failed, or one of its dependencies.
            RunFailedError: The program did not ask the model, or printed no usable reward.
        """
        program = self.program()

        async def ask(session: LocalSession) -> dict[str, Any]:
            request = self.request(session)
            if self.keeps:
                return await kept(program).ask(request)
            return await run_once(program, request, environment_of(session))

        return await self._recorded(ask)

    async def _recorded(
        self, ask: Callable[[LocalSession], Awaitable[Mapping[str, Any]]], socket: Path | None = None
    ) -> list[Experience]:
        """Open a session, run the program in it, and return the recorded answers with rewards.

        Args:
            ask: Runs the program; returns its result.
            socket: As in :func:`local_session`.
        """
        model, program = self.model, self.program()
        async with local_session(
            model.model,
            model.clients,
            sampling=model.sampling,
            headers=model.headers,
            not_ready_timeout=model.not_ready_timeout,
            request_timeout=model.request_timeout,
            merge=self.arguments.merge,
            socket=socket,
            switches=self.arguments.switches,
        ) as session:
            try:
                return self._experiences(session, await ask(session), program)
            except RunFailedError as error:
                if session.engine.is_lost:
                    raise EngineLost(f"{program.name} got no answer from its engine: {error}", model.model) from error
                raise

    def _experiences(self, session: LocalSession, answer: Mapping[str, Any], program: Program) -> list[Experience]:
        result, recorded = _result_of(program, answer), session.session
        calls = list(recorded.calls.values())
        if not calls:
            raise RunFailedError(f"{program.name} has not asked the model: did it use the base URL that it was given?")
        call_rewards, lineage_rewards = _rewards_by_call(program, result.rewards, recorded)
        experiences = session_experiences(
            calls,
            reward=result.reward,
            call_rewards=call_rewards,
            lineage_rewards=lineage_rewards,
            merge=self.arguments.merge,
            turn_discount=self.arguments.turn_discount,
            shared_prefix=self.arguments.shared_prefix,
        )
        if not experiences:
            raise RunFailedError(f"{program.name} rewarded no answer that its conversation continued")
        for step, experience in enumerate(experiences):
            experience.eid.run, experience.eid.step = self.run_id_base, step
        experiences[-1].metrics |= session_metrics(calls, len(experiences)) | result.metrics
        return experiences


def _result_of(program: Program, answer: Mapping[str, Any]) -> ProgramResult:
    """Return the result in the answer of a program.

    Raises:
        SandboxFailed: The program reports a failure that is not the task's fault.
        RunFailedError: A value is invalid, or the answer holds no reward.
    """
    try:
        result = ProgramResult.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunFailedError(f"{program.name} gave the {where} {first['input']!r:.80}: {first['msg']}") from error
    if result.kind is not None:
        raise SandboxFailed(result.error or result.kind, kind=result.kind)
    if result.reward is None and not result.rewards:
        why = result.error or "it has no key reward"
        raise RunFailedError(f'{program.name} gave no reward: {why}; wanted such as {{"reward": 1.0}}')
    return result


def _rewards_by_call(
    program: Program, rewards: Sequence[CallReward], session: Session
) -> tuple[dict[tuple[str, int | None], float], dict[str, float]]:
    """Return the rewards of answers by (call id, choice index), and the rewards of lineages by call id.

    Raises:
        RunFailedError: A reward names no call of the session, or not exactly one call or lineage.
    """
    call_rewards: dict[tuple[str, int | None], float] = {}
    lineage_rewards: dict[str, float] = {}
    for entry in rewards:
        names = [name for name in (entry.call, entry.lineage) if name is not None]
        if len(names) != 1 or (entry.lineage is not None and entry.choice is not None):
            raise RunFailedError(f"{program.name} gave a reward that names {names}, wanted one call or one lineage")
        if (call := session.call_of(names[0])) is None:
            raise RunFailedError(
                f"{program.name} rewarded call {names[0]!r}, which is none of its {len(session.calls)} calls"
            )
        if entry.call is None:
            lineage_rewards[call.call] = entry.reward
        else:
            call_rewards[call.call, entry.choice] = entry.reward
    return call_rewards, lineage_rewards


def environment_of(session: LocalSession) -> dict[str, str]:
    """Return the environment variables that tell a program where the model is."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": session.url,
        "ANTHROPIC_API_KEY": session.key,
    }

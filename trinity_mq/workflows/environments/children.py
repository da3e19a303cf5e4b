"""Text environments in processes with a Python of their own, so that their packages need not fit ours."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import structlog
from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.workflows.arguments import Arguments
from trinity_mq.workflows.environments.conversation import ConversationWorkflow, EpisodeConversation, read_action
from trinity_mq.workflows.environments.environment import EnvironmentFailedError
from trinity_mq.workflows.errors import RunFailedError
from trinity_mq.workflows.sessions.children import PersistentProgram, Program, kept, make_program, missing_program
from trinity_mq.workflows.workflow import TaskError

log = structlog.get_logger(__name__)

CHILD = Path(__file__).with_name("text_child.py")
CLOSE_SECONDS = 10.0
"""Seconds that an environment has to close before its process is killed."""
CHECK_SECONDS = 30.0
"""Time limit in seconds of the check for missing packages."""

_KEYS = itertools.count()


class BusyProcesses:
    """Numbers of the processes of a program that runs use."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def take(self, at_once: int) -> int:
        """Wait until fewer than ``at_once`` processes are in use; return the lowest free number. Runs are served in the
        order of their calls: otherwise runs with a higher limit could keep a run with a lower limit waiting for ever.
        """
        async with self._turn:
            while len(self._numbers) >= at_once:
                self._changed.clear()
                await self._changed.wait()
            number = next(number for number in itertools.count() if number not in self._numbers)
            self._numbers.add(number)
            return number

    def release(self, number: int) -> None:
        """Let another run use a process."""
        self._numbers.remove(number)
        self._changed.set()


_BUSY: weakref.WeakKeyDictionary[PersistentProgram, BusyProcesses] = weakref.WeakKeyDictionary()
"""The processes in use, by the process with number 0 of the same program."""


class ChildArguments(Arguments):
    """Arguments of all environments in a process of their own. A record cannot set them."""

    python: str = ""
    """Path of the Python that has the environment's packages, such as ``envs/scienceworld/bin/python``. Empty: the
    runner's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the process. Of the runner's variables it gets only ``DOCKER_HOST``, ``HOME``,
    ``JAVA_HOME``, ``LANG``, ``LC_*``, ``LD_LIBRARY_PATH``, ``PATH``, ``PYTHON*``, ``TMPDIR`` and ``TZ``, so that it
    sees no keys.
    """
    at_once: int = Field(default=8, ge=1)
    """Maximum environments of the program at a time in each runner, of all tasks together. Waiting counts towards
    ``explorer.max_timeout``.
    """
    step_seconds: float = Field(default=300.0, gt=0)
    """Time limit in seconds of one action, and of making an environment. After this time the environment's process is
    killed.
    """

    world: ClassVar[str] = ""
    """Name of the kind of environment in ``text_child.py``."""
    is_shared: ClassVar[bool] = False
    """Whether all environments of a runner are in one process, because of the size of their data, or because they use
    one container of Docker. False: each has its own process, so that the failure of an environment fails no other run.
    """

    def program(self) -> Program:
        """Return the program of the process."""
        python = str(Path(self.python).expanduser().absolute()) if self.python else sys.executable
        return make_program([python, str(CHILD), self.world], self.env, is_isolated=True)

    def missing(self) -> list[str]:
        program = self.program()
        if reason := missing_program(program.command[0]):
            return [reason]
        try:
            checked = subprocess.run(
                [*program.command, "--check"],
                env=program.environment,
                capture_output=True,
                timeout=CHECK_SECONDS,
                check=True,
                text=True,
            )
            return [str(reason) for reason in json.loads(checked.stdout)]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            return [f"{program.name} --check failed: {error}"]


class ChildEnvironment:
    """The environment of one run.

    Args:
        arguments: The arguments, with the kind of environment.
        process: The process that holds the environment.
    """

    def __init__(self, arguments: ChildArguments, process: PersistentProgram) -> None:
        self._arguments, self._process = arguments, process
        self._key = str(next(_KEYS))
        self.first: Mapping[str, Any] = {}
        """The first state: ``observation``, and facts about the episode."""

    async def open(self, args: Mapping[str, Any]) -> None:
        """Make the environment. An earlier environment of this run is closed first.

        Raises:
            TaskError: ``args`` do not describe an environment.
            EnvironmentFailedError: The environment could not be made.
            SandboxFailed: The process could not be started, for example because a package is missing.
        """
        self.first = await self._ask({"do": "open", "args": dict(args)})

    async def step(self, action: str) -> dict[str, Any]:
        """Execute an action; return the state after it: ``observation``, ``reward``, ``done``, and further facts.

        Raises:
            EnvironmentFailedError: The environment raised an error, or did not answer within ``step_seconds``.
        """
        return await self._ask({"do": "step", "action": action})

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        world = self._arguments.world
        try:
            async with asyncio.timeout(self._arguments.step_seconds):
                answer = await self._process.ask({**request, "key": self._key})
        except TimeoutError as error:
            await self._process.close(seconds=0.0)
            raise EnvironmentFailedError(
                f"{world} has not answered {request['do']!r} within workflow_args.step_seconds "
                f"({self._arguments.step_seconds:g} s); its process was ended"
            ) from error
        if answer.get("kind") == "task":
            raise TaskError(f"{world}: {answer['error']}")
        if "error" in answer:
            raise EnvironmentFailedError(f"{world} failed in {request['do']}: {answer['error']}")
        return answer

    async def close(self) -> None:
        """Close the environment. An error is only logged, because the episode has already been played."""
        if not self._process.runs:
            return
        is_kept = self._arguments.is_shared
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                answer = await self._process.ask({"do": "close", "key": self._key})
            is_kept, reason = True, answer.get("error")
        except TimeoutError:
            reason = f"no answer within {CLOSE_SECONDS:g} s"
        except RunFailedError as error:
            reason = str(error)
        finally:
            if not is_kept:  # also if the run is cancelled once more: the next run must not wait for this environment
                await self._process.close(seconds=0.0)
        if reason:
            log.warning("environment_not_closed", env=self._arguments.world, reason=reason)


class ChildWorkflow(ConversationWorkflow):
    """One episode in an environment of another process."""

    arguments_kind: ClassVar[type[ChildArguments]]

    async def run_async(self) -> list[Experience]:
        """Play one episode.

        Raises:
            TaskError: The record describes no episode.
            EnvironmentFailedError: The environment failed.
            SandboxFailed: The environment's process failed.
        """
        arguments: ChildArguments = self.arguments
        first, program = self._first(), arguments.program()
        busy = _BUSY.setdefault(kept(program), BusyProcesses())
        number = await busy.take(arguments.at_once)
        environment = ChildEnvironment(arguments, kept(program, 0 if arguments.is_shared else number))
        try:
            await environment.open(first)
            return await self._play(environment)
        finally:
            try:
                await environment.close()
            finally:
                busy.release(number)

    @abstractmethod
    def _first(self) -> Mapping[str, Any]:
        """Return the arguments with which the process makes the environment."""

    @abstractmethod
    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        """Play the episode; return its experiences."""

    async def _states(
        self, environment: ChildEnvironment, conversation: EpisodeConversation, text: str, show: Callable[[str], str]
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Let the model act until the environment is done, or until a limit; yield the state after each answer.

        Args:
            environment: The environment.
            conversation: The conversation.
            text: First message of the user.
            show: Returns the message of the user for an observation.
        """
        for _ in range(self.arguments.max_env_steps):
            answer = await conversation.ask(text)
            if answer is None:
                return
            state = await self._act(environment, answer)
            yield state
            if state["done"]:
                return
            text = show(state["observation"])

    async def _act(self, environment: ChildEnvironment, answer: str) -> Mapping[str, Any]:
        """Execute the action of an answer; return the state after it."""
        return await environment.step(read_action(answer))


class GameFileArguments(ChildArguments):
    """Arguments of environments whose records choose a game file."""

    games: str = "games"
    """Folder of the games. A record names a game by its path in this folder; other files of the machine are refused,
    because a game is a program. A record cannot set the folder.
    """

    def missing(self) -> list[str]:
        folder = self.folder()
        if Path(folder).is_dir():
            return super().missing()
        return [
            *super().missing(),
            f"there is no folder {folder!r}; create it with the games, or set workflow_args.games to their folder",
        ]

    def folder(self) -> str:
        """Return the absolute path of the folder."""
        return str(Path(self.games).expanduser().absolute())


class GameFileWorkflow(ChildWorkflow):
    """One episode in the game that a record names."""

    def _first(self) -> Mapping[str, Any]:
        """Return the game and its folder.

        Raises:
            TaskError: The record names no game.
        """
        game = self.task.task_desc or self.task.raw_task.get("game_file")
        if not isinstance(game, str) or not game:
            raise TaskError(
                f"the record's {self.task.format_args.prompt_key!r} is {game!r:.80}, wanted the path of a game in "
                "workflow_args.games; name its key with format.prompt_key"
            )
        return {"game": game, "games": self.arguments.folder()}

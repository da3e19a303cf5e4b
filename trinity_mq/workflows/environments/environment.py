"""One environment of one run: created at first use, closed once. Its errors are reported with its name."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trinity_mq.runtime.plugins import UnknownNameError, resolve
from trinity_mq.workflows.errors import SandboxFailed
from trinity_mq.workflows.workflow import TaskError

EXTRA = "gymnasium is not installed: pip install 'trinity-mq[gymnasium]'"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
"""Pattern of the dotted path of a callable. The id of an environment has a colon, or no dot outside its version."""


class EnvironmentFailedError(SandboxFailed):
    """An environment raised an error or returned an invalid value. The message names the environment."""

    default_kind = "environment"


@dataclass(frozen=True, slots=True)
class Transition:
    """Result of one step of an environment."""

    observation: Any
    reward: float
    over: bool
    """Whether the environment has ended the episode, by itself or at its step limit."""
    info: Mapping[str, Any]


class Environment:
    """An environment for use by one thread at a time; any thread may close it.

    If it is closed during a call, as when a run is cancelled, the calling thread closes it as soon as the call returns.

    Args:
        name: The id of a registered environment, or the dotted path of a callable that creates an environment.
        args: Keyword arguments of the environment.
    """

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self.name = name
        self._args = args
        self._lock = threading.Lock()
        self._made: Any = None
        self._busy = self._closing = False

    @property
    def action_space(self) -> Any:
        """The environment's action space; available after :meth:`reset`."""
        return self._made.action_space

    @property
    def observation_space(self) -> Any:
        """The environment's observation space; available after :meth:`reset`."""
        return self._made.observation_space

    def reset(self, seed: int) -> tuple[Any, Mapping[str, Any]]:
        """Create the environment if it does not exist, and return the first observation and its info. Blocks.

        Args:
            seed: Seed of the episode.

        Raises:
            TaskError: The environment does not exist or does not take its arguments.
            EnvironmentFailedError: The environment raised another error.
        """
        with self._in_use():
            if self._made is None:
                self._made = _make(self.name, self._args)
            with self._wrapped_errors("reset"):
                observation, info = self._made.reset(seed=seed)
                return observation, dict(info)

    def step(self, action: Any) -> Transition:
        """Execute an action and return the resulting transition. Blocks.

        Raises:
            EnvironmentFailedError: The environment raised an error, or its reward is not a number.
        """
        with self._in_use(), self._wrapped_errors("step"):
            observation, reward, terminated, truncated, info = self._made.step(action)
            return Transition(observation, float(reward), bool(terminated or truncated), dict(info))

    def close(self) -> None:
        """Close the environment once. During a call, it is closed when the call returns. Blocks.

        Raises:
            EnvironmentFailedError: The environment raised an error.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._busy:
                return
        self._close()

    def _close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            with self._wrapped_errors("close"):
                made.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Mark the environment as in use, so that a close during a call takes effect at the end of the call."""
        with self._lock:
            if self._closing:
                raise EnvironmentFailedError(f"environment {self.name!r} is closed already")
            self._busy = True
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                is_last = self._closing
            if is_last:
                self._close()

    @contextmanager
    def _wrapped_errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an environment may raise any error
            raise EnvironmentFailedError(
                f"environment {self.name!r} failed in {method}(): {type(error).__name__}: {error}"
            ) from error


def _make(name: str, args: Mapping[str, Any]) -> Any:
    """Return a new environment.

    Raises:
        TaskError: Gymnasium is not installed, the environment does not exist or does not take the arguments, or the
            result is not a ``gymnasium.Env``.
        EnvironmentFailedError: The constructor raised another error.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise TaskError(f"environment {name!r}: {EXTRA}") from error
    try:
        if _DOTTED.fullmatch(name):
            made = resolve("environment", name)(**args)
        else:  # Gymnasium's checker only warns at the first step, and the same errors are found here anyway
            made = gymnasium.make(name, **{"disable_env_checker": True, **args})
    except UnknownNameError as error:
        raise TaskError(str(error)) from error
    except (ImportError, TypeError, gymnasium.error.Error) as error:
        raise TaskError(
            f"environment {name!r} cannot be made with env_args {dict(args)!r:.200}: {type(error).__name__}: {error}; "
            "wanted the id of a registered environment ('module:Id-v0' imports the module that registers it), or the "
            "dotted path of a callable that takes env_args"
        ) from error
    except Exception as error:  # an environment may raise any error
        raise EnvironmentFailedError(
            f"environment {name!r} failed while it was made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, gymnasium.Env):
        raise TaskError(f"environment {name!r} made a {type(made).__name__}, wanted a gymnasium.Env")
    return made

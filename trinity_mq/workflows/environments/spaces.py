"""Observations and actions of Gymnasium's spaces as text. Nothing that a model wrote is evaluated."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.workflows.workflow import TaskError

OPENING, CLOSING = "<action>", "</action>"
MOST_SHOWN = 100
"""Characters of an answer, or of a set of characters, that a comment repeats."""
MOST_NAMED = 50
"""Actions that are named one by one."""
_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)


class IllegalActionError(ValueError):
    """An answer is no action of the space; the message says so to the model."""


class Actions(ABC):
    """The conversion of an answer into an action."""

    @property
    @abstractmethod
    def form(self) -> str:
        """Description of an action, for the model."""

    @property
    @abstractmethod
    def example(self) -> str:
        """An action as it is written."""

    @abstractmethod
    def parse(self, text: str) -> Any:
        """Return the action that ``text`` is.

        Raises:
            IllegalActionError: It is none.
        """

    def read(self, answer: str) -> Any:
        """Return the action of an answer: what the last ``<action></action>`` holds, else all of it.

        Raises:
            IllegalActionError: That is none.
        """
        end = answer.rfind(CLOSING)
        start = answer.rfind(OPENING, 0, max(end, 0))
        return self.parse((answer[start + len(OPENING) : end] if start >= 0 else answer).strip())


class TextActions(Actions):
    """Actions that are texts.

    Args:
        space: A ``gymnasium.spaces.Text``.
    """

    example = "..."

    def __init__(self, space: Any) -> None:
        self._space = space

    @property
    def form(self) -> str:
        characters = self._space.characters
        shown = characters if len(characters) <= MOST_SHOWN else f"{characters[:MOST_SHOWN]}..."
        return f"An action is a text of {self._space.min_length} to {self._space.max_length} characters out of {shown}"

    def parse(self, text: str) -> str:
        if not self._space.contains(text):
            raise IllegalActionError(f"{text[:MOST_SHOWN]!r} is no action. {self.form}.")
        return text


class DiscreteActions(Actions):
    """Actions that are numbers, which may have names.

    Args:
        space: A ``gymnasium.spaces.Discrete``.
        names: A name for each action, in order; upper and lower case are the same. Empty: none.

    Raises:
        TaskError: There are more or fewer names than actions, or two are the same.
    """

    def __init__(self, space: Any, names: Sequence[str]) -> None:
        self._first, self._count = int(space.start), int(space.n)
        self._names = [name.strip() for name in names]
        if names and len(names) != self._count:
            raise TaskError(
                f"workflow_args.actions names {len(names)} actions ({', '.join(names)}), and the environment has "
                f"{self._count}; give a name to each, in order"
            )
        self._numbers = {name.casefold(): self._first + place for place, name in enumerate(self._names)}
        if len(self._numbers) != len(names):
            raise TaskError(
                f"workflow_args.actions has a name twice: {', '.join(names)}; case does not tell them apart"
            )

    @property
    def form(self) -> str:
        if self._names and self._count <= MOST_NAMED:
            return f"The actions are {', '.join(self._names)}"
        return f"The actions are the numbers from {self._first} to {self._first + self._count - 1}"

    @property
    def example(self) -> str:
        return self._names[0] if self._names else str(self._first)

    def parse(self, text: str) -> int:
        bare = text.strip(" \t\r\n.!`'\"")
        number = self._numbers.get(bare.casefold())
        if number is None and _NUMBER.fullmatch(bare):
            number = int(bare)
        if number is None or not self._first <= number < self._first + self._count:
            raise IllegalActionError(f"{text[:MOST_SHOWN]!r} is no action. {self.form}.")
        return number


def actions_of(space: Any, names: Sequence[str], environment: str) -> Actions:
    """Return how answers become actions of a space.

    Args:
        space: The action space of the environment.
        names: Names of discrete actions.
        environment: Its name, for errors.

    Raises:
        TaskError: The space is neither ``Text`` nor ``Discrete``, or the names do not fit it.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return DiscreteActions(space, names)
    if not isinstance(space, spaces.Text):
        raise TaskError(
            f"environment {environment!r} has actions {space}, wanted a gymnasium.spaces.Text or Discrete; put it into "
            "a gymnasium.ActionWrapper that reads them from text, and name a callable that returns that as env"
        )
    if names:
        raise TaskError(f"workflow_args.actions names {', '.join(names)}, and actions of {environment!r} are texts")
    return TextActions(space)


def check_observations(space: Any, environment: str) -> None:
    """Check that observations of a space have a form as text.

    Raises:
        TaskError: They have none.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            check_observations(part, environment)
    elif not isinstance(space, spaces.Text | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TaskError(
            f"environment {environment!r} has observations {space}, wanted Text, Discrete, MultiDiscrete, MultiBinary, "
            "or a Dict or Tuple of them; put it into a gymnasium.ObservationWrapper that writes them as text, and name "
            "a callable that returns that as env"
        )


def observation_text(observation: Any) -> str:
    """Return an observation as text: a text as it is, whole numbers with spaces between them, the parts of a tuple
    behind one another with commas, those of a map a line each, as ``name: value``.
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {observation_text(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(map(observation_text, observation))
    plain = observation.tolist() if hasattr(observation, "tolist") else observation  # arrays and numbers of NumPy
    if isinstance(plain, list):
        return " ".join(map(observation_text, plain))
    return str(int(plain))

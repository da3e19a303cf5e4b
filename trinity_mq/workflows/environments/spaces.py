"""Observations and actions of Gymnasium's spaces as text. Text written by a model is never evaluated."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.workflows.workflow import TaskError

OPENING, CLOSING = "<action>", "</action>"
MOST_SHOWN = 100
"""Maximum characters of an answer, or of a character set, that a comment repeats."""
MOST_NAMED = 50
"""Maximum number of actions that are listed by name."""
_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)


class IllegalActionError(ValueError):
    """An answer is not an action of the space. The message tells the model so."""


class ActionParser(ABC):
    """Converts an answer into an action."""

    @property
    @abstractmethod
    def form(self) -> str:
        """Description of an action, for the model."""

    @property
    @abstractmethod
    def example(self) -> str:
        """An example action in the written form."""

    @abstractmethod
    def parse(self, text: str) -> Any:
        """Return the action that ``text`` denotes.

        Raises:
            IllegalActionError: The text is not an action.
        """

    def read(self, answer: str) -> Any:
        """Return the action of an answer: the content of the last ``<action></action>``, else the whole answer.

        Raises:
            IllegalActionError: That text is not an action.
        """
        end = answer.rfind(CLOSING)
        start = answer.rfind(OPENING, 0, max(end, 0))
        return self.parse((answer[start + len(OPENING) : end] if start >= 0 else answer).strip())


class TextActions(ActionParser):
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


class DiscreteActions(ActionParser):
    """Actions that are numbers and may have names.

    Args:
        space: A ``gymnasium.spaces.Discrete``.
        names: A name for each action, in order, case-insensitive. Empty: actions have no names.

    Raises:
        TaskError: The number of names differs from the number of actions, or two names are equal.
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


def actions_of(space: Any, names: Sequence[str], environment: str) -> ActionParser:
    """Return the converter of answers into actions of a space.

    Args:
        space: The action space of the environment.
        names: Names of discrete actions.
        environment: Name of the environment, for errors.

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
    """Check that observations of a space can be written as text.

    Raises:
        TaskError: They cannot.
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
    """Return an observation as text. A text is unchanged. Whole numbers are separated by spaces, the items of a tuple
    by commas. A map has one line ``name: value`` for each item.
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

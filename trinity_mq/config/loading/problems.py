"""Explains the problems of settings: one line for each problem, with the line of the file that it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from trinity_mq.config.run import Config
from trinity_mq.config.trinity_names import trinity_key_advice
from trinity_mq.errors import suggest
from trinity_mq.telemetry.log import mask_passwords

Location = tuple[int | str, ...]
"""Keys and list positions that lead to a value, from the top of the settings."""
_KEY = re.compile(r"^[a-z_]+(?= is )|[a-z_]+(?:\.[a-z0-9_]+)+")
"""A key in the text of a problem: several parts with dots, or the subject of the sentence."""


class Problem(NamedTuple):
    """One reason why settings cannot be used."""

    location: Location
    """Key as the user wrote it. Empty: the problem is about several keys, which the text names."""
    text: str


class KeyLines:
    """The lines of the keys in a YAML file, counted from 1.

    Args:
        text: The content of the file.
        overridden: Keys that the command line sets, such as ``buffer.total_steps``: their lines are not the cause of a
            problem.
    """

    def __init__(self, text: str, overridden: Sequence[str] = ()) -> None:
        self._lines: dict[Location, int] = {}
        self._overridden = [_location(key) for key in overridden]
        try:
            self._add(yaml.compose(text, Loader=yaml.SafeLoader), ())
        except yaml.YAMLError:
            self._lines.clear()  # the problem of such a file is explained where it is read

    def _add(self, node: yaml.Node | None, location: Location) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    place = (*location, key.value)
                    self._lines.setdefault(place, key.start_mark.line + 1)
                    self._add(value, location if key.value == "<<" else place)
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self._lines.setdefault((*location, number), item.start_mark.line + 1)
                self._add(item, (*location, number))

    def of(self, problem: Problem, within: Location = ()) -> int | None:
        """Return the line of a problem: of its key, of the section that lacks the key, or of the first key that the
        text names.

        Args:
            problem: The problem.
            within: Location of the settings in the file, such as ``("stages", 1)``.
        """
        if problem.location:
            return self._line(problem.location, within)
        keys = map(_location, _KEY.findall(problem.text))
        return next((line for key in keys if (line := self._line(key, within, exact=True)) is not None), None)

    def _line(self, location: Location, within: Location, *, exact: bool = False) -> int | None:
        if any(location[: len(key)] == key for key in self._overridden):
            return None
        for place in ((*within, *location), location):
            for length in range(len(place), len(place) - 1 if exact else 0, -1):
                if line := self._lines.get(place[:length]):
                    return line
        return None


def _location(key: str) -> Location:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def collect_problems(settings: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, and all problems of the settings.

    If keys have problems, the settings without these keys are validated too, so that problems of other keys are
    reported at the same time. The configuration is then the configuration without these keys.
    None: a section cannot be built without them.
    """
    problems: list[Problem] = []
    wrong: list[Location] = []
    while True:
        config, candidates = _validate(_without(settings, wrong))
        keys = {".".join(map(str, location)) for location in wrong}
        texts = {problem.text for problem in problems}
        for problem in candidates:
            follows_from_wrong_key = problem.location in wrong or any(key in problem.text for key in keys)
            if problem.text not in texts and not follows_from_wrong_key:
                problems.append(problem)
        further = [problem.location for problem in candidates if problem.location and problem.location not in wrong]
        if not further:
            return config, problems
        wrong += further


def _validate(settings: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, if each section is valid, and the problems in and between sections."""
    between: list[str] = []
    try:
        config = Config.model_validate(settings, context={"problems": between})
    except ValidationError as error:
        return None, [problem for finding in error.errors() for problem in _explain(Config, finding)]
    return config, [Problem((), line) for text in between for line in text.split("\n")]


def _without(settings: Any, locations: Sequence[Location]) -> Any:
    """Return a copy of ``settings`` without the values at these locations. List items stay."""
    if isinstance(settings, Mapping):
        return {
            key: _without(value, [location[1:] for location in locations if location[0] == key and len(location) > 1])
            for key, value in settings.items()
            if (key,) not in locations
        }
    if isinstance(settings, list):
        return [
            _without(item, [location[1:] for location in locations if location[0] == number and len(location) > 1])
            for number, item in enumerate(settings)
        ]
    return settings


def _explain(model: type[BaseModel], finding: Any) -> Iterator[Problem]:
    location, names = _user_location(model, tuple(finding["loc"]))
    place = tuple(location)
    where = ".".join(map(str, location)) or "(top level)"
    message = str(finding["msg"]).removeprefix("Value error, ")
    if finding["type"] == "extra_forbidden":
        if (advice := trinity_key_advice(location)) is not None:
            yield Problem(place, f"{where}: a key of Trinity-RFT: {advice}")
        else:
            hint = suggest(str(location[-1]), sorted(names), "known here:", cutoff=0.5)
            yield Problem(place, f"{where}: unknown key; {hint}")
    elif finding["type"] in {"missing", "value_error"}:
        for line in message.split("\n"):
            yield Problem(place, f"{where}: {line}" if place else line)
    elif location[-1:] == ["api_key_env"]:
        yield Problem(
            place, f"{where}: wanted the name of an environment variable, such as JUDGE_API_KEY, not the key itself"
        )
    else:
        yield Problem(place, mask_passwords(f"{where}: {message}, got {finding['input']!r}"))


def _user_location(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[int | str], list[str]]:
    """Return a location as the user wrote it, and the keys known at the level of its last part.

    For a section with several kinds, pydantic inserts the kind into the location.
    """
    here, written, names = [model], [], []
    for part in location:
        if len(here) > 1 and isinstance(part, str):  # the kind, which the user did not write
            here = [section for section in here if _kind(section) == part] or here[-1:]
            continue
        written.append(part)
        if isinstance(part, str):
            fields = {name: field for section in here for name, field in section.model_fields.items()}
            names = list(fields)
            here = sections_of(fields[part].annotation) if part in fields else []
    return written, names


def _kind(section: type[BaseModel]) -> Any:
    """Return the name of one of several kinds of a section."""
    kinds = [field.default for name, field in section.model_fields.items() if name in {"kind", "selector_type"}]
    return kinds[0] if kinds else None


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections in a type, including sections in unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [model for member in inner for model in sections_of(member)]

"""Explains the problems of settings: a text of one line for each problem, and the line of the file that causes it."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
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
TEXT = "tag:yaml.org,2002:str"
"""YAML tag of texts."""
MERGE = "tag:yaml.org,2002:merge"
"""YAML tag of ``<<``, which may occur several times in a mapping, since each occurrence has an effect."""
_KEY = re.compile(r"^[a-z_]+(?= is )|[a-z_]+(?:\.[a-z0-9_]+)+")
"""A key in the text of a problem: several parts with dots, or the subject of the sentence."""


class Problem(NamedTuple):
    """One reason why settings cannot be used."""

    location: Location
    """Key as the user wrote it. Empty: the problem is about several keys, which the text names."""
    text: str
    similar: Sequence[str] = ()
    """Known keys that an unknown key is similar to. The user may have meant one of them."""

    def may_cause(self, location: Location, text: str) -> bool:
        """Return whether another problem may exist only because the key of this problem is left out.

        Args:
            location: Location of the other problem.
            text: Text of the other problem.
        """
        if not self.location or location != self.location[: len(location)]:
            return False
        path = [str(part) for part in self.location]
        is_algorithm = path[0] == "algorithm"  # its settings follow from one another
        is_around = len(location) + 1 < len(path)  # a section around the section of the key
        if location and (is_around or is_algorithm or location == self.location):
            return True
        words = [path[-1], *self.similar]
        if location:  # the text names keys of this section by their last part
            return _names(text, words)
        sections = [".".join(path[:length]) for length in range(2, len(path))]
        sections += ["algorithm"] * is_algorithm
        keys = [".".join([*path[:-1], word]) for word in words]
        return _names(text, [*sections, *keys, *(word for word in words if "_" in word)])


def keys_in(text: str) -> list[str]:
    """Return the dotted keys that the text of a problem names, in order."""
    return _KEY.findall(text)


def _names(text: str, words: Sequence[str]) -> bool:
    """Return whether a text contains a word, or a name that begins with a word and ``_``."""
    return any(re.search(rf"(?<![a-z0-9_]){re.escape(word)}(?![a-z0-9])", text) for word in words)


class KeyLines:
    """The lines of the keys in a YAML file, counted from 1.

    Args:
        text: The content of the file.
        overridden: Keys that the command line sets, such as ``buffer.total_steps``: their lines are not the cause of a
            problem.
    """

    def __init__(self, text: str, overridden: Sequence[str] = ()) -> None:
        self._overridden = [location_of(key) for key in overridden]
        try:
            self._root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            self._root = None  # the problem of such a file is explained where it is read
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self._children: dict[int, dict[str, tuple[yaml.Mark, yaml.Node]]] = {}
        """Start and value of each key of a mapping, by the id of the mapping's node."""

    def of(self, problem: Problem, within: Location = ()) -> int | None:
        """Return the line of a problem: of its key, of the section that lacks the key, or of the first key that the
        text names. None: the file sets none of them, or the command line sets the key.

        Args:
            problem: The problem.
            within: Location of the settings in the file, such as ``("stages", 1)``.
        """
        if problem.location:
            return self._line(problem.location, within)
        keys = map(location_of, keys_in(problem.text))
        return next((line for key in keys if (line := self._line(key, within, exact=True)) is not None), None)

    def _line(self, location: Location, within: Location, *, exact: bool = False) -> int | None:
        """Return the line of a location or, unless ``exact``, of the longest part of it that the file sets."""
        for length in range(len(location), len(location) - 1 if exact else 0, -1):
            for place in dict.fromkeys([(*within, *location[:length]), location[:length]]):
                if any(place[: len(key)] == key for key in self._overridden):
                    return None
                if line := self.line_of_key(place):
                    return line
        return None if exact else self.line_of_key(within)

    def line_of_key(self, place: Location) -> int | None:
        """Return the line of exactly this key; None if the file does not set it."""
        node, line = self._root, None
        for part in place:
            mark, node = self._child(node, part)
            if mark is None:
                return None
            line = bisect_left(self._line_ends, mark.index) + 1  # PyYAML counts other line ends too
        return line

    def _child(self, node: yaml.Node | None, part: int | str) -> tuple[yaml.Mark | None, yaml.Node | None]:
        """Return the start and the value of a mapping's key or a list's item; (None, None) if it is missing."""
        if isinstance(node, yaml.MappingNode):
            if id(node) not in self._children:
                pairs = reversed(list(_pairs(node)))
                self._children[id(node)] = {key.value: (key.start_mark, value) for key, value in pairs}
            return self._children[id(node)].get(str(part), (None, None))
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            return node.value[part].start_mark, node.value[part]
        return None, None


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield the keys of a mapping, then the keys that ``<<`` merges into it: the first of equal keys counts."""
    waiting, visited = [node], set()
    while waiting:
        mapping = waiting.pop(0)
        if id(mapping) in visited:
            continue
        visited.add(id(mapping))
        scalars = [(key, value) for key, value in mapping.value if isinstance(key, yaml.ScalarNode)]
        yield from ((key, value) for key, value in scalars if key.tag != MERGE)
        sources = [value for key, value in reversed(scalars) if key.tag == MERGE]
        lists = [source.value if isinstance(source, yaml.SequenceNode) else [source] for source in sources]
        waiting[:0] = [item for items in lists for item in items if isinstance(item, yaml.MappingNode)]


def location_of(key: str) -> Location:
    """Return the location of a dotted key, such as ``buffer.eval_tasksets.0.path``."""
    return tuple(int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", key))


def collect_problems(settings: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, and all problems of the settings.

    If keys have problems, the settings without these keys are validated too, so that problems of other keys are
    reported at the same time. The configuration is then the configuration without these keys.
    None: a section cannot be built without them.
    """
    config, problems = _validate(_without(settings, []))  # a copy, which validators may change
    wrong = [problem for problem in problems if problem.location]
    further = wrong
    while further:
        config, candidates = _validate(_without(settings, [problem.location for problem in wrong]))
        further = [
            candidate
            for candidate in candidates
            if candidate.location and all(candidate.location != problem.location for problem in wrong)
        ]
        texts = {problem.text for problem in problems}
        problems += [
            candidate
            for candidate in candidates
            if candidate.text not in texts
            and not any(problem.may_cause(candidate.location, candidate.text) for problem in wrong)
        ]
        wrong += further
    return config, problems


def _validate(settings: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, if each section is valid, and the problems in and between sections."""
    between: list[str] = []
    try:
        config = Config.model_validate(settings, context={"problems": between})
    except ValidationError as error:
        return None, [problem for finding in error.errors() for problem in _explain(Config, finding)]
    except OverflowError as error:
        return None, [Problem((), f"a number is too large: {error}")]
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
            word = str(location[-1])
            hint = suggest(word, sorted(names), "known here:", cutoff=0.5)
            yield Problem(place, f"{where}: unknown key; {hint}", difflib.get_close_matches(word, names, cutoff=0.5))
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
    here, written, names, is_entry = [model], [], [], False
    for part in location:
        if len(here) > 1 and isinstance(part, str):  # the kind, which the user did not write
            here = [section for section in here if _kind(section) == part] or here[-1:]
            continue
        written.append(part)
        if is_entry:  # the user's own name, in a section of named sections
            is_entry = False
        elif isinstance(part, str):
            fields = {name: field for section in here for name, field in section.model_fields.items()}
            names = list(fields)
            annotation = fields[part].annotation if part in fields else None
            here, is_entry = sections_of(annotation), get_origin(annotation) in {dict, Mapping}
    return written, names


def _kind(section: type[BaseModel]) -> Any:
    """Return the kind that a section class stands for, such as ``group``; None for a section of a single kind."""
    kinds = [field.default for name, field in section.model_fields.items() if name in {"kind", "selector_type"}]
    return kinds[0] if kinds else None


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections in a type, including sections in unions, lists and maps."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [model for member in inner for model in sections_of(member)]

"""Python functions as tools of a model: described to the model, and called with its output, which may be invalid."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from trinity_mq.errors import suggest
from trinity_mq.runtime.plugins import resolve
from trinity_mq.runtime.threads import in_thread, interrupt
from trinity_mq.workflows.errors import RunFailedError
from trinity_mq.workflows.workflow import TaskError

MAX_ARGUMENTS = 100_000
"""Maximum characters of one call's arguments that are parsed."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call, as the model reads it."""

    text: str
    ok: bool
    """False: the tool does not exist, rejected the arguments, or failed. The text gives the reason."""


def shortened(text: str, most: int) -> str:
    """Return ``text``, or the first ``most`` characters of a longer text with the number of the others."""
    over = len(text) - most
    return text if over <= 0 else f"{text[:most]}... ({over} characters more)"


class Toolbox:
    """Functions that a model may call.

    A function is described by its name, its docstring and the types of its parameters, optionally with ``Annotated[int,
    Field(description="...")]``. The model's arguments are checked against these types before the function receives
    them.

    Args:
        paths: Dotted paths of the functions.
        max_result: Maximum characters of a result shown to the model.

    Raises:
        UnknownNameError: A path cannot be imported.
        TaskError: A path does not name a function that can be described, or two functions have the same name.
    """

    def __init__(self, paths: Sequence[str], max_result: int = 4000) -> None:
        self._max_result = max_result
        self._tools: dict[str, _Tool] = {}
        for path in paths:
            tool = _Tool(path, resolve("tool", path))
            if tool.name in self._tools:
                raise TaskError(f"two tools are called {tool.name!r}; rename one of {', '.join(paths)}")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of the OpenAI API."""
        return [tool.schema for tool in self._tools.values()]

    def check_synchronous(self) -> None:
        """Raise TaskError if one of the tools is asynchronous."""
        for tool in self._tools.values():
            if tool.is_async:
                raise TaskError(f"tool {tool.name!r} is asynchronous; use async_tool_agent_workflow")

    def call(self, name: str, arguments: str) -> Result:
        """Call a tool. Its errors become the result that the model reads.

        Raises:
            RunFailedError: The tool reports that the run has failed, such as SandboxFailed if its sandbox is
                unreachable.
        """
        try:
            tool, call_arguments = self._parsed_call(name, arguments)
            return self._result(tool.call(call_arguments))
        except RunFailedError:
            raise
        except Exception as error:  # raised by the user's function, or about the call
            return _error_result(error)

    async def call_async(self, name: str, arguments: str, timeout: float | None = None) -> Result:
        """Call a tool, a synchronous tool in a thread; see :meth:`call`.

        Args:
            name: Name of the tool.
            arguments: A JSON object.
            timeout: Seconds after which the call is ended and its result is an error. None: no limit.
        """
        try:
            tool, call_arguments = self._parsed_call(name, arguments)
            async with asyncio.timeout(timeout) as limit:
                if tool.is_async:
                    return self._result(await tool.call(call_arguments))
                return self._result(await in_thread(lambda: tool.call(call_arguments), f"tool-{name}", interrupt))
        except RunFailedError:
            raise
        except Exception as error:  # raised by the user's function, or about the call
            if isinstance(error, TimeoutError) and limit.expired():
                error = _CallError(f"not done within {timeout:g} s")
            return _error_result(error)

    def _parsed_call(self, name: str, arguments: str) -> tuple[_Tool, dict[str, Any]]:
        tool = self._tools.get(name)
        if tool is None:
            raise _CallError(f"there is no tool {name[:100]!r}; {suggest(name[:100], self._tools)}")
        if len(arguments) > MAX_ARGUMENTS:
            raise _CallError(f"the arguments are {len(arguments)} characters, at most {MAX_ARGUMENTS}")
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _CallError(f"the arguments are not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise _CallError(f"the arguments are a {type(parsed).__name__}, wanted a JSON object")
        return tool, parsed

    def _result(self, value: Any) -> Result:
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        return Result(shortened(text, self._max_result), True)


class _Tool:
    """A function that a model may call, with its schema."""

    def __init__(self, path: str, function: Any) -> None:
        if not inspect.isroutine(function):
            raise TaskError(f"tool {path!r} is a {type(function).__name__}, wanted a function")
        self.name: str = function.__name__
        self.is_async = inspect.iscoroutinefunction(function)
        try:
            self._checked: TypeAdapter[Any] = TypeAdapter(function)
            parameters = self._checked.json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError) as error:
            raise TaskError(f"tool {path!r} cannot be described to a model: {str(error).splitlines()[0]}") from error
        if parameters.get("type") != "object":
            raise TaskError(f"tool {path!r} takes arguments without a name; give all of its parameters names")
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": inspect.getdoc(function) or "", "parameters": parameters},
        }

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Check the arguments, call the function and return its result."""
        from pydantic_core import ArgsKwargs

        return self._checked.validate_python(ArgsKwargs((), dict(arguments)))


class _CallError(ValueError):
    """A call cannot be executed. The model reads the message."""


def _error_result(error: Exception) -> Result:
    if isinstance(error, _CallError):
        return Result(f"error: {error}", False)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return Result(f"error: argument {where}: {first['msg']}"[:500], False)
    return Result(f"error: {type(error).__name__}: {error}"[:500], False)

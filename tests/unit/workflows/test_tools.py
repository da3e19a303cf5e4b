"""Functions as a model's tools: described, called with anything, never the end of a run."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from trinity_mq.rewards import UnknownNameError
from trinity_mq.workflows import SandboxFailed, TaskError
from trinity_mq.workflows.builtin.tools import MAX_ARGUMENTS, Toolbox

HERE = __name__


def add(a: int, b: Annotated[int, Field(description="the second")] = 1) -> int:
    """Add two numbers."""
    return a + b


async def later(text: str) -> str:
    """Return it later."""
    await asyncio.sleep(0)
    return text


async def never() -> None:
    await asyncio.Event().wait()


RELEASE = threading.Event()


def blocks() -> None:
    RELEASE.wait(30)


def where() -> str:
    return threading.current_thread().name


def fails(kind: str) -> None:
    raise {"value": ValueError, "timeout": TimeoutError}[kind]("went wrong")


def gives(size: int) -> Any:
    return {"text": "x" * size}


def positional(a: int, /) -> int:
    return a


def untyped(thing: NoSuchType) -> None:  # noqa: F821
    ...


def sandboxed(retryable: bool = True) -> str:
    raise SandboxFailed("connection refused", kind="tool", retryable=retryable)


class NotAFunction:
    pass


def box(*names, **keys):
    return Toolbox([f"{HERE}.{name}" for name in names], **keys)


def test_a_function_is_described_by_its_signature():
    (schema,) = box("add").schemas
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert function["parameters"]["properties"]["b"]["description"] == "the second"
    assert function["parameters"]["required"] == ["a"]
    json.dumps(schema)


async def test_a_tool_that_says_that_the_run_failed_is_no_result_for_the_model():
    tools = box("sandboxed")
    with pytest.raises(SandboxFailed, match="connection refused"):
        tools.call("sandboxed", "{}")
    with pytest.raises(SandboxFailed) as caught:
        await tools.call_async("sandboxed", '{"retryable": false}', 5.0)
    assert (caught.value.kind, caught.value.retryable) == ("tool", False)


def test_results_are_text():
    tools = box("add", "gives", max_result=20)
    assert tools.call("add", '{"a": 2, "b": 3}').text == "5"
    assert tools.call("add", '{"a": "2"}').text == "3", "as pydantic reads it"
    assert tools.call("gives", '{"size": 2}').text == '{"text": "xx"}'
    assert tools.call("gives", '{"size": 100}').text == '{"text": "xxxxxxxxxx... (92 characters more)'


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("ad", "{}", "there is no tool 'ad'; did you mean 'add'?"),
        ("zzz" * 1000, "{}", "there are add, fails"),
        ("add", "{", "the arguments are not JSON"),
        ("add", "[1, 2]", "the arguments are a list, wanted a JSON object"),
        ("add", "[" * 90_000, "the arguments are not JSON"),
        ("add", '{"a": 1' + " " * MAX_ARGUMENTS + "}", f"at most {MAX_ARGUMENTS}"),
        ("add", "{}", "argument a: Missing"),
        ("add", "", "argument a: Missing"),
        ("add", '{"a": 1, "c": 2}', "argument c: Unexpected"),
        ("add", '{"a": "one"}', "argument a: Input should be a valid integer"),
        ("add", '{"a": 1, "self": 2}', "argument self: Unexpected"),
        ("fails", '{"kind": "value"}', "ValueError: went wrong"),
        ("fails", '{"kind": "timeout"}', "TimeoutError: went wrong"),
    ],
)
async def test_what_goes_wrong_is_told_to_the_model(name, arguments, said):
    tools = box("add", "fails")
    for result in (tools.call(name, arguments), await tools.call_async(name, arguments, 10.0)):
        assert not result.ok
        assert result.text.startswith("error: ")
        assert said in result.text
        assert len(result.text) < 700


@given(name=st.text(max_size=20), arguments=st.text(max_size=200) | st.from_regex(r'\{("[ab]": *[-0-9a-z"]+,? *)*\}'))
def test_nothing_a_model_writes_raises(name, arguments):
    tools = box("add", "fails")
    for called in (name, "add", "fails"):
        assert isinstance(tools.call(called, arguments).text, str)


async def test_asynchronous_functions_are_awaited_and_others_run_in_threads():
    tools = box("later", "where")
    assert (await tools.call_async("later", '{"text": "hm"}')).text == "hm"
    assert (await tools.call_async("where", "{}")).text == "tool-where"


@pytest.mark.parametrize("name", ["never", "blocks"])
async def test_a_function_that_takes_too_long_is_given_up(name):
    RELEASE.clear()
    result = await box(name).call_async(name, "{}", 0.05)
    RELEASE.set()
    assert (result.text, result.ok) == ("error: not done within 0.05 s", False)


async def test_cancelling_is_not_swallowed():
    task = asyncio.ensure_future(box("never").call_async("never", "{}", 30.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("paths", "error", "said"),
    [
        (["ad"], UnknownNameError, "has no 'ad'; did you mean 'add'"),
        (["NotAFunction"], TaskError, "is a type, wanted a function"),
        (["add", "add"], TaskError, "two tools are called 'add'"),
        (["positional"], TaskError, "without a name"),
        (["untyped"], TaskError, "cannot be described to a model"),
    ],
)
def test_what_is_no_tool_is_refused_when_it_is_named(paths, error, said):
    with pytest.raises(error, match=said):
        box(*paths)

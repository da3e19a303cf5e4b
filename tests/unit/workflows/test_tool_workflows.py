"""Choosing and using tools: the real server and its parser, a model that says what the test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tests.unit.workflows.tiny_engines import running
from trinity_mq.models.recording.responses import MASKED_TEXT
from trinity_mq.rewards import UnknownNameError
from trinity_mq.testing.scripted import CHAT_TEMPLATE, ScriptedGenerator, byte_codec
from trinity_mq.workflows import SandboxFailed, Task, TaskError, load_workflow
from trinity_mq.workflows.builtin.tools import MAX_ARGUMENTS, Toolbox

HERE = __name__
TWINS = pytest.mark.parametrize("twin", ["", "async_"])
TOOLS = [
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"type": "function", "function": {"name": "stop"}},
]


def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


async def multiply_later(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def is_empty(response: str, truth: str) -> float:
    return float(response == "")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def experiences_of(scripted, tmp_path, task, runs=1):
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(task, runs)
    assert status.ok, status.message
    return experiences


def choosing(twin, **keys):
    keys.setdefault(
        "raw_task", {"question": "Add 1.", "answer": [{"name": "add", "arguments": {"a": 1}}], "tools": TOOLS}
    )
    return Task(workflow=load_workflow(f"{twin}tool_choice_workflow"), batch_id=1, task_id=0, **keys)


def using(twin, **arguments):
    arguments.setdefault("tools", [f"{HERE}.multiply"])
    return Task(
        workflow=load_workflow(f"{twin}tool_agent_workflow"),
        raw_task={"question": "What is 3 times 4?", "answer": "12"},
        workflow_args=arguments,
        batch_id=1,
        task_id=0,
    )


@TWINS
async def test_the_calls_are_judged_not_the_words_around_them(tmp_path, twin):
    says = [f"I add. {call('add', a=1)}", call("add", a=2), "no call", call("stop")]
    scripted = ScriptedGenerator(says)
    experiences = await experiences_of(scripted, tmp_path, choosing(twin), 4)
    assert [one.metrics["accuracy"] for one in experiences] == [1.0, 0.0, 0.0, 0.0]
    assert experiences[0].reward == 1.0 > experiences[1].reward > experiences[2].reward == 0.0
    (prompt,) = scripted.prompts
    assert prompt.endswith("<|im_start|>user\nAdd 1.<|im_end|>\n<|im_start|>assistant\n")
    assert all(f'"name": "{name}"' in prompt for name in ("add", "stop"))
    assert [tool["function"]["name"] for tool in experiences[0].tools] == ["add", "stop"]


@TWINS
async def test_tools_may_come_from_the_arguments_or_as_json(tmp_path, twin):
    scripted = ScriptedGenerator([call("add", a=1)] * 3)
    record = {"question": "Add 1.", "answer": '[{"name": "add", "arguments": {"a": 1}}]'}
    async with running(scripted, tmp_path) as runner:
        for task in (
            choosing(twin, raw_task=record, workflow_args={"tools": TOOLS}),
            choosing(twin, raw_task={**record, "tools": json.dumps(TOOLS)}),
            choosing(twin, raw_task={**record, "functions": TOOLS}, workflow_args={"tools_key": "functions"}),
        ):
            status, (one,) = await runner.run_task_async(task)
            assert (status.ok, one.reward) == (True, 1.0), status.message


@TWINS
@pytest.mark.parametrize(
    ("changed", "arguments", "said"),
    [
        ({"tools": None}, {}, "offers no tools: raw_task['tools'] is None"),
        ({"tools": []}, {}, "offers no tools"),
        ({"tools": "{"}, {}, "raw_task['tools'] is not JSON"),
        ({"tools": {"add": 1}}, {}, "wanted a list of function tools"),
        ({"tools": [1]}, {}, "tool 0 of the task is 1, wanted"),
        ({"tools": [{"type": "function", "function": {}}]}, {}, "tool 0 of the task"),
        ({}, {"tool_key": "x"}, "workflow_args.tool_key"),
        ({"answer": "add"}, {}, "wanted a JSON list"),
    ],
)
async def test_a_task_that_offers_no_tools_says_so(tmp_path, twin, changed, arguments, said):
    raw_task = {"question": "Add 1.", "answer": "[]", "tools": TOOLS, **changed}
    async with running(ScriptedGenerator(["x"]), tmp_path) as runner:
        status, _ = await runner.run_task_async(choosing(twin, raw_task=raw_task, workflow_args=arguments))
    assert not status.ok
    assert said in status.message


@TWINS
async def test_a_model_calls_sees_the_result_and_answers(tmp_path, twin):
    scripted = ScriptedGenerator([call("multiply", a=3, b=4), "12"])
    experiences = await experiences_of(scripted, tmp_path, using(twin))
    assert [(one.eid.step, one.reward) for one in experiences] == [(0, 1.0), (1, 1.0)]
    metrics = {"accuracy": 1.0, "tool_calls": 1.0, "tool_errors": 0.0, "actual_env_steps": 2, "ended_truncated": 0.0}
    assert experiences[0].metrics == experiences[1].metrics == metrics
    first, second = scripted.prompts
    assert '"description": "Return a times b."' in first
    assert first.endswith("<|im_start|>user\nWhat is 3 times 4?<|im_end|>\n<|im_start|>assistant\n")
    assert second.startswith(f"{first}<tool_call>")
    assert second.endswith("<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n")
    assert [one.response_text for one in experiences] == [call("multiply", a=3, b=4), "12"]
    assert [one.prompt_text for one in experiences] == scripted.prompts


def opening_thoughts(says):
    """Return a scripted model whose chat template ends the prompt with the opening tag."""
    scripted = ScriptedGenerator(says)
    scripted.codec = byte_codec(CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    return scripted


@TWINS
async def test_only_calls_after_the_thoughts_are_executed(tmp_path, twin):
    draft = call("multiply", a=5, b=5)
    says = [
        f"Or {draft}? No.</think>{call('multiply', a=3, b=4)}",
        f"It is 12, no {draft}.</think>12",
        f"12, or {draft}",
    ]
    scripted = opening_thoughts(says)
    async with running(scripted, tmp_path) as runner:
        _, right = await runner.run_task_async(using(twin))
        _, cut_off = await runner.run_task_async(using(twin))
    assert scripted.prompts[0].endswith("assistant\n<think>\n")
    metrics = {"accuracy": 1.0, "tool_calls": 1.0, "tool_errors": 0.0, "actual_env_steps": 2, "ended_truncated": 0.0}
    assert [one.metrics for one in right] == [metrics] * 2
    assert cut_off[0].metrics == {**metrics, "accuracy": 0.0, "tool_calls": 0.0, "actual_env_steps": 1}


@TWINS
async def test_the_next_turn_reads_the_thoughts_of_this_one(tmp_path, twin):
    thoughts = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    codec = byte_codec(CHAT_TEMPLATE.replace("{{ message.content }}", thoughts + "{{ message.content }}"))
    scripted = ScriptedGenerator([f"<think>3 times 4</think>{call('multiply', a=3, b=4)}", "12"], codec=codec)
    await experiences_of(scripted, tmp_path, using(twin))
    first, second = scripted.prompts
    assert second.startswith(f"{first}<think>3 times 4</think><tool_call>")


@TWINS
async def test_errors_go_back_to_the_model(tmp_path, twin):
    says = [call("divide", a=3) + call("multiply", a="x", b=1), "<tool_call>{</tool_call>"]
    scripted = ScriptedGenerator(says)
    experiences = await experiences_of(scripted, tmp_path, using(twin))
    assert "tool\nerror: there is no tool 'divide'" in scripted.prompts[1]
    assert "tool\nerror: argument a: Input should be a valid integer" in scripted.prompts[1]
    assert experiences[0].metrics["tool_errors"] == experiences[0].metrics["tool_calls"] == 2
    assert {one.reward for one in experiences} == {0.0}, "a call that is none is an answer, and a wrong one"


@TWINS
async def test_the_turns_have_an_end(tmp_path, twin):
    scripted = ScriptedGenerator([call("multiply", a=3, b=4)] * 5)
    experiences = await experiences_of(scripted, tmp_path, using(twin, max_turns=3))
    assert [(one.eid.step, one.reward) for one in experiences] == [(0, 0.0), (1, 0.0), (2, 0.0)]


@TWINS
@pytest.mark.parametrize(
    ("max_turns", "max_model_len"), [pytest.param(2, 9000, id="turns"), pytest.param(5, 2000, id="context")]
)
async def test_a_run_that_a_limit_ends_has_an_empty_answer(tmp_path, twin, max_turns, max_model_len):
    reply = rf"\boxed{{12}} {call('gives', size=1500)}"
    task = replace(using(twin, max_turns=max_turns, tools=[f"{HERE}.gives"]), reward_fn=f"{HERE}.is_empty")
    experiences = await experiences_of(ScriptedGenerator([reply] * 5, max_model_len=max_model_len), tmp_path, task)
    assert (len(experiences) > 1, {one.reward for one in experiences}) == (True, {1.0})
    assert (experiences[-1].response_text == MASKED_TEXT) == (max_turns == 5)


@TWINS
async def test_of_too_many_calls_the_first_are_executed(tmp_path, twin):
    scripted = ScriptedGenerator([call("multiply", a=1, b=1) * 17, "12"])
    experiences = await experiences_of(scripted, tmp_path, using(twin))
    assert scripted.prompts[1].count("tool\n1<") == 16
    assert scripted.prompts[1].count("tool\nerror: not executed") == 1
    assert (experiences[0].reward, experiences[0].metrics["tool_calls"]) == (1.0, 17)


async def test_asynchronous_functions_belong_to_the_asynchronous_workflow(tmp_path):
    tools = [f"{HERE}.multiply_later"]
    scripted = ScriptedGenerator([call("multiply_later", a=3, b=4), "12"])
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(using("async_", tools=tools))
        assert (status.ok, experiences[-1].reward) == (True, 1.0), status.message
        status, _ = await runner.run_task_async(using("", tools=tools))
    assert "use async_tool_agent_workflow" in status.message


# -- functions as tools: described, called with anything, never the end of a run


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

"""Choosing and using tools: the real server and its parser, a model that says what the test wants."""

from __future__ import annotations

import json

import pytest

from tests.unit.workflows.running import running
from trinity_mq.testing.scripted import CHAT_TEMPLATE, ScriptedGenerator, byte_codec
from trinity_mq.workflows import Task, load_workflow

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


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def choosing(twin, **keys):
    keys.setdefault(
        "raw_task", {"question": "Add 1.", "answer": [{"name": "add", "arguments": {"a": 1}}], "tools": TOOLS}
    )
    return Task(workflow=load_workflow(f"{twin}tool_call_workflow"), batch_id=1, task_id=0, **keys)


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
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(choosing(twin), 4)
    assert status.ok, status.message
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
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(using(twin))
    assert status.ok, status.message
    assert [(one.eid.step, one.reward) for one in experiences] == [(0, 1.0), (1, 1.0)]
    metrics = {"accuracy": 1.0, "tool_calls": 1.0, "tool_errors": 0.0, "actual_env_steps": 2}
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
    metrics = {"accuracy": 1.0, "tool_calls": 1.0, "tool_errors": 0.0, "actual_env_steps": 2}
    assert [one.metrics for one in right] == [metrics] * 2
    assert cut_off[0].metrics == {**metrics, "accuracy": 0.0, "tool_calls": 0.0, "actual_env_steps": 1}


@TWINS
async def test_errors_go_back_to_the_model(tmp_path, twin):
    says = [call("divide", a=3) + call("multiply", a="x", b=1), "<tool_call>{</tool_call>"]
    scripted = ScriptedGenerator(says)
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(using(twin))
    assert status.ok, status.message
    assert "tool\nerror: there is no tool 'divide'" in scripted.prompts[1]
    assert "tool\nerror: argument a: Input should be a valid integer" in scripted.prompts[1]
    assert experiences[0].metrics["tool_errors"] == experiences[0].metrics["tool_calls"] == 2
    assert {one.reward for one in experiences} == {0.0}, "a call that is none is an answer, and a wrong one"


@TWINS
async def test_the_turns_have_an_end(tmp_path, twin):
    scripted = ScriptedGenerator([call("multiply", a=3, b=4)] * 5)
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(using(twin, max_turns=3))
    assert status.ok, status.message
    assert [(one.eid.step, one.reward) for one in experiences] == [(0, 0.0), (1, 0.0), (2, 0.0)]


@TWINS
async def test_of_too_many_calls_the_first_are_executed(tmp_path, twin):
    scripted = ScriptedGenerator([call("multiply", a=1, b=1) * 17, "12"])
    async with running(scripted, tmp_path) as runner:
        status, experiences = await runner.run_task_async(using(twin))
    assert status.ok, status.message
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

"""Requests of coding agents, as they were sent, and the kinds of tools that they offer.

``clients/requests.json`` holds the structure of real requests (Codex, OpenCode, Claude Code); placeholders stand for
their texts and schemas.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.serving import Serving, serving

REQUESTS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "clients" / "requests.json").read_text()
)
LAST = {"/v1/responses": "response.completed", "/v1/messages": "message_stop", "/v1/chat/completions": "[DONE]"}
APPLY = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
GRAMMAR = {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}
SPAWN = {"type": "function", "name": "spawn", "description": "Starts an agent.", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "For agents.", "tools": [SPAWN]}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
SHELL = {"type": "local_shell"}


def called(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def send(at: Serving, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Send a request of a session; return the status, and the answer or its events."""
    session = await at.open()
    sent = {"Authorization": f"Bearer {session['key']}", **(headers or {})}
    async with at.http.post(session["url"] + path, json=body, headers=sent) as response:
        text = await response.text()
        if response.content_type != "text/event-stream":
            return response.status, json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return 200, [line if line == "[DONE]" else json.loads(line) for line in lines]


def streamed_text(events: list[Any]) -> str:
    """Return the text of the deltas: how the tokens are divided among events depends on time."""
    texts: list[str] = []
    for event in events:
        if isinstance(event, dict):
            delta = event.get("delta") or next((choice["delta"] for choice in event.get("choices", ())), "")
            texts.append(delta if isinstance(delta, str) else delta.get("text") or delta.get("content") or "")
    return "".join(texts)


@pytest.mark.parametrize(
    "request_",
    [pytest.param(row, id=f"{name}, {number}") for name, rows in REQUESTS.items() for number, row in enumerate(rows)],
)
async def test_a_request_of_a_real_client_is_answered(request_: dict[str, Any]) -> None:
    path = request_["path"].partition("?")[0]
    async with serving(lambda _: "Done.") as at:
        status, events = await send(at, request_["path"], request_["body"], request_["headers"])
        [prompt] = at.generator.prompts
    assert status == 200, events
    last = events[-1]
    assert (last if last == "[DONE]" else last["type"]) == LAST[path]
    assert streamed_text(events) == "Done."
    assert prompt.endswith("assistant\n")


async def respond(tools: list[Any], says: str, **fields: Any) -> tuple[Any, str]:
    """Return the answer to a request, and the prompt."""
    async with serving(lambda _: says) as at:
        status, answer = await send(at, "/v1/responses", {"input": "x", "tools": tools, **fields})
        assert status == 200, answer
        return answer, at.generator.prompts[0]


PATCH, TEXT = {"type": "custom_tool_call", "name": "apply_patch"}, {"type": "function_call", "arguments": '{"a": 1}'}
EXEC = {"type": "exec", "env": {}, "timeout_ms": None, "working_directory": None, "user": None}
RUN: dict[str, Any] = {"type": "local_shell_call", "action": {**EXEC, "command": ["ls", "-l"], "timeout_ms": 5}}
RUN_TEXT: dict[str, Any] = {"type": "local_shell_call", "action": {**EXEC, "command": ["bash", "-lc", "ls"]}}


@pytest.mark.parametrize(
    ("tool", "name", "arguments", "wanted"),
    [
        (APPLY, "apply_patch", {"input": "*** Begin"}, {**PATCH, "input": "*** Begin"}),
        (APPLY, "apply_patch", {"patch": "x"}, {**PATCH, "input": '{"patch": "x"}'}),
        (AGENTS, "agents__spawn", {"a": 1}, {**TEXT, "name": "spawn", "namespace": "agents"}),
        (SPAWN, "unknown", {"a": 1}, {**TEXT, "name": "unknown"}),
        (SEARCH, "tool_search", {"query": "q"}, {"type": "tool_search_call", "arguments": {"query": "q"}}),
        (SHELL, "local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}, RUN),
        (SHELL, "local_shell", {"command": "ls", "env": [1], "timeout_ms": "x", "working_directory": 4}, RUN_TEXT),
    ],
    ids=["free text", "free text in another form", "namespace", "unknown", "search", "shell", "shell in another form"],
)
async def test_a_call_becomes_the_item_of_its_kind_of_tool_and_comes_back(
    tool: dict[str, Any], name: str, arguments: Any, wanted: dict[str, Any]
) -> None:
    says = called(name, arguments)
    answer, _ = await respond([tool], says)
    [item] = answer["output"]
    assert {key: item[key] for key in wanted} == wanted
    assert item["status"] == "completed"
    events, _ = await respond([tool], says, stream=True)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    streamed = events[-2]["item"]
    assert {key: streamed[key] for key in wanted} == wanted
    assert events[-1]["response"]["output"] == [streamed]
    for event in events:
        if event["type"].endswith(".done") and "item_id" in event:
            key = next(key for key in ("arguments", "input") if key in event)
            assert (event["item_id"], event[key]) == (streamed["id"], streamed[key])
    output = {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "the result"}
    if tool is SEARCH:
        output = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [AGENTS]}
    _, prompt = await respond([tool], "Done.", input=[{"role": "user", "content": "x"}, item, output])
    assert f'"name": "{name}"' in prompt.partition("assistant\n")[2]
    assert ("agents__spawn" if tool is SEARCH else "the result") in prompt.partition("tool\n")[2]


async def test_tools_that_a_search_found_are_called_by_their_names() -> None:
    loaded = {"type": "tool_search_output", "call_id": "c", "tools": [AGENTS]}
    past = [{"role": "user", "content": "x"}, {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}}]
    answer, prompt = await respond([SEARCH], called("agents__spawn", {}), input=[*past, loaded])
    assert (answer["output"][0]["namespace"], answer["output"][0]["name"]) == ("agents", "spawn")
    assert "agents__spawn" not in prompt.partition("user\n")[0]  # the beginning of the prompt stays as it was


async def test_the_model_sees_descriptions_and_grammars_and_no_search_of_the_web() -> None:
    web = {"type": "web_search", "external_web_access": True}
    answer, prompt = await respond(
        [{**APPLY, **GRAMMAR}, AGENTS, web, {"type": "web_search_preview_2025_03_11"}], "Done."
    )
    assert "For agents.\\nStarts an agent." in prompt
    assert 'lark grammar:\\nstart: \\"x\\"' in prompt
    assert "web_search" not in prompt
    assert [tool["type"] for tool in answer["tools"]] == ["custom", "namespace"]


@pytest.mark.parametrize(
    ("tools", "fields", "words"),
    [
        ([{"type": "file_search"}], {}, "tools.0 is of type 'file_search', which runs on servers"),
        ([{"type": "mcp", "server_label": "x"}], {}, "tools.0 is of type 'mcp', which runs on servers"),
        ([{"type": "tool_search"}], {}, "tools.0 is of type 'tool_search', which runs on servers"),
        ([{"type": "computer_use_preview"}], {}, "which runs on servers"),
        ([{"type": "apply_patch"}], {}, "this model takes function, namespace"),
        ([{"type": ["function"]}], {}, "this model takes function, namespace"),
        ([None], {}, "tools.0 is of type None"),
        (["x"], {}, "tools.0 is a str, wanted an object"),
        ([{"type": "custom"}], {}, "tools.0.name is None, wanted a name"),
        ([APPLY, {**SPAWN, "name": "apply_patch"}], {}, "tools.1 is a second tool with the name 'apply_patch'"),
        ([{**AGENTS, "tools": [APPLY]}], {}, "tools.0.tools.0 is of type 'custom'; a namespace holds functions"),
        ([{**AGENTS, "tools": 5}], {}, "tools.0.tools is a int, wanted a list"),
        ([{**APPLY, "format": "x"}], {}, "tools.0.format is a str, wanted an object"),
        ([SPAWN], {"tool_choice": {"type": "web_search"}}, "tool_choice is"),
        ([SPAWN], {"input": [{"type": "tool_search_output", "tools": "x"}]}, "input.0.tools is a str, wanted a list"),
        ([SHELL], {"input": [{"type": "local_shell_call", "action": "x"}]}, "action is a str, wanted an object"),
    ],
)  # fmt: skip
async def test_a_tool_that_nothing_here_can_run_is_refused_with_its_place(
    tools: list[Any], fields: dict[str, Any], words: str
) -> None:
    async with serving(lambda _: "5") as at:
        status, answer = await send(at, "/v1/responses", {"input": "x", "tools": tools, **fields})
    assert (status, words in answer["error"]["message"]) == (400, True), answer


DEFERRED = {"name": "Later", "input_schema": {"type": "object"}, "defer_loading": True}
NOW = {"name": "Now", "input_schema": {"type": "object"}}


async def test_a_deferred_tool_is_shown_where_a_search_refers_to_it() -> None:
    use = {"type": "tool_use", "id": "t", "name": "Now", "input": {}}
    content = [{"type": "text", "text": "Here: "}, {"type": "tool_reference", "tool_name": "Later"}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]},
    ]
    tools = [NOW, DEFERRED, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"messages": messages, "tools": tools, "max_tokens": 100}
    async with serving(lambda _: called("Later", {"a": 1})) as at:
        status, answer = await send(at, "/v1/messages", body)
        assert status == 200, answer
        [prompt] = at.generator.prompts
        body["messages"][-1]["content"][0]["content"] = [{"type": "tool_reference", "tool_name": "Never"}]
        refused = await send(at, "/v1/messages", body)
    assert [part["name"] for part in answer["content"]] == ["Later"]
    beginning, _, rest = prompt.partition("user\n")
    assert ("Later" in beginning, "web_search" in prompt) == (False, False)
    assert 'Here: <functions>\n<function>{"name": "Later"' in rest
    assert refused[0] == 400
    assert "refers to the tool 'Never', which is not in tools" in refused[1]["error"]["message"]

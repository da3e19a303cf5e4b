"""A session is a forest: which recorded answer a request continues, what breaks it, and what refers to an answer."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.faithful import assembled
from tests.unit.gateway.serving import Serving, serving, serving_config
from trinity_mq.experience import Experience
from trinity_mq.gateway.app import PROTOCOLS
from trinity_mq.gateway.conversations import CONVERSATION_BYTES, Conversations
from trinity_mq.gateway.lineages import SEQUENCE_BYTES, Lineages, lineage_ids, lineages_of, read_chain
from trinity_mq.gateway.protocols.base import EngineRequest
from trinity_mq.gateway.protocols.openai import CHAT
from trinity_mq.gateway.recorded_call import prompt_of
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.session_store import MemorySessionStore
from trinity_mq.messages import SampledChoice, SessionCall, SessionReward, encode
from trinity_mq.models.inference import InferenceModel
from trinity_mq.testing.scripted import CHAT_TEMPLATE, Script, ScriptedGenerator, byte_codec, scripted_server
from trinity_mq.workflows import Task
from trinity_mq.workflows.sessions.assembly import session_experiences, session_metrics
from trinity_mq.workflows.sessions.recorded import RecordedSessionsWorkflow

Chat = list[dict[str, Any]]
TOOL = {"name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 1.0, "a": [2]}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def say(prompt: str) -> str:
    return f"to {len(prompt)}"


class Agent:
    """A conversation of a session."""

    def __init__(self, at: Serving, session: str, *messages: dict[str, Any], **options: Any) -> None:
        self.at, self.path, self.messages, self.options = at, f"/s/{session}/v1/chat/completions", [*messages], options

    async def ask(self, text: str) -> str:
        """Ask, and keep the answer; return its id."""
        self.messages.append(user(text))
        body = {"messages": self.messages, **self.options}
        if self.options.get("stream"):
            async with self.at.http.post(self.at.url + self.path, json=body) as response:
                events = (await response.text()).split("\n\n")
            self.messages += assembled(events, 1)
            return str(json.loads(events[0].removeprefix("data: "))["id"])
        status, answer = await self.at.post(self.path, body)
        assert status == 200, answer
        self.messages.append(answer["choices"][0]["message"])
        return str(answer["id"])


def calls_of(at: Serving, session: str) -> list[SessionCall]:
    return list(at.session(session).calls.values())


def trained_on(at: Serving, session: str) -> list[Experience]:
    return session_experiences(calls_of(at, session), reward=1.0, call_rewards={}, merge="prefix", turn_discount=1.0)


def forgetful_server(script: Script) -> AbstractAsyncContextManager[tuple[InferenceModel, ScriptedGenerator]]:
    """Serve a model whose template leaves the part of an answer before ``|`` out of later prompts."""
    template = CHAT_TEMPLATE.replace("message.content }}", "message.content.split('|')[-1] }}")
    return scripted_server(script, codec=byte_codec(template))


# -- by messages


@pytest.mark.parametrize(
    "changed",
    [
        {"role": "assistant", "content": " sum:\n", "tool_calls": [{"id": "x", "type": "function", "function": {}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "su"}, {"type": "text", "text": "m:"}]},
        {"role": "assistant", "content": "sum:", "reasoning_content": "hm", "refusal": None, "audio": None},
    ],
)
def test_what_clients_rewrite_does_not_change_the_digest(changed: dict[str, Any]) -> None:
    function = {"name": "add", "arguments": '{"b": 1.0, "a": [2]}'}
    rewritten = {"name": "add", "arguments": json.dumps({"a": [2], "b": 1}, indent=1)}
    answer = {"role": "assistant", "content": "sum:", "tool_calls": [{"id": "call_1", "function": function}]}
    changed = {**changed, "tool_calls": [{"id": "x", "type": "function", "function": rewritten}]}
    tools = [{"type": "function", "function": TOOL}]
    chain = read_chain({"messages": [user("2+1?")], "tools": tools})
    later = read_chain({"messages": [user("2+1?"), changed, user("go on")], "tools": tools})
    assert chain is not None
    assert later is not None
    digest, identity = chain.answered(answer)
    assert digest == later.digests[2]
    assert identity != later.identities[1], "the client changed the id, or knows no other"
    other = [{"type": "function", "function": {**TOOL, "name": "subtract"}}]
    for different in (
        {"messages": [user("2+1?"), answer], "tools": other},
        {"messages": [user("2+1?"), answer], "tools": tools, "tool_choice": "none"},
        {"messages": [user("2+1?"), answer], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [user("2+1? "), answer], "tools": tools},
        {"messages": [user("2+1?"), {**answer, "content": "total:"}], "tools": tools},
        {"messages": [user("2+1?"), {**answer, "tool_calls": None}], "tools": tools},
    ):
        assert (other_chain := read_chain(different)) is not None
        assert other_chain.digests[2] != digest


@pytest.mark.parametrize(
    "body",
    [{"prompt": "x"}, {"messages": "x"}, {"messages": [{"role": 1}]}, {"messages": [user("x"), {"content": [1]}]}],
)
def test_requests_that_engines_refuse_have_no_digests(body: dict[str, Any]) -> None:
    assert read_chain(body) is None


def test_a_role_with_blanks_has_a_digest_of_its_own() -> None:
    chats = [[{"role": "a 4", "content": "bc"}], [{"role": "a", "content": "2 bc"}]]
    first, second = (read_chain({"messages": messages}) for messages in chats)
    assert first is not None
    assert second is not None
    assert first.digests[1] != second.digests[1]


@pytest.mark.parametrize("option", [{"continue_tokens": [1, 2]}, {"continue_messages": 1}])
@pytest.mark.parametrize("record", ["train", "eval", "off"])
async def test_an_agent_gives_the_engine_no_tokens_of_its_own(option: dict[str, Any], record: str) -> None:
    async with serving(say) as at:
        session = (await at.open(record=record))["id"]
        asked = {"messages": [user("one"), {"role": "assistant", "content": "x"}, user("two")], **option}
        status, answer = await at.post(f"/s/{session}/v1/chat/completions", asked)
        assert (status, answer["error"]["param"]) == (400, next(iter(option)))
        assert "is set by the gateway" in answer["error"]["message"]


class Watched(dict[str, Any]):
    """The body of a request, which notes the threads that read it."""

    def get(self, name: str, default: Any = None) -> Any:
        self.setdefault("threads", set()).add(threading.current_thread().name.rpartition("_")[0])
        return super().get(name, default)


async def test_the_digests_of_a_large_request_are_computed_in_a_thread() -> None:
    async with serving(say) as at:
        for size, thread in ((1000, ""), (100_000, "tmq-body")):
            body = Watched(messages=[user("one")])
            chain = await at.app.chain_of(EngineRequest(CHAT, body, streams=False, size=size))
            assert chain == read_chain({"messages": [user("one")]})
            assert body["threads"] == {thread}


@pytest.mark.parametrize(("depth", "is_read"), [(40, True), (700, False), (50_000, True)])
def test_arguments_nested_without_end_are_text_or_have_no_digest(depth: int, is_read: bool) -> None:
    deep = {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}
    chain = read_chain({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": deep}]}]})
    assert (chain is not None) == is_read


def test_all_apis_send_an_answer_back_in_the_same_form() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1.0}'}}
    answer = {"choices": [{"message": {"role": "assistant", "content": "so:", "tool_calls": [call]}}]}
    opening = [user("1?")]
    chain = read_chain({"messages": opening})
    assert chain is not None
    expected = chain.answered(answer["choices"][0]["message"])
    result = "1"
    public = PROTOCOLS["/v1/messages"].answer({**answer, "prompt_token_ids": [1]}, "msg_1", {})
    results = [{"type": "tool_result", "tool_use_id": public["content"][1]["id"], "content": result}]
    anthropic = {
        "max_tokens": 9,
        "messages": [
            *opening,
            {"role": "assistant", "content": public["content"]},
            {"role": "user", "content": results},
        ],
    }
    responses = PROTOCOLS["/v1/responses"].answer({**answer, "prompt_token_ids": [1]}, "resp_1", {})
    output = {"type": "function_call_output", "call_id": "c1", "output": result}
    opened = {"role": "user", "content": [{"type": "input_text", "text": "1?"}]}
    for path, body in (
        ("/v1/messages", anthropic),
        ("/v1/responses", {"input": [opened, *responses["output"], output]}),
        (
            "/v1/chat/completions",
            {"messages": [*opening, answer["choices"][0]["message"], {"role": "tool", "content": result}]},
        ),
    ):
        read = read_chain(PROTOCOLS[path].request(body).body)
        assert read is not None
        assert (read.digests[2], read.identities[1]) == expected, path


# -- lineages


@pytest.mark.parametrize("merge", ["prefix", "renderer"])
async def test_a_parent_with_ten_sub_agents_between_two_turns_is_one_experience(merge: str) -> None:
    async with serving(say, config=serving_config(gateway={"merge": merge})) as at:
        session = (await at.open())["id"]
        parent = Agent(at, session, {"role": "system", "content": "lead"})
        turns = [await parent.ask("begin")]
        for number in range(10):
            helper = Agent(at, session, {"role": "system", "content": "help"})
            await helper.ask(f"part {number}")
            await helper.ask("is that all?")
        turns += [await parent.ask("go on"), await parent.ask("finish")]
        _, shown = await at.get(f"/s/{session}")
        assert shown["breaks"] == []
        assert shown["lineages"][0]["calls"] == turns
        assert (len(shown["lineages"]), at.app.counts["lineages"], shown["ties"]) == (11, 11, 0)
        experiences = trained_on(at, session)
        assert len(experiences) == 11
        whole = next(experience for experience in experiences if experience.info.get("turns") == 3)
        last = calls_of(at, session)[-1]
        assert whole.tokens.tolist() == prompt_of(last, at.session(session).calls) + last.choices[0].ids
        assert whole.tokens.shape[0] == shown["lineages"][0]["tokens"]
        metrics = session_metrics(calls_of(at, session), len(experiences))
        assert (metrics["session_lineages"], metrics["session_calls"]) == (11, 23)
        assert {name: value for name, value in metrics.items() if "breaks" in name and value} == {}


async def test_branches_of_a_turn_and_an_edited_past_begin_where_they_leave_their_parent() -> None:
    async with serving(say) as at:
        session = (await at.open())["id"]
        parent = Agent(at, session)
        turns = [await parent.ask("one"), await parent.ask("two"), await parent.ask("three")]
        branch = Agent(at, session, *parent.messages[:2])
        branched = [await branch.ask("two, but short"), await branch.ask("three")]
        edited = Agent(at, session, *parent.messages[:3], {"role": "assistant", "content": "[cleared]"})
        cleared = await edited.ask("four")
        _, shown = await at.get(f"/s/{session}")
        assert [(lineage["calls"], lineage["parent"]) for lineage in shown["lineages"]] == [
            (turns, None),
            (branched, turns[0]),
            ([cleared], turns[0]),
        ]
        assert shown["breaks"] == []
        sampled = sum(len(call.choices[0].ids) for call in calls_of(at, session))
        forest = Lineages()
        forest.catch_up(at.session(session).calls)
        assert forest.tokens == sampled + sum(len(call.prompt) for call in calls_of(at, session))


async def test_a_template_that_rewrites_earlier_turns_is_a_break_by_template() -> None:
    config = serving_config(gateway={"merge": "prefix"})
    async with serving(lambda prompt: "hm|5", config=config, server=forgetful_server) as at:
        session = (await at.open())["id"]
        agent = Agent(at, session)
        for text in ("one", "two", "three"):
            await agent.ask(text)
        _, shown = await at.get(f"/s/{session}")
        assert shown["breaks"] == ["template", "template"]
        assert (at.app.counts["breaks_template"], len(shown["lineages"])) == (2, 3)


async def test_another_temperature_is_a_break_by_temperature() -> None:
    async with serving(say, config=serving_config(gateway={"sampling": "agent"})) as at:
        session = (await at.open())["id"]
        agent = Agent(at, session, temperature=0.5)
        await agent.ask("one")
        agent.options = {"temperature": 1.0}
        await agent.ask("two")
        await agent.ask("three")
        _, shown = await at.get(f"/s/{session}")
        assert (shown["breaks"], len(shown["lineages"])) == (["temperature"], 2)


class Asked:
    """Notes what the gateway sends to engines."""

    def __init__(self, at: Serving) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._ask, at.calls.ask = at.calls.ask, self  # type: ignore[method-assign, assignment]

    async def __call__(self, path: str, body: dict[str, Any], *rest: Any) -> Any:
        self.bodies.append(body)
        return await self._ask(path, body, *rest)


async def test_another_gateway_continues_what_the_first_recorded() -> None:
    async with serving(say) as at, serving(say, store=at.store) as other:
        session = (await at.open())["id"]
        agent = Agent(at, session)
        names = [await agent.ask("one"), await agent.ask("two")]
        agent.at, asked = other, Asked(other)
        names.append(await agent.ask("three"))
        agent.at = at
        names.append(await agent.ask("four"))
        assert len(asked.bodies[0]["continue_tokens"]) > 0, "it knows the messages by their digests alone"
        _, shown = await at.get(f"/s/{session}")
        assert [(lineage["calls"], lineage["parent"]) for lineage in shown["lineages"]] == [(names, None)]
        assert shown["breaks"] == []


# -- equal answers


async def test_parallel_branches_with_equal_answers_stay_apart_and_are_counted_as_ties() -> None:
    async with serving(lambda prompt: "5") as at:
        session = (await at.open())["id"]
        branches = [Agent(at, session) for _ in range(3)]
        roots = await asyncio.gather(*(branch.ask("2+3?") for branch in branches))
        nexts = await asyncio.gather(*(branch.ask("sure?") for branch in branches))
        _, shown = await at.get(f"/s/{session}")
        assert sorted(len(lineage["calls"]) for lineage in shown["lineages"]) == [2, 2, 2]
        assert {call.continues for call in calls_of(at, session)[3:]} == set(roots)
        assert len(nexts) == 3
        assert (shown["ties"], at.app.counts["ties"], shown["breaks"]) == (3, 3, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_ids_of_calls_tell_equal_answers_apart(stream: bool) -> None:
    async with serving(lambda prompt: CALL if "done" not in prompt else "5") as at:
        session = (await at.open())["id"]
        options = {"tools": [{"type": "function", "function": TOOL}], "stream": stream}
        branches = [Agent(at, session, **options) for _ in range(3)]
        roots = [await branch.ask("2+1?") for branch in branches]
        for number in (1, 0, 2):
            branches[number].messages.append({"role": "tool", "tool_call_id": "x", "content": "3"})
            name = await branches[number].ask("done")
            assert at.session(session).calls[name].continues == roots[number]
        _, shown = await at.get(f"/s/{session}")
        assert shown["ties"] == 0


async def test_of_several_answers_to_a_request_the_continued_one_is_recognised() -> None:
    async with serving(["4", "5", "6", "7"]) as at:
        session = (await at.open())["id"]
        path = f"/s/{session}/v1/chat/completions"
        _, answer = await at.post(path, {"messages": [user("2+3?")], "n": 3})
        chosen = answer["choices"][1]["message"]
        await at.post(path, {"messages": [user("2+3?"), chosen, user("sure?")]})
        first, second = calls_of(at, session)
        assert (second.continues, second.choice, second.tied) == (first.call, 1, False)


# -- sessions of another release


class OldStore(MemorySessionStore):
    """Keeps answers as a gateway of release 0.2.0 writes them, as long as there is one."""

    is_old = True

    async def record(self, call: SessionCall) -> bool:
        if not self.is_old:
            return await super().record(call)
        lacking = {"conversation", "identity"}
        choices = [SampledChoice(**choice.model_dump(exclude=lacking)) for choice in call.choices]
        old = {"choices": choices, "tied": False, "stored": None, "break_cause": "" if call.continues else "new"}
        return await super().record(call.model_copy(update=old))


async def test_a_session_that_an_older_gateway_began_is_continued() -> None:
    """Its answers are found by their tokens, and those of this release by their messages too."""
    store = OldStore()
    async with serving(say, store=store) as at:
        session = (await at.open())["id"]
        agent, helper = Agent(at, session), Agent(at, session, {"role": "system", "content": "help"})
        turns = [await agent.ask("one"), await helper.ask("part"), await agent.ask("two")]
    store.is_old = False
    async with serving(say, store=store) as at:
        agent, helper = Agent(at, session, *agent.messages), Agent(at, session, *helper.messages)
        turns += [await agent.ask("three"), await helper.ask("is that all?"), await agent.ask("four")]
        calls = calls_of(at, session)
        assert [call.break_cause for call in calls] == ["new", "new", "", "", "", ""]
        assert [call.continues for call in calls] == ["", "", turns[0], turns[2], turns[1], turns[3]]
        _, shown = await at.get(f"/s/{session}")
        assert (len(shown["lineages"]), shown["breaks"]) == (2, [])
        assert len(trained_on(at, session)) == 2
        metrics = session_metrics(calls, 2)
        assert {name for name, value in metrics.items() if "breaks" in name and value} == set()


async def test_the_task_of_an_older_gateway_is_read() -> None:
    """It names no rewards of lineages and no credit of shared answers."""
    async with serving(say) as at:
        session = (await at.open())["id"]
        agent = Agent(at, session)
        turns = [await agent.ask("one"), await agent.ask("two")]
        record = {
            "id": session,
            "calls": [encode(call) for call in calls_of(at, session)],
            "reward": None,
            "call_rewards": [[turns[1], None, 0.5]],
            "metrics": {},
            "labels": {},
        }
    raw_task = {"sessions": [record], "merge": "per_call", "turn_discount": 0.5}
    task = Task(workflow=RecordedSessionsWorkflow, raw_task=raw_task)
    experiences = await RecordedSessionsWorkflow(task=task, model=None).run_async()  # type: ignore[arg-type]
    assert [experience.reward for experience in experiences] == [0.25, 0.5]


# -- rewards


async def test_a_reward_can_name_a_lineage_by_any_of_its_calls() -> None:
    async with serving(say) as at:
        session = (await at.open())["id"]
        path = f"/s/{session}"
        parent, helper = Agent(at, session), Agent(at, session, {"role": "system", "content": "help"})
        turns = [await parent.ask("one"), await helper.ask("part"), await parent.ask("two")]
        await at.post(f"{path}/reward", {"reward": 0.5, "lineage": turns[2]})
        await at.post(f"{path}/reward", {"reward": 0.25, "lineage": turns[0], "how": "add"})
        _, shown = await at.post(f"{path}/reward", {"reward": 0.125, "lineage": turns[1]})
        assert [lineage["reward"] for lineage in shown["lineages"]] == [0.75, 0.125]
        assert at.session(session).lineage_rewards == {turns[0]: 0.75, turns[1]: 0.125}
        assert at.session(session).call_rewards == {}
        published = [event.body for event in at.session(session).events if isinstance(event.body, SessionReward)]
        # release 0.2.0 reads only ``call``, and takes null for the whole session
        assert [reward.call for reward in published] == [turns[2], turns[0], turns[1]]
        assert at.session(session).has_reward
        for wrong, wanted in (({"lineage": "nobody"}, 409), ({"lineage": turns[0], "call": turns[0]}, 400)):
            status, refused = await at.post(f"{path}/reward", {"reward": 1.0, **wrong})
            assert status == wanted, refused
            assert "lineage" in refused["error"]["message"]


async def test_a_lineage_keeps_its_reward_when_a_repeat_makes_it_part_of_another() -> None:
    async with serving(say) as at:
        session = (await at.open())["id"]
        path = f"/s/{session}"
        begin = Agent(at, session)
        first = await begin.ask("one")
        lost, kept = Agent(at, session, *begin.messages), Agent(at, session, *begin.messages)
        body = {"messages": [*begin.messages, user("left")]}
        await lost.ask("left")
        branch = await kept.ask("right")
        await at.post(f"{path}/reward", {"reward": 0.5, "lineage": branch})
        url = f"{at.url}{path}/v1/chat/completions"
        async with at.http.post(url, json=body, headers={"x-stainless-retry-count": "1"}) as response:
            assert response.status == 200
        _, shown = await at.get(path)
        assert [(one["calls"], one["reward"]) for one in shown["lineages"][:1]] == [([first, branch], 0.5)]


def test_a_repeated_call_extends_no_lineage() -> None:
    def call(name: str, continues: str = "", **fields: Any) -> SessionCall:
        choices = [SampledChoice(ids=[1, 2], logprobs=[0.0, 0.0])]
        return SessionCall(session="s", call=name, at=1.0, continues=continues, prompt=[7], choices=choices, **fields)

    calls = [call("a"), call("lost", "a"), call("b", "a", supersedes="lost"), call("c", "b"), call("d", "a")]
    assert [(lineage.calls, lineage.parent, lineage.tokens) for lineage in lineages_of(calls, {"lost"})] == [
        (["a", "b", "c"], None, 9),
        (["lost"], "a", 6),
        (["d"], "a", 6),
    ]
    assert lineage_ids(calls) == {"a": "a", "lost": "a", "b": "b", "c": "b", "d": "d"}


# -- previous_response_id


async def respond(at: Serving, session: str, text: Any, **fields: Any) -> tuple[int, Any]:
    return await at.post(f"/s/{session}/v1/responses", {"input": text, **fields})


async def test_a_response_continues_the_stored_one_here_and_at_another_gateway_and_after_a_restart() -> None:
    async with serving(say) as at, serving(say, store=at.store) as other:
        session = (await at.open())["id"]
        name, asked = "", [Asked(at), Asked(other)]
        for gateway, text in ((at, "one"), (at, "two"), (other, "three"), (at, "four")):
            status, answer = await respond(gateway, session, text, previous_response_id=name or None)
            assert status == 200, answer
            assert answer["previous_response_id"] == (name or None)
            name = answer["id"]
        last = asked[0].bodies[-1]["messages"]
        assert [message["content"] for message in last if message["role"] == "user"] == ["one", "two", "three", "four"]
        assert [message["role"] for message in last] == ["user", "assistant"] * 3 + ["user"]
        _, shown = await at.get(f"/s/{session}")
        assert (len(shown["lineages"]), shown["breaks"]) == (1, [])
        assert len(trained_on(at, session)) == 1
        assert [call.stored and len(call.stored.messages) for call in calls_of(at, session)] == [1, 1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_keeps_its_calls_and_no_instructions(stream: bool) -> None:
    async with serving(lambda prompt: CALL if "3" not in prompt else "so 3") as at:
        session, asked = (await at.open())["id"], Asked(at)
        tools = [{"type": "function", **TOOL}]
        body = {"input": "2+1?", "tools": tools, "instructions": "Use the tool.", "stream": stream}
        async with at.http.post(f"{at.url}/s/{session}/v1/responses", json=body) as response:
            last = (await response.text()).split("data: ")[-1]
        first = json.loads(last)["response"] if stream else json.loads(last)
        [item] = first["output"]
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
        status, second = await respond(
            at, session, [output], tools=tools, instructions="Be short.", previous_response_id=first["id"]
        )
        assert (status, second["output"][0]["content"][0]["text"]) == (200, "so 3")
        sent = asked.bodies[-1]["messages"]
        assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
        assert sent[0]["content"] == "Be short."
        assert sent[2]["tool_calls"][0]["id"] == item["call_id"]


async def test_the_response_of_a_call_without_a_session_is_not_stored() -> None:
    async with serving(say) as at:
        status, answer = await at.post("/v1/responses", {"input": "one"})
        assert status == 200
        assert at.session(answer["id"]).calls[answer["id"]].stored is None


async def test_a_whole_conversation_in_input_is_stored_by_what_is_new_in_it() -> None:
    async with serving(say) as at:
        session = (await at.open())["id"]
        items: list[Any] = [{"role": "user", "content": "one"}]
        _, first = await respond(at, session, items)
        items += [*first["output"], {"role": "user", "content": "two"}]
        _, second = await respond(at, session, items)
        stored = calls_of(at, session)[1].stored
        assert stored is not None
        assert (stored.follows, stored.messages) == (first["id"], [user("two")])
        assert (await respond(at, session, "three", previous_response_id=second["id"]))[0] == 200
        assert at.generator.prompts[-1].count("user") == 3


@pytest.mark.parametrize("record", ["train", "off"])
async def test_responses_that_are_not_stored_are_not_found(record: str) -> None:
    async with serving(say) as at:
        session, foreign = [(await at.open(record=record))["id"] for _ in range(2)]
        _, kept = await respond(at, session, "one")
        _, hidden = await respond(at, session, "one", store=False)
        _, elsewhere = await respond(at, foreign, "one")
        assert (kept["store"], hidden["store"]) == (True, False)
        assert (await respond(at, session, "two", previous_response_id=kept["id"]))[0] == 200
        errors = []
        for name in (hidden["id"], elsewhere["id"], "resp_unknown"):
            status, refused = await respond(at, session, "two", previous_response_id=name)
            errors.append((status, refused["error"]["code"], refused["error"]["message"].replace(name, "")))
        assert set(errors) == {(400, "previous_response_not_found", errors[0][2])}


async def test_stored_responses_take_no_more_than_the_limit() -> None:
    async with serving(say, config=serving_config(gateway={"max_body_bytes": 4096})) as at:
        session = (await at.open())["id"]
        _, small = await respond(at, session, "x" * 1500)
        _, large = await respond(at, session, "y" * 3000)
        assert (await respond(at, session, "go on", previous_response_id=small["id"]))[0] == 200
        assert (await respond(at, session, "go on", previous_response_id=large["id"]))[0] == 400


# -- bounds


def recorded(session: str, number: int) -> Session:
    choices = [SampledChoice(ids=[1], logprobs=[0.0])]
    calls = {
        f"c{n}": SessionCall(session=session, call=f"c{n}", at=1.0, prompt=[n], choices=choices) for n in range(number)
    }
    return Session(session, calls=calls)


def test_conversations_are_forgotten_by_their_size_and_rebuilt() -> None:
    sessions = [recorded(f"s{number}", 4) for number in range(3)]
    each = CONVERSATION_BYTES + 4 * SEQUENCE_BYTES
    conversations = Conversations(2 * each)
    first = conversations.of(sessions[0])
    conversations.of(sessions[1])
    assert conversations.of(sessions[0]) is first
    conversations.of(sessions[2])
    assert conversations.bytes == 2 * each
    assert conversations.of(sessions[0]) is first, "the other one was longer without a call"
    assert conversations.of(sessions[1]).lineages.count == 4
    conversations.forget("s1")
    conversations.forget("s1")
    assert conversations.bytes == each


def test_a_call_whose_continued_call_is_missing_is_continued_by_none() -> None:
    choices = [SampledChoice(ids=[2], logprobs=[0.0])]
    forest = Lineages()
    forest.add(SessionCall(session="s", call="b", at=1.0, continues="a", prompt=[1], choices=choices), "")
    assert forest.place([1, 2, 3], "", 1.0, None).continued is None
    with pytest.raises(ValueError, match="at most 31 bits"):
        forest.place([1 << 40], "", 1.0, None)

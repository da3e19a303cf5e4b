"""Routes of the gateway: limits, keys and scopes, errors that say what to do, feedback in the reference's form."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.unit.gateway.serving import NO_GROUPS, Serving, serving, serving_config
from tests.unit.models.conftest import VERSION, engine_server
from tests.waiting import until
from trinity_mq.engines.generation.request import Completion, GenerationRequest
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.families.forms import AnswerForm
from trinity_mq.gateway.recorded_call import prompt_of
from trinity_mq.gateway.session_store import MemorySessionStore, OutsideEvent
from trinity_mq.messages import encode
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.sse import AnswerAssembler, EventReader
from trinity_mq.testing.scripted import Script, ScriptedGenerator, logprob, scripted_server
from trinity_mq.transport.event_log import EventEffect
from trinity_mq.workflows.sessions.assembly import session_metrics

ASK = {"messages": [{"role": "user", "content": "2+3?"}]}
GRPO = {"algorithm_type": "grpo", "repeat_times": 4}


def say(prompt: str) -> str:
    return "5"


async def test_what_get_tells_along_the_way() -> None:
    async with serving(say) as at:
        made = await at.open(labels={"who": "me"}, task={"question": "2+3?"})
        path = f"/s/{made['id']}"
        _, shown = await at.get(path)
        assert (shown["state"], shown["calls"], shown["labels"]) == ("open", 0, {"who": "me"})
        _, answer = await at.post(f"{path}/v1/chat/completions", ASK)
        _, rewarded = await at.post(f"{path}/reward", {"reward": 0.5, "call": answer["id"], "metrics": {"tries": 2}})
        assert rewarded["call_rewards"] == [{"call": answer["id"], "choice": None, "reward": 0.5}]
        _, ended = await at.post(f"{path}/end", {"reward": 1.0})
        assert (ended["state"], ended["reward"], ended["metrics"]) == ("parked", 1.0, {"tries": 2.0})
        status, refused = await at.post(f"{path}/v1/chat/completions", ASK)
        assert (status, refused["error"]["code"]) == (410, "session_ended")
        _, listed = await at.get("/sessions?who=me")
        assert [one["id"] for one in listed["sessions"]] == [made["id"]]
        assert listed["states"] == {"parked": 1}


@pytest.mark.parametrize("streams", [False, True])
async def test_the_callers_trace_goes_to_the_engine_and_with_the_answer(streams: bool) -> None:
    asked: list[str | None] = []

    class Noting(EngineClients):
        async def post_async(self, url: str, body: Any, headers: Any = None, *more: Any) -> Any:
            asked.append(headers.get("traceparent"))
            return await super().post_async(url, body, headers, *more)

        async def open_async(self, url: str, body: Any, headers: Any, *more: Any) -> Any:
            asked.append(headers.get("traceparent"))
            return await super().open_async(url, body, headers, *more)

    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(say, clients=Noting) as at:
        made = await at.open()
        path = f"{at.url}/s/{made['id']}/v1/chat/completions"
        for traceparent in ("rubbish", given):
            body = {**ASK, "stream": streams}
            async with at.http.post(path, json=body, headers={"traceparent": traceparent}) as response:
                assert response.status == 200
                await response.read()
        assert [call.traceparent for call in at.session(made["id"]).calls.values()] == ["", given]
        assert at.session(made["id"]).traceparent == given
    assert asked == [None, given]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/s/nobody/reward", {"reward": 1}, 404, "no session 'nobody' is known here; POST /sessions opens a session"),
        ("/sessions", {"rekord": "train"}, 400, "unknown field 'rekord'; known: group"),
        ("/sessions", {"record": "yes"}, 400, "record: Input should be 'train', 'eval' or 'off', got 'yes'"),
        ("/sessions", [1], 400, "the body is a list, wanted a JSON object"),
        ("/s/{id}/reward", {"reward": "nan"}, 400, "reward: Input should be a finite number"),
        ("/s/{id}/reward", {}, 400, "reward: Field required"),
        ("/s/{id}/reward", {"reward": 1, "metrics": {"a": "nan"}}, 400, "metric 'a' is nan, wanted a number from"),
        ("/s/{id}/end", {"metrics": {"a": "-inf"}}, 400, "metric 'a' is -inf, wanted a number from"),
        ("/s/{id}/reward", {"reward": 1, "call": "chatcmpl-0"}, 409, "has no call 'chatcmpl-0'; it has none"),
        ("/s/{id}/v1/chat/completions", {}, 400, "messages"),
        ("/s/{id}/v1/responses", {"previous_response_id": "r", "input": "x"}, 400, "response with id 'r' not found"),
        ("/s/{id}/v1/responses", {"conversation": "c", "input": "x"}, 400, "send previous_response_id"),
        ("/s/{id}/v1/responses", {"input": [{"type": "computer_call"}]}, 400, "is of type 'computer_call'; taken are"),
        ("/s/{id}/v1/messages", {"messages": [{"role": "robot", "content": "x"}]}, 400, "wanted user or assistant"),
        ("/s/{id}/v1/messages", {"messages": [{"role": "user", "content": 3}]}, 400, "wanted text or a list of blocks"),
        ("/s/{id}/v1/embeddings", {}, 404, "Not Found"),
        ("/feedback", {"reward": 1, "msg_ids": ["m"]}, 404, "1 answers are not known"),
    ],
)
async def test_errors_say_what_was_wrong(path: str, body: Any, status: int, words: str) -> None:
    async with serving(say) as at:
        made = await at.open()
        found, answer = await at.post(path.replace("{id}", made["id"]), body)
        assert found == status, answer
        assert words in answer["error"]["message"]


async def test_bodies_that_are_too_large() -> None:
    async with serving(say, config=serving_config(gateway={"max_body_bytes": 2048})) as at:
        made = await at.open()
        long = {"messages": [{"role": "user", "content": "x" * 4000}]}
        status, _ = await at.post(f"/s/{made['id']}/v1/chat/completions", long)
        assert status == 413
        assert (await at.get("/health"))[0] == 200


@pytest.mark.parametrize(
    ("limit", "status", "code"),
    [
        ({"calls_per_minute": 2}, 429, "rate_limit_exceeded"),
        ({"max_calls": 2}, 403, "too_many_calls"),
        ({"max_session_tokens": 40}, 403, "too_many_tokens"),  # a call takes 25
    ],
)
async def test_limits_of_calls(limit: dict[str, int], status: int, code: str) -> None:
    async with serving(say, config=serving_config(gateway=limit)) as at:
        made = await at.open()
        answers = [await at.post(f"/s/{made['id']}/v1/chat/completions", ASK) for _ in range(3)]
        assert [status for status, _ in answers] == [200, 200, status]
        assert answers[2][1]["error"]["code"] == code
        assert f"gateway.{next(iter(limit))}" in answers[2][1]["error"]["message"]


@pytest.mark.parametrize("key", ["{own}x", "sk-tmq-guess", "sk-proj-of-another-provider", "{other}"])
async def test_a_mistyped_key_is_refused_on_loopback_too(key: str) -> None:
    """It would open a session of one call that nobody rewards: nothing of it is ever trained on."""
    async with serving(say) as at:
        made, other = await at.open(), await at.open()
        sent = key.format(own=made["key"], other=other["key"])
        paths = [f"/s/{made['id']}/v1/chat/completions", f"/s/{made['id']}/reward", "/sessions", "/feedback"]
        for path in paths if sent == other["key"] else ["/v1/chat/completions", *paths]:
            status, answer = await at.post(path, {**ASK, "reward": 1, "msg_ids": ["m"]}, key=sent)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path
            assert "POST /sessions" in answer["error"]["message"]
            assert "no key" in answer["error"]["message"]
        assert (await at.get("/sessions", key=sent))[0] == 401
        assert (await at.get("/s/mistyped", key=sent))[1]["error"]["code"] == "session_not_found"
        assert len(list(at.store.ledger)) == 2, "no session was opened"
        assert not at.session(made["id"]).calls


@pytest.mark.parametrize("key", ["", "none", "EMPTY"])
async def test_on_loopback_whoever_sends_no_key_may_ask(key: str) -> None:
    """Clients that insist on a key have something to send."""
    async with serving(say) as at:
        made = await at.open(key=key)
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            for path in ("/v1/chat/completions", f"/s/{made['id']}/v1/chat/completions"):
                async with at.http.post(at.url + path, json=ASK, headers=headers) as response:
                    assert response.status == 200, await response.text()
        both = {"x-api-key": "none", "Authorization": f"Bearer {made['key']}"}
        async with at.http.post(f"{at.url}/v1/chat/completions", json=ASK, headers=both) as response:
            assert response.status == 200
        assert len(at.session(made["id"]).calls) == 3


async def test_algorithms_that_compare_want_a_group() -> None:
    async with serving(say, config=serving_config(algorithm=GRPO)) as at:
        status, answer = await at.post("/sessions")
        assert (status, answer["error"]["code"]) == (422, "group_wanted")
        made = await at.open(group="g")
        opened = at.session(made["id"]).opened
        assert opened is not None
        assert opened.group_size == 4
        assert (await at.open(record="eval"))["recorded"]
        _, answer = await at.post("/v1/chat/completions", ASK)
        feedback = {"reward": 1, "msg_ids": [answer["id"]]}
        status, refused = await at.post("/feedback", feedback)
        assert (status, refused["error"]["code"], refused["error"]["param"]) == (422, "group_wanted", "task_id")
        assert not at.session(answer["id"]).has_reward
        assert (await at.post("/feedback", {**feedback, "task_id": 0}))[0] == 200
        assert at.session(answer["id"]).group == "0"


async def test_answers_outside_of_sessions_are_rewarded_by_their_ids() -> None:
    async with serving(say) as at:
        _, answer = await at.post("/v1/chat/completions", ASK)
        name = answer["id"]
        assert at.session(name).state == "parked"
        status, said = await at.post("/feedback", {"reward": 0.25, "msg_ids": [name], "task_id": 7, "run_id": 0})
        assert (status, said["status"]) == (200, "success")
        found = at.session(name)
        assert (found.reward, found.end is not None) == (0.25, True)
        assert (await at.post("/commit"))[1]["status"] == "success"


@pytest.mark.parametrize("algorithm", [NO_GROUPS, GRPO], ids=["no groups", "groups"])
async def test_answers_outside_of_sessions_are_not_recorded_while_training_is_behind(algorithm: Any) -> None:
    few = {"max_kept_bytes": 1 << 20}
    async with serving(say, config=serving_config(algorithm=algorithm, gateway=few)) as at:
        at.store.ledger.kept_bytes = 1 << 20
        status, answer = await at.post("/v1/chat/completions", ASK)
        assert status == 200
        opened = at.session(answer["id"]).opened
        assert opened is not None
        assert (opened.record, opened.sampled_out) == ("off", True)
    async with serving(say, config=serving_config(algorithm=algorithm, gateway={**few, "when_behind": "refuse"})) as at:
        at.store.ledger.kept_bytes = 1 << 20
        status, answer = await at.post("/v1/chat/completions", ASK)
        assert (status, answer["error"]["code"]) == (429, "training_is_behind")


async def test_training_is_behind() -> None:
    few = {"max_kept_bytes": 1 << 20, "max_waiting": 1}
    async with serving(say, config=serving_config(gateway=few)) as at:
        at.store.ledger.kept_bytes = 1 << 20
        made = await at.open()
        assert not made["recorded"]
        status, _ = await at.post(f"/s/{made['id']}/v1/chat/completions", ASK)
        assert status == 200, "it is answered all the same"
        _, shown = await at.get(f"/s/{made['id']}")
        assert (shown["calls"], shown["sampled_out"]) == (0, True)
    async with serving(say, config=serving_config(gateway={**few, "when_behind": "refuse"})) as at:
        at.store.ledger.kept_bytes = 1 << 20
        status, answer = await at.post("/sessions")
        assert (status, answer["error"]["code"]) == (429, "training_is_behind")


async def test_sampling_is_the_configured_one_where_it_trains() -> None:
    hot = {"temperature": 0.1, "top_p": 0.2, "seed": 7, **ASK}
    async with serving(say) as at:
        for record, temperature in (("train", 1.0), ("eval", 0.1)):
            made = await at.open(record=record)
            assert (await at.post(f"/s/{made['id']}/v1/chat/completions", hot))[0] == 200
            (call,) = at.session(made["id"]).calls.values()
            assert call.temperature == temperature
    async with serving(say, config=serving_config(gateway={"sampling": "agent"})) as at:
        made = await at.open()
        await at.post(f"/s/{made['id']}/v1/chat/completions", {"temperature": 0.5, **ASK})
        (call,) = at.session(made["id"]).calls.values()
        assert call.temperature == 0.5


async def test_another_engine_answers_where_one_is_lost_and_sessions_stay_with_theirs() -> None:
    async with serving(say) as at, scripted_server(say) as (other, _):
        gone = InferenceModel("gone", "http://127.0.0.1:9", "gone")
        at.engines.models = [gone, other, *at.engines.models]
        made = await at.open()
        for _ in range(2):
            assert (await at.post(f"/s/{made['id']}/v1/chat/completions", ASK))[0] == 200
        assert at.engines.lost_ones == [gone.url]
        assert at.engines.preferred[-1] == other.id


@contextlib.asynccontextmanager
async def silent_server(script: Script) -> AsyncIterator[tuple[InferenceModel, Any]]:
    """An engine whose answers have no choices."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"prompt_token_ids": [1], "choices": []})

    server = web.Application()
    server.router.add_post("/v1/chat/completions", answer)
    async with TestServer(server) as silent:
        yield InferenceModel("e0", str(silent.make_url("")).rstrip("/"), "tiny", version=VERSION), None


@pytest.mark.parametrize("record", ["train", "off"])
async def test_an_answer_without_choices_is_a_fault_of_the_engine(record: str) -> None:
    async with serving(say, server=silent_server) as at:
        made = await at.open(record=record)
        status, answer = await at.post(f"/s/{made['id']}/v1/chat/completions", ASK)
        assert (status, answer["error"]["code"]) == (502, "no_choices")


async def test_a_client_that_leaves_early_is_no_fault() -> None:
    async with serving(say) as at:
        made = await at.open()
        async with at.http.post(f"{made['base_url']}/chat/completions", json={"stream": True, **ASK}) as response:
            await response.content.readany()
        await until(lambda: not at.app.asking)
        assert (await at.post(f"/s/{made['id']}/v1/chat/completions", ASK))[0] == 200


class Resampled(ScriptedGenerator):
    """Samples ``ab`` as two tokens, which its tokenizer cuts as one."""

    def _completion(self, request: GenerationRequest, text: str) -> Completion:
        known = super()._completion(request, text)
        ids = [part for token in known.token_ids for part in ((0, 1) if token == MERGED else (token,))]
        return Completion(ids, [logprob(place) for place in range(len(ids))], known.text, known.finish_reason)


MERGED = 2


def merging_codec() -> TextCodec:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": MERGED, "?": 3}, merges=[("a", "b")]))
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
    return TextCodec(tokenizer, frozenset({tokenizer.convert_tokens_to_ids("<eos>")}))


@contextlib.asynccontextmanager
async def merging_server(script: Script) -> AsyncIterator[tuple[InferenceModel, ScriptedGenerator]]:
    generator = Resampled(script)
    generator.codec = merging_codec()
    async with engine_server(generator) as server:
        yield InferenceModel("e0", server.url, "tiny", version=VERSION), generator


@pytest.mark.parametrize("merge", ["renderer", "prefix", "per_call"])
async def test_a_turn_goes_on_behind_the_tokens_that_were_sampled(merge: str) -> None:
    config = serving_config(gateway={"merge": merge})
    async with serving(["aab", "b"], config=config, server=merging_server) as at:
        made = await at.open()
        path = f"/s/{made['id']}/v1/chat/completions"
        question = {"role": "user", "content": "a?"}
        _, first = await at.post(path, {"messages": [question]})
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        assert said["content"] == "aab"
        await at.post(path, {"messages": [question, said, {"role": "user", "content": "ab?"}]})
        calls = list(at.session(made["id"]).calls.values())
        prompt = prompt_of(calls[1], at.session(made["id"]).calls)
        sampled, cut = [0, 3, 4, 0, 0, 1, 4], [0, 3, 4, 0, MERGED, 4]
        follows = [MERGED, 3, 4]
        if merge == "renderer":
            assert prompt == [*sampled, *follows]
            assert (calls[1].continues, calls[1].break_cause) == (calls[0].call, "")
        else:
            assert prompt == [*cut, *follows]
            assert (calls[1].continues, calls[1].break_cause) == ("", "retoken")
            assert at.app.counts["breaks_retoken"] == 1


@contextlib.asynccontextmanager
async def old_server(script: Script) -> AsyncIterator[tuple[InferenceModel, Any]]:
    """An engine that refuses ``continue_messages`` with the words of release 0.2.0. Yields the bodies that it read."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if "continue_messages" in bodies[-1]:
            error = {
                "message": "unknown option 'continue_messages'; known: continue_tokens, messages, n",
                "type": "invalid_request_error",
                "param": "continue_messages",
                "code": "unknown_option",
            }
            return web.json_response({"error": error}, status=400)
        async with http.post(model.url + request.path, json=bodies[-1]) as reply:
            headers = {name: reply.headers[name] for name in ("Content-Type", "X-TMQ-Version")}
            return web.Response(status=reply.status, body=await reply.read(), headers=headers)

    server = web.Application()
    server.router.add_post("/v1/chat/completions", answer)
    async with merging_server(script) as (model, _), ClientSession() as http, TestServer(server) as old:
        yield replace(model, url=str(old.make_url("")).rstrip("/")), bodies


def content_of(body: bytes, *, stream: bool) -> str:
    """Return the content of an answer. How a stream divides it depends on time."""
    assembler = AnswerAssembler()
    for chunk in EventReader().feed(body) if stream else ():
        assembler.add(chunk)
    answer = assembler.answer() if stream else json.loads(body)
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_of_an_older_release_is_asked_without_the_fields_that_it_refuses(stream: bool) -> None:
    """It is asked again once; later requests are sent without the field. The tokens are continued all the same."""
    async with serving(["aab", "b", "a"], server=old_server) as at:
        made = await at.open()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a?"}]
        for content in ("aab", "b", "a"):
            path = f"{at.url}/s/{made['id']}/v1/chat/completions"
            async with at.http.post(path, json={"messages": messages, "stream": stream}) as response:
                assert response.status == 200
                assert content_of(await response.read(), stream=stream) == content
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "?"}]
        assert ["continue_messages" in body for body in at.generator] == [False, True, False, False]
        assert [bool(body.get("continue_tokens")) for body in at.generator] == [False, True, True, True]
        first, second, third = at.session(made["id"]).calls.values()
        assert [second.continues, third.continues] == [first.call, second.call]


async def test_a_field_that_changes_an_answer_is_not_left_out_for_an_older_engine() -> None:
    async def refuse(request: web.Request) -> web.Response:
        error = {"message": "unknown option 'chat_template_kwargs'", "param": "chat_template_kwargs"}
        return web.json_response({"error": {**error, "code": "unknown_option"}}, status=400)

    @contextlib.asynccontextmanager
    async def refusing(script: Script) -> AsyncIterator[tuple[InferenceModel, Any]]:
        server = web.Application()
        server.router.add_post("/v1/chat/completions", refuse)
        async with TestServer(server) as old:
            yield InferenceModel("e0", str(old.make_url("")).rstrip("/"), "tiny", version=VERSION), None

    async with serving(say, server=refusing) as at:
        path = f"/s/{(await at.open())['id']}/v1/chat/completions"
        status, answer = await at.post(path, {**ASK, "chat_template_kwargs": {"enable_thinking": False}})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


async def test_an_end_that_is_sent_again_is_no_news_and_one_that_says_more_is() -> None:
    async with serving(say) as at:
        path = f"/s/{(await at.open())['id']}"
        assert not (await at.post(f"{path}/end", {}))[1]["repeated"]
        assert (await at.post(f"{path}/end", {}))[1]["repeated"]
        _, shown = await at.post(f"{path}/end", {"reward": 0.5})
        assert (shown["accepted"], shown["repeated"], shown["reward"]) == (True, False, 0.5)


async def test_an_event_that_cannot_travel_is_refused_with_its_path() -> None:
    """The store of a run writes events into messages; the rules of HTTP bodies alone do not tell what fits."""

    class Written(MemorySessionStore):
        async def report(self, event: OutsideEvent, message_id: str) -> EventEffect:
            encode(event.model_copy(update={"choice": 10**30}))
            raise AssertionError("it was written")

    async with serving(say, store=Written()) as at:
        made = await at.open()
        status, answer = await at.post(f"/s/{made['id']}/reward", {"reward": 1})
        assert (status, answer["error"]["param"]) == (400, "session_reward.choice")
        assert "an integer of 100 bits, wanted one of at most 64" in answer["error"]["message"]


HALF = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
TOOL = {"name": "add", "parameters": {"type": "object"}}
TOOLS = {
    "chat/completions": [{"type": "function", "function": TOOL}],
    "responses": [{"type": "function", **TOOL}],
    "messages": [{"name": "add", "input_schema": {"type": "object"}}],
}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 512},
}


async def ask(at: Serving, path: str, record: str = "train", **options: Any) -> tuple[int, Any]:
    made = await at.open(record=record)
    async with at.http.post(f"{made['base_url']}/{path}", json={**BODIES[path], **options}) as response:
        text = await response.text()
        if not options.get("stream") or response.status != 200:
            return response.status, json.loads(text)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return 200, [json.loads(event) for event in events if event != "[DONE]"]


OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "chat/completions": {"response_format": ({"type": "grammar"}, {"type": "text"})},
    "completions": {
        "parallel_tool_calls": (False, True),
        "response_format": ({"type": "json_object"}, {"type": "text"}),
    },
    "responses": {
        "truncation": ("auto", "disabled"),
        "text": ({"format": {"type": "grammar"}}, {"format": {"type": "text"}}),
    },
    "messages": {
        "output_config": ({"format": {"type": "json_schema"}}, {}),
        "n": (2, 1),
        "logit_bias": ({"5": 100}, {}),
        "parallel_tool_calls": (False, True),
    },
}
"""A value and the default of options that a path does not have."""
PENALTIES = {"presence_penalty": (0.5, 0), "frequency_penalty": (0.5, 0.0), "repetition_penalty": (1.2, 1)}
OF_ALL = {"top_k": (5, -1), "min_p": (0.1, 0)}


@pytest.mark.parametrize(
    ("path", "option"), [(path, name) for path, own in OPTIONS.items() for name in (*PENALTIES, *OF_ALL, *own)]
)
async def test_an_option_that_does_not_exist_is_refused_by_name_and_its_default_is_taken(
    path: str, option: str
) -> None:
    value, neutral = {**PENALTIES, **OF_ALL, **OPTIONS[path]}[option]
    needed = {"tools": TOOLS[path]} if option == "parallel_tool_calls" and path in TOOLS else {}
    async with serving(lambda prompt: "5") as at:
        for record, default in (("train", neutral), ("train", None), ("eval", neutral), ("off", neutral)):
            status, answer = await ask(at, path, record, **needed, **{option: value})
            assert status == 400, answer
            assert answer["error"]["message"].startswith(option)
            if path != "messages":  # whose errors have no field for it
                assert answer["error"]["param"].startswith(option)
            status, answer = await ask(at, path, record, **{option: default})
            assert status == 200, answer


COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red"]}}}
NAMED = {"type": "function", "function": {"name": "add"}}
FORMS: list[tuple[str, dict[str, Any], AnswerForm]] = [
    ("chat/completions", {"tool_choice": "required"}, AnswerForm("tool_choice", must_call=True)),
    ("chat/completions", {"tool_choice": NAMED}, AnswerForm("tool_choice", must_call=True, parallel=False)),
    ("chat/completions", {"parallel_tool_calls": False}, AnswerForm("parallel_tool_calls", parallel=False)),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}},
        AnswerForm("response_format", COLOUR, parallel=False),
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object"}},
        AnswerForm("response_format", {"type": "object"}, parallel=False),
    ),
    ("responses", {"tool_choice": "required"}, AnswerForm("tool_choice", must_call=True)),
    (
        "responses",
        {"tool_choice": {"type": "function", "name": "add"}},
        AnswerForm("tool_choice", must_call=True, parallel=False),
    ),
    ("responses", {"parallel_tool_calls": False}, AnswerForm("parallel_tool_calls", parallel=False)),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "c", "schema": COLOUR, "strict": True}}},
        AnswerForm("response_format", COLOUR, parallel=False),
    ),
    ("messages", {"tool_choice": {"type": "any"}}, AnswerForm("tool_choice", must_call=True)),
    (
        "messages",
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        AnswerForm("tool_choice", must_call=True, parallel=False),
    ),
    (
        "messages",
        {"tool_choice": {"type": "tool", "name": "add"}},
        AnswerForm("tool_choice", must_call=True, parallel=False),
    ),
    (
        "messages",
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        AnswerForm("parallel_tool_calls", parallel=False),
    ),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": COLOUR}}},
        AnswerForm("response_format", COLOUR, parallel=False),
    ),
]
"""Options of each API that demand a form of the answer, with the form that the engine reads."""


@pytest.mark.parametrize(("path", "options", "form"), FORMS)
@pytest.mark.parametrize("record", ["train", "eval"])
async def test_a_demanded_form_reaches_the_engine_from_every_api(
    path: str, options: dict[str, Any], form: AnswerForm, record: str
) -> None:
    async with serving(lambda prompt: "5") as at:
        offered = {} if form.schema else {"tools": TOOLS[path]}
        status, answer = await ask(at, path, record, **offered, **options)
        assert status == 200, answer
        [demanded] = at.generator.forms
        assert replace(demanded, tools=()) == form
        assert [tool["function"]["name"] for tool in demanded.tools] == ([] if form.schema else ["add"])


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("chat/completions", {"max_tokens": 4}),
        ("completions", {"max_tokens": 4}),
        ("responses", {"max_output_tokens": 4}),
    ],
)
@pytest.mark.parametrize("record", ["train", "eval"])
async def test_options_that_change_the_distribution_count_only_outside_of_training(
    path: str, options: dict[str, Any], record: str
) -> None:
    async with serving(lambda prompt: "5") as at:
        sampling = {"logit_bias": {"9": 100}, "min_tokens": 3, "ignore_eos": True, "stop": ["\x00"]}
        status, answer = await ask(at, path, record, **options, **sampling)
        assert status == 200, answer
        [request] = at.generator.requests
        if record == "train":
            assert (request.logit_bias, request.min_tokens, bool(request.stop_ids)) == ({}, 0, True)
        else:
            assert (request.logit_bias, request.min_tokens, bool(request.stop_ids)) == ({9: 100.0}, 3, False)
        assert request.stop == ("\x00",), "where an answer ends is the agent's choice"


@pytest.mark.parametrize("record", ["train", "eval", "off"])
async def test_logprobs_are_those_of_the_engine_streamed_and_not(record: str) -> None:
    async with serving(lambda prompt: "56") as at:
        wanted = [("5", logprob(0)), ("6", logprob(1)), ("<|im_end|>", logprob(2))]

        def read(entries: list[dict[str, Any]]) -> list[tuple[str, float]]:
            return [(entry["token"], entry["logprob"]) for entry in entries]

        for options in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
            _, answer = await ask(at, "chat/completions", record, **options)
            assert read(answer["choices"][0]["logprobs"]["content"]) == wanted
            _, chunks = await ask(at, "chat/completions", record, stream=True, **options)
            parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            assert read([entry for part in parts if part for entry in part["content"]]) == wanted
        _, answer = await ask(at, "completions", record, logprobs=0)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [value for _, value in wanted]
        _, chunks = await ask(at, "completions", record, logprobs=0, stream=True)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [value for part in parts if part for value in part["token_logprobs"]] == [value for _, value in wanted]
        include = ["message.output_text.logprobs"]
        _, answer = await ask(at, "responses", record, include=include)
        assert read(answer["output"][0]["content"][0]["logprobs"]) == wanted
        _, events = await ask(at, "responses", record, include=include, stream=True)
        assert read(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == wanted
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        sent = [entry for delta in deltas for entry in delta["logprobs"]]
        assert read(sent) == wanted[: len(sent)]
        assert sent
        for path in BODIES:
            _, answer = await ask(at, path, record)
            assert '"logprob"' not in json.dumps(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "ending"),
    [
        ("one STOP two", {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}),
        ("one END STOP", {"stop_reason": "stop_sequence", "stop_sequence": "END"}),
        ("one two", {"stop_reason": "end_turn", "stop_sequence": None}),
    ],
)
async def test_a_stop_sequence_is_named(stream: bool, said: str, ending: dict[str, Any]) -> None:
    async with serving(lambda prompt: said) as at:
        _, answer = await ask(at, "messages", stop_sequences=["STOP", "END"], stream=stream)
        if stream:
            texts = [event["delta"]["text"] for event in answer if event["type"] == "content_block_delta"]
            (last,) = [event["delta"] for event in answer if event["type"] == "message_delta"]
            assert ("".join(texts), last) == (said.split("STOP", maxsplit=1)[0].split("END", maxsplit=1)[0], ending)
        else:
            assert answer["content"][0]["text"] == said.split("STOP", maxsplit=1)[0].split("END", maxsplit=1)[0]
            assert {name: answer[name] for name in ending} == ending
        status, answer = await ask(at, "messages", stop_sequences="STOP")
        assert (status, answer["error"]["message"]) == (400, "stop_sequences is a str, wanted a list")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOOLS)
async def test_half_a_surrogate_pair_in_the_arguments_of_a_call_is_replaced(path: str, stream: bool) -> None:
    async with serving(lambda prompt: HALF) as at:
        status, answer = await ask(at, path, tools=TOOLS[path], stream=stream)
        assert status == 200, answer
        text = json.dumps(answer, ensure_ascii=False)
        assert text.encode().decode() == text
        assert '{"a": "\ufffd"}' in text.replace("\\\\", "\\").replace("\\ufffd", "\ufffd").replace('\\"', '"')


@pytest.mark.parametrize("arguments", ["[" * 20_000, '{"a": NaN}', "x"])
async def test_arguments_that_are_no_json_reach_an_agent_as_text(arguments: str) -> None:
    said = f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"
    async with serving(lambda prompt: said) as at:
        options = {"tools": TOOLS["messages"], "max_tokens": 30_000}
        status, answer = await ask(at, "messages", **options)
        assert (status, answer["content"][0]["input"]) == (200, {"arguments": arguments})
        _, events = await ask(at, "messages", stream=True, **options)
        [delta] = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert json.loads(delta["partial_json"]) == {"arguments": arguments}


@pytest.mark.parametrize("path", BODIES)
async def test_a_character_whose_bytes_are_several_tokens_is_streamed_whole(path: str) -> None:
    said = "a\U0001f600\u00e9"
    async with serving(lambda prompt: said) as at:
        _, events = await ask(at, path, stream=True)
        texts: dict[str, Callable[[Any], str]] = {
            "chat/completions": lambda event: event["choices"][0]["delta"].get("content", ""),
            "completions": lambda event: event["choices"][0]["text"],
            "responses": lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
            "messages": lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
        }
        pieces = [texts[path](event) for event in events]
        assert "".join(pieces) == said
        assert not any("\ufffd" in piece for piece in pieces)


async def test_halves_of_a_pair_from_another_server_make_one_character() -> None:
    def part(text: str, token: int, **more: Any) -> dict[str, Any]:
        sampled = {"token_ids": [token], "token_logprobs": [-1.0], **more}
        return {"prompt_token_ids": [7], "choices": [{"index": 0, "delta": {"content": text}, **sampled}]}

    async def answer(request: web.Request) -> web.Response:
        if (await request.json()).get("stream"):
            chunks = [part("a\ud83d", 1), part("\ude00", 2, finish_reason="stop")]
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            return web.Response(text="".join([*events, "data: [DONE]\n\n"]), content_type="text/event-stream")
        message = {"role": "assistant", "content": "a\ud83d\ude00\ud83d"}
        experts = {"shape": [1, 1, 1], "data": "AA=="}
        return web.json_response(part("", 1, finish_reason="stop", message=message, routed_experts=experts))

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    async with TestServer(application) as server, serving(lambda prompt: "") as at:
        at.engines.models = [InferenceModel("other", str(server.make_url("")).rstrip("/"), "other")]
        status, events = await ask(at, "chat/completions", stream=True)
        assert (status, [event["choices"][0]["delta"]["content"] for event in events]) == (200, ["a", "\U0001f600"])
        status, whole = await ask(at, "chat/completions")
        assert (status, whole["choices"][0]["message"]["content"]) == (200, "a\U0001f600\ufffd")
        assert whole["choices"][0].keys().isdisjoint({"token_ids", "token_logprobs", "routed_experts"})
        texts = [call.choices[0].text for session in at.store.ledger for call in session.calls.values()]
        assert sorted(texts) == ["a\U0001f600", "a\U0001f600\ufffd"]


async def test_a_long_request_is_read_beside_the_event_loop() -> None:
    before = set(threading.enumerate())

    def readers() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("tmq-body")]

    async with serving(lambda prompt: "5") as at:
        assert (await ask(at, "messages"))[0] == 200
        assert readers() == []
        refused = [*BODIES["messages"]["messages"] * 4000, {"role": "nobody"}]  # so that no engine reads it
        assert (await ask(at, "messages", messages=refused))[0] == 400
        assert readers() == ["tmq-body_0"]


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_calls_of_an_agent_are_counted(stream: bool) -> None:
    """A call without its end stays in the content, and the client is not told of the count."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    async with serving(lambda prompt: "<tool_call>\n{look}\n</tool_call>") as at:
        session = (await at.open())["id"]
        body = {"messages": [{"role": "user", "content": "Look."}], "tools": tools, "stream": stream}
        async with at.http.post(f"{at.url}/s/{session}/v1/chat/completions", json=body) as response:
            text = await response.text()
        assert (response.status, "{look}" in text, "malformed" in text) == (200, True, False)
        _, shown = await at.get(f"/s/{session}")
        calls = list(at.session(session).calls.values())
        assert (shown["malformed_calls"], at.app.counts["malformed_calls"]) == (1, 1)
        assert session_metrics(calls, 1)["session_malformed_calls"] == 1.0

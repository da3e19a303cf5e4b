"""The HTTP API with the real tiny model behind it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import torch

from tests.waiting import until
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.server.openai.requests import (
    MAX_BIASES,
    MAX_SCHEMA,
    MAX_SCHEMA_LEVELS,
    MIN_TOP_P,
    ChatBody,
    request_of,
)
from trinity_mq.engines.server.server import EngineServer
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import Experience
from trinity_mq.families.messages import MAX_TOOLS
from trinity_mq.models import (
    EngineClients,
    EngineNotReady,
    EngineRefused,
    ModelWrapper,
    VersionMismatch,
)
from trinity_mq.models.recording.responses import experiences_of
from trinity_mq.models.recording.sse import AnswerAssembler

Post = Callable[..., Any]
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = "response_format.json_schema.schema"
ANSWER = {"role": "assistant", "content": "1"}
CONTINUE, GENERATION = "continue_final_message", "add_generation_prompt"


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


@pytest.fixture
async def server(serving: Any, shared_generator: TextGenerator) -> AsyncIterator[EngineServer]:
    async with serving(shared_generator) as server:
        yield server


@pytest.fixture
async def post(server: EngineServer) -> AsyncIterator[Post]:
    async with aiohttp.ClientSession() as session:

        async def send(path: str, body: Any, **headers: str) -> tuple[int, Any]:
            async with session.post(server.url + path, json=body, headers=headers) as response:
                return response.status, await response.json()

        yield send


def question(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "+372="}], "max_tokens": 5, **options}


async def test_chat_in_openai_form(post: Post, shared_generator: TextGenerator, plain_logprobs: Any) -> None:
    status, answer = await post(
        "/v1/chat/completions", question(n=3, temperature=0.7, logprobs=True, return_token_ids=True, seed=1)
    )
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    prompt = shared_generator.codec.encode("+372=")
    assert answer["prompt_token_ids"] == prompt
    assert answer["prompt_text"] == "+372="
    sampled = 0
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in {"stop", "length"}
        ids, logprobs = choice["token_ids"], choice["token_logprobs"]
        sampled += len(ids)
        wanted = plain_logprobs(shared_generator, prompt, ids, 0.7)
        assert torch.allclose(torch.tensor(logprobs), wanted, atol=1e-5, rtol=0)
        content = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == logprobs
        assert [entry["token"] for entry in content] == [shared_generator.codec.decode([[token]])[0] for token in ids]
        assert all(
            bytes(entry["bytes"]).decode() == entry["token"] and entry["top_logprobs"] == [] for entry in content
        )
        assert choice["weight_versions"] == [[0, 1, 7]]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": sampled, "total_tokens": 5 + sampled}


@pytest.mark.parametrize(
    ("prompt", "count"), [("+372=", 1), ([12, 5, 9], 1), (["+1=", "+2="], 2), ([[12, 5], [13, 5, 6], [4]], 3)]
)
async def test_completions_take_every_form_of_prompt(post: Post, prompt: Any, count: int) -> None:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "n": 2,
        "max_tokens": 4,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": 3,
    }
    status, answer = await post("/v1/completions", body)
    assert status == 200
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == choice["token_logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(choice["token_ids"])
    assert answer["choices"][0]["prompt_token_ids"] == answer["choices"][1]["prompt_token_ids"]
    _, again = await post("/v1/completions", body)
    assert [choice["token_ids"] for choice in again["choices"]] == [choice["token_ids"] for choice in answer["choices"]]


async def test_two_equal_prompts_with_a_seed_are_sampled_differently(post: Post) -> None:
    body = {"prompt": ["+1=", "+1="], "max_tokens": 16, "return_token_ids": True, "seed": 3}
    _, answer = await post("/v1/completions", body)
    assert answer["choices"][0]["token_ids"] != answer["choices"][1]["token_ids"]


async def test_models_and_health(server: EngineServer) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/v1/models") as response:
            [model] = (await response.json())["data"]
        async with session.get(f"{server.url}/health") as response:
            health = await response.json()
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 64)
    assert health == {"status": "ok", "state": "current", "version": [1, 7], "load": 0}


@pytest.mark.parametrize(
    ("options", "status", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, 400, "tools.0", "has no name"),
        ({"tools": [{"type": "retrieval"}]}, 400, "tools.0", "wanted 'function'"),
        ({"tools": [TOOL]}, 400, None, "does not write tools"),
        ({"tools": [1]}, 400, "tools.0", "wanted 'function'"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, 400, "tools", "at most 128"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": 3}}]}, 400, "tools.0", "JSON schema"),
        ({"tool_choice": "required"}, 400, "tool_choice", "offers no tools"),
        ({"tool_choice": {"type": "function"}}, 400, "tool_choice", "wanted auto, none, required, or"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "rollout_model.engine to vllm"),
        ({"response_format": {"type": "grammar"}}, 400, "response_format", "wanted the type text, json_object, or"),
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, 400, "response_format", "wanted the type"),
        ({"response_format": schema({"enum": ["x" * MAX_SCHEMA]})}, 400, SCHEMA, f"at most {MAX_SCHEMA}"),
        ({"response_format": schema(nested(MAX_SCHEMA_LEVELS + 1))}, 400, SCHEMA, "flatten it"),
        ({"response_format": schema({"pattern": "(a{1,99}){1,99}"})}, 400, SCHEMA, "counted repetitions"),
        ({"response_format": schema({"patternProperties": {"a{9999}": {}}})}, 400, SCHEMA, "counted repetitions"),
        ({"response_format": schema({"enum": ["a{600}", "b{600}"]})}, 400, SCHEMA, "counted repetitions"),
        ({"response_format": schema({}), "ignore_eos": True}, 400, "ignore_eos", "combined with response_format"),
        ({"response_format": schema({}), "min_tokens": 2}, 400, "min_tokens", "combined with response_format"),
        ({"response_format": schema({}), "logit_bias": {"3": 1}}, 400, "logit_bias", "combined with response_format"),
        ({"logit_bias": {"3": 101}}, 400, "logit_bias.3", "less than or equal to 100"),
        ({"logit_bias": {"3": "nan"}}, 400, "logit_bias.3", "finite"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias.x.[key]", "valid integer"),
        ({"logit_bias": {"-1": 1}}, 400, "logit_bias.-1.[key]", "greater than or equal to 0"),
        ({"logit_bias": {"900": 1}}, 400, "logit_bias", "token id 900, the vocabulary has 0 to"),
        ({"logit_bias": {str(token): 1 for token in range(MAX_BIASES + 1)}}, 400, "logit_bias", "at most 300"),
        ({"min_tokens": 6}, 400, "min_tokens", "more than the 5 tokens"),
        ({"continue_final_message": True}, 400, CONTINUE, "needs an assistant's last message with text"),
        ({"continue_final_message": True, "messages": [ANSWER | {"content": ""}]}, 400, CONTINUE, "with text"),
        (
            {"continue_final_message": True, "messages": [ANSWER | {"reasoning_content": "x"}]},
            400,
            CONTINUE,
            "thoughts",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, 400, GENERATION, "leave one of them out"),
        ({"continue_final_message": True, "continue_tokens": [3]}, 400, "continue_tokens", "leave one of them out"),
        ({"add_generation_prompt": False}, 400, GENERATION, "the answer would have no turn"),
        ({"min_tokens": -1}, 400, "min_tokens", "greater than or equal to 0"),
        ({"ignore_eos": "maybe"}, 400, "ignore_eos", "valid boolean"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "leave it out (or send 0)"),
        ({"top_logprobs": 21}, 400, "top_logprobs", "less than or equal to 20"),
        ({"temprature": 1}, 400, "temprature", "unknown option 'temprature'"),
        ({"n": 0}, 400, "n", "greater than or equal to 1, got 0"),
        ({"n": 2000}, 400, "n", "max_batch_sequences=1024"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e-9}, 400, "temperature", "at least 0.001"),
        ({"top_p": 0}, 400, "top_p", f"greater than or equal to {MIN_TOP_P:.30f}"),
        ({"top_p": 1e-320}, 400, "top_p", f"greater than or equal to {MIN_TOP_P:.30f}"),
        ({"temperature": 1e300}, 400, "temperature", "less than or equal to 100"),
        ({"temperature": 10**40}, 400, "temperature", "an integer of 133 bits"),
        ({"seed": 10**40}, 400, "seed", "an integer of 133 bits"),
        ({"stop": ["x" * 1025]}, 400, "stop.0", "at most 1024 characters"),
        ({"stop": "\ud800"}, 400, "stop", "half a surrogate pair"),
        ({"stop": [""]}, 400, "stop.0", "at least 1 character"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"content": "x"}]}, 400, "messages.0.role", "wanted a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "text only"),
        ({"messages": [{"role": "user", "content": "a+b"}]}, 400, None, "holds 'ab', which the vocabulary"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "prompt", "is empty"),
        ({"model": "gpt-4"}, 404, "model", "this engine serves 'tiny'"),
    ],
)
async def test_what_is_not_served_is_refused_with_a_reason(
    post: Post, options: dict[str, Any], status: int, param: str | None, says: str
) -> None:
    found, answer = await post("/v1/chat/completions", question(**options))
    assert found == status
    assert says in answer["error"]["message"]
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "options", [{"tool_choice": "required"}, {"tool_choice": TOOL}, {"parallel_tool_calls": False}]
)
def test_calls_that_must_have_a_form_are_refused_with_the_way_to_get_them(
    options: dict[str, Any], shared_generator: TextGenerator
) -> None:
    body = request_of(question(tools=[TOOL], **options), ChatBody)
    form = body.answer_form(body.offered_tools())
    assert form is not None
    assert (form.must_call, form.parallel) == ("tool_choice" in options, options.get("tool_choice") == "required")
    with pytest.raises(ApiError, match=r"explorer\.rollout_model\.engine to vllm, or leave") as refused:
        shared_generator.grammar_of(form, "")
    assert (refused.value.status, refused.value.param) == (400, next(iter(options)))


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "not among the offered tools",
        ),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": 'f"'}}]},
            "tools.0.function.name",
            "can only be promised to a name",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "cannot be combined with tool_choice",
        ),
    ],
)
def test_forms_that_contradict_the_request_are_refused(options: dict[str, Any], param: str, says: str) -> None:
    body = request_of(question(**{"tools": [TOOL], **options}), ChatBody)
    with pytest.raises(ApiError, match=says) as refused:
        body.answer_form(body.offered_tools())
    assert refused.value.param == param


async def test_the_likeliest_tokens_come_with_each_token(
    post: Post, server: EngineServer, shared_generator: TextGenerator
) -> None:
    options = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True, "seed": 1, "max_tokens": 4}
    _, answer = await post("/v1/chat/completions", question(**options, temperature=0.7))
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    logits = shared_generator.model(torch.tensor([[*answer["prompt_token_ids"], *choice["token_ids"]]])).logits[0]
    expected = torch.log_softmax(logits[len(answer["prompt_token_ids"]) - 1 : -1] / 0.7, -1).topk(3)
    for entry, values, tokens in zip(content, expected.values.tolist(), expected.indices.tolist(), strict=True):
        assert [top["token"] for top in entry["top_logprobs"]] == shared_generator.codec.decode([[t] for t in tokens])
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(values, abs=1e-5)
    async with aiohttp.ClientSession() as session:
        body = question(**options, temperature=0.7, stream=True)
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            lines = (await response.text()).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    assert [entry for part in parts if part for entry in part["content"]] == content
    _, answer = await post("/v1/completions", {"prompt": "+372=", "logprobs": 2, "max_tokens": 3})
    logprobs = answer["choices"][0]["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * len(logprobs["tokens"])
    assert all(list(top.values()) == sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_special_token_in_a_stop_string_counts_as_its_text(server: EngineServer, stream: bool) -> None:
    """Families write marks such as the end of a call as single tokens."""
    pad = 0
    body = question(stop=["<pad>"], logit_bias={str(pad): 100}, max_tokens=5, return_token_ids=True, stream=stream)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/chat/completions", json=body) as response,
    ):
        text = await response.text()
    if stream:
        assembled = AnswerAssembler()
        for line in text.splitlines():
            if line.startswith("data: {"):
                assembled.add(json.loads(line[6:]))
        [choice] = assembled.answer()["choices"]
    else:
        [choice] = json.loads(text)["choices"]
    assert (choice["token_ids"], choice["message"]["content"]) == ([pad], "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<pad>")


async def test_neutral_and_ignored_options_are_taken(post: Post) -> None:
    harmless = {
        "stream": False,
        "tools": [],
        "presence_penalty": 0,
        "user": "me",
        "metadata": {"a": "b"},
        "stop": None,
        "top_k": -1,
    }
    status, _ = await post("/v1/chat/completions", question(**harmless, response_format={"type": "text"}))
    assert status == 200


async def test_a_prompt_too_long_teaches_and_says_which_tokens(post: Post) -> None:
    long = question(messages=[{"role": "user", "content": "1" * 80}])
    status, answer = await post("/v1/chat/completions", long)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "80 tokens, 63 are allowed" in answer["error"]["message"]
    status, answer = await post("/v1/chat/completions", question(max_prompt_tokens=3))
    assert status == 400
    assert answer["error"]["limit"] == 3
    assert len(answer["error"]["prompt_token_ids"]) == 4


async def test_max_tokens_beyond_the_window_ends_with_length(post: Post) -> None:
    body = {"prompt": [[3] * 60], "max_tokens": 100, "n": 16, "return_token_ids": True, "seed": 0}
    _, answer = await post("/v1/completions", body)
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    assert max(lengths) == 4
    _, least = await post("/v1/completions", {**body, "min_tokens": 8})
    assert {len(choice["token_ids"]) for choice in least["choices"]} == {4}, "as many as fit"
    _, short = await post("/v1/chat/completions", question(max_tokens=None, max_completion_tokens=2, seed=0, n=16))
    assert short["usage"]["completion_tokens"] <= 32
    assert {c["finish_reason"] for c in answer["choices"] if len(c["token_ids"]) == 4 and c["token_ids"][-1] != 1} == {
        "length"
    }


async def test_bodies_that_are_no_json_and_routes_that_are_not_there(server: EngineServer) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{server.url}/v1/chat/completions", data=b"{") as response:
            assert response.status == 400
            assert "not JSON" in (await response.json())["error"]["message"]
        async with session.post(f"{server.url}/v1/chat/completions", json=[1]) as response:
            assert "a list, wanted a JSON object" in (await response.json())["error"]["message"]
        async with session.get(f"{server.url}/v1/nope") as response:
            assert response.status == 404
            assert response.content_type == "application/json"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Authorization": "Bearer \u00ff"}, 200),
    ],
)
async def test_what_a_web_page_can_send_is_refused(server: EngineServer, headers: dict[str, str], status: int) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/chat/completions", json=question(), headers=headers) as response,
    ):
        assert response.status == status, await response.text()


async def test_a_client_that_hangs_up_before_its_round_costs_nothing(server: EngineServer) -> None:
    server.state.pause(60.0)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(session.post(f"{server.url}/v1/chat/completions", json=question(n=4)))
        await until(lambda: server.batcher.load > 0)
        asked.cancel()
        await asyncio.wait({asked})
    server.state.resume()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/chat/completions", json=question()) as response,
    ):
        assert response.status == 200
    assert server.batcher.counters.sequences == 1


async def test_what_cannot_be_streamed_is_refused_with_a_status(post: Post) -> None:
    status, answer = await post("/v1/completions", {"prompt": ["1", "2"], "stream": True})
    assert status == 400
    assert "stream one prompt a request" in answer["error"]["message"]
    status, answer = await post("/v1/chat/completions", question(stream=True), **{"X-TMQ-Version": "1.6"})
    assert (status, answer["error"]["code"]) == (409, "version_mismatch")
    status, answer = await post("/v1/chat/completions", question(), **{"X-TMQ-Version": "latest"})
    assert status == 400
    assert "wanted generation.step" in answer["error"]["message"]
    status, answer = await post("/v1/tokenize", {})
    assert (status, answer["error"]["message"]) == (400, "give either prompt or messages")
    status, answer = await post("/v1/chat/completions", question(stream=True, stream_options={"include_usage": "x"}))
    assert (status, answer["error"]["param"]) == (400, "stream_options.include_usage")


# -- the wrapper that workflows are handed


MESSAGES = [{"role": "user", "content": "+372="}]
Wrap = Callable[..., ModelWrapper]


@pytest.fixture
def wrap(server: EngineServer, handle_of: Any, clients: EngineClients) -> Wrap:
    return lambda **options: ModelWrapper(
        handle_of(server), **{"clients": clients, "max_response_tokens": 6, **options}
    )


def same(left: list[Experience], right: list[Experience]) -> bool:
    return [e.tokens.tolist() for e in left] == [e.tokens.tolist() for e in right]


async def test_chat_gives_experiences_with_everything_the_trainer_needs(
    wrap: Wrap, shared_generator: TextGenerator, plain_logprobs: Any
) -> None:
    model = wrap(temperature=0.7, seed=1)
    experiences = await model.chat_async(MESSAGES, n=16)
    assert len(experiences) == 16
    prompt = shared_generator.codec.encode("+372=")
    for experience in experiences:
        response = experience.tokens[5:].tolist()
        assert experience.tokens[:5].tolist() == prompt
        assert experience.prompt_length == 5
        assert experience.prompt_text == "+372="
        assert experience.response_text == shared_generator.codec.decode([[t for t in response if t != 1]])[0]
        assert experience.experience_type == "single_turn"
        assert experience.temperature == 0.7
        assert experience.versions == [(0, 1, 7)]
        assert experience.reward is None
        assert experience.truncate_status == (None if response[-1] == 1 else "response_truncated")
        assert experience.logprobs is not None
        wanted = plain_logprobs(shared_generator, prompt, response, 0.7)
        assert torch.allclose(experience.logprobs, wanted, atol=1e-5, rtol=0)
    assert model.model_version == (1, 7)
    assert (model.model_name, model.model_path) == ("tiny", "/models/tiny")
    assert len({experience.eid.uid for experience in experiences}) == 16
    assert Experience.deserialize_many(Experience.serialize_many(experiences)) == experiences


@pytest.mark.parametrize("client", [False, True])
async def test_an_answer_that_is_begun_is_continued(
    wrap: Wrap, shared_generator: TextGenerator, plain_logprobs: Any, client: bool
) -> None:
    model = wrap(seed=1, enable_history=True)
    begun = [*MESSAGES, {"role": "assistant", "content": "12"}]
    if client:
        flags = {"continue_final_message": True, "add_generation_prompt": False}
        async with model.get_openai_async_client() as openai:
            await openai.chat.completions.create(model="tiny", messages=begun, n=4, extra_body=flags)
    else:
        await model.chat_async(begun, n=4)
    prompt = shared_generator.codec.encode("+372=12")
    for experience in model.extract_experience_from_history():
        response = experience.tokens[len(prompt) :].tolist()
        assert experience.tokens[: experience.prompt_length].tolist() == prompt, "the beginning is not sampled"
        assert (experience.prompt_text, experience.action_mask.tolist()) == ("+372=12", [True] * len(response))
        assert experience.response_text == shared_generator.codec.decode([[t for t in response if t != 1]])[0]
        wanted = plain_logprobs(shared_generator, prompt, response, 1.0)
        assert torch.allclose(experience.logprobs, wanted, atol=1e-5, rtol=0)


async def test_a_call_of_the_assistant_is_not_continued(wrap: Wrap) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(EngineRefused, match="does not write tool calls"):  # the template, which gets the whole message
        await wrap().chat_async([*MESSAGES, {"role": "assistant", "content": "1", "tool_calls": [call]}])


async def test_a_seeded_run_repeats_itself_call_by_call(wrap: Wrap) -> None:
    first, second = wrap(seed=5), wrap(seed=5)
    ones = [await first.chat_async(MESSAGES, n=4) for _ in range(2)]
    twos = [await second.chat_async(MESSAGES, n=4) for _ in range(2)]
    assert all(same(one, two) for one, two in zip(ones, twos, strict=True))
    assert not same(ones[0], ones[1]), "each call has a seed of its own"
    assert not same(ones[0], await wrap(seed=6).chat_async(MESSAGES, n=4))
    clones = [first.clone_with_isolated_history(), first.clone_with_isolated_history()]
    said = [await clone.chat_async(MESSAGES, n=4) for clone in clones]
    assert not same(said[0], said[1])


async def test_parameters_of_a_call_beat_rollout_args_beat_the_wrappers_own(wrap: Wrap) -> None:
    model = wrap(rollout_args={"max_tokens": 2, "n": 2, "temperature": 0.5})
    experiences = await model.chat_async(MESSAGES)
    assert len(experiences) == 2
    assert max(e.response_length for e in experiences) <= 2
    assert {e.temperature for e in experiences} == {0.5}
    [greedy] = await model.chat_async(MESSAGES, n=1, temperature=0)
    assert greedy.temperature == 1.0, "at temperature 0 the logprobs are those of temperature 1"


async def test_logprobs(wrap: Wrap, shared_generator: TextGenerator, plain_logprobs: Any) -> None:
    tokens = [3, 4, 5, 6]
    model = wrap(temperature=0.7)
    for temperature, found in (
        (0.7, await model.logprobs_async(tokens)),
        (1.0, await model.logprobs_async(tokens, 1.0)),
        (0.7, await asyncio.to_thread(model.logprobs, torch.tensor(tokens))),
    ):
        assert found.dtype == torch.float32
        wanted = plain_logprobs(shared_generator, tokens[:1], tokens[1:], temperature)
        assert torch.allclose(found, wanted, atol=1e-5, rtol=0)
    with pytest.raises(EngineRefused, match="token id 99, the vocabulary has 0 to 15"):
        await model.logprobs_async([3, 99])


async def test_convert_messages_to_experience(wrap: Wrap, shared_generator: TextGenerator, plain_logprobs: Any) -> None:
    conversation = [
        {"role": "user", "content": "+12="},
        {"role": "assistant", "content": "22"},
        {"role": "user", "content": "-12="},
        {"role": "assistant", "content": "1"},
    ]
    model = wrap(temperature=0.7)
    experience = await model.convert_messages_to_experience_async(conversation)
    assert experience == _with_eid(
        experience, await asyncio.to_thread(model.convert_messages_to_experience, conversation)
    )
    tokens = [*shared_generator.codec.encode("+12=22-12=1"), shared_generator.codec.end_id]
    assert experience.tokens.tolist() == tokens
    assert experience.prompt_length == 4
    assert experience.experience_type == "multi_turn"
    assert experience.action_mask is not None
    assert experience.action_mask.tolist() == [True, True, False, False, False, False, True, True]
    assert experience.logprobs is not None
    assert torch.allclose(
        experience.logprobs, plain_logprobs(shared_generator, tokens[:4], tokens[4:], 0.7), atol=1e-5, rtol=0
    )
    assert experience.messages == conversation
    assert experience.versions == [(0, 1, 7)]
    assert experience.temperature == 0.7
    assert experience.truncate_status is None
    long = [*conversation, {"role": "assistant", "content": "1" * 80}]
    cut = await model.convert_messages_to_experience_async(long)
    assert cut.truncate_status == "response_truncated"
    assert len(cut.tokens) == 64
    with pytest.raises(ValueError, match="no token of the assistant"):
        await model.convert_messages_to_experience_async(conversation[:1])


async def test_a_conversation_whose_prompt_is_too_long_is_masked_where_that_is_wanted(wrap: Wrap) -> None:
    conversation = [{"role": "user", "content": "+12="}, {"role": "assistant", "content": "22"}]
    for limit, status in ((4, None), (3, "prompt_truncated")):
        model = wrap(max_prompt_tokens=limit, enable_prompt_truncation=True)
        experience = await model.convert_messages_to_experience_async(conversation)
        assert experience == _with_eid(
            experience, await asyncio.to_thread(model.convert_messages_to_experience, conversation)
        )
        assert (experience.truncate_status, experience.messages) == (status, conversation)
    assert experience.action_mask is not None
    assert (experience.prompt_length, len(experience.tokens), experience.action_mask.tolist()) == (3, 4, [False])
    whole = await wrap(max_prompt_tokens=3).convert_messages_to_experience_async(conversation)
    assert whole.truncate_status is None


def _with_eid(source: Experience, target: Experience) -> Experience:
    target.eid = source.eid
    return target


async def test_an_engine_without_weights_is_waited_for(
    serving: Any, shared_generator: TextGenerator, handle_of: Any, clients: EngineClients
) -> None:
    async with serving(shared_generator, version=None) as server:
        impatient = ModelWrapper(handle_of(server), clients=clients, not_ready_timeout=0.0, enable_history=True)
        with pytest.raises(EngineNotReady, match="waits for its first weights") as caught:
            await impatient.chat_async(MESSAGES)
        assert caught.value.retry_after == 1.0
        async with impatient.get_openai_async_client() as client:
            with pytest.raises(EngineNotReady):
                await client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        asked = asyncio.create_task(ModelWrapper(handle_of(server), clients=clients).chat_async(MESSAGES))
        await asyncio.sleep(0.1)
        assert not asked.done()
        server.state.phase, server.state.version = "current", (1, 7)
        assert len(await asked) == 1


async def test_pins_and_refusals(wrap: Wrap) -> None:
    assert await wrap(pinned=(1, 7)).chat_async(MESSAGES)
    for ask in (
        lambda: wrap(pinned=(1, 6)).chat_async(MESSAGES),
        lambda: asyncio.to_thread(wrap(pinned=(1, 6)).chat, MESSAGES),
    ):
        with pytest.raises(VersionMismatch) as caught:
            await ask()
        assert (caught.value.wanted, caught.value.held) == ((1, 6), (1, 7))
    with pytest.raises(EngineRefused, match="unknown option 'temprature'") as refused:
        await wrap().chat_async(MESSAGES, temprature=1)
    assert refused.value.status == 400


@pytest.mark.parametrize("value", ["null", "NaN", "-Infinity", "Infinity", "-9999.0"])
def test_a_token_without_a_finite_logprob_costs_no_answer(value: str) -> None:
    """As JSON holds it, streamed or not; -9999 is what vLLM writes for minus infinity."""
    sampled = {"token_ids": [5, 6, 7], "token_logprobs": [-1.5, json.loads(value), -0.5], "finish_reason": "stop"}
    whole = {"index": 0, "message": {"content": "1"}, **sampled}
    gathered = AnswerAssembler()
    gathered.add({"prompt_token_ids": [3, 4], "choices": [{**whole, "delta": {"content": "1"}}]})
    for answer in ({"prompt_token_ids": [3, 4], "choices": [whole]}, gathered.answer()):
        [found] = experiences_of(answer, 1.0)
        assert found.experience_type == "single_turn"
        assert found.tokens.tolist() == [3, 4, 5, 6, 7]
        assert found.action_mask is not None
        assert found.logprobs is not None
        assert found.action_mask.tolist() == [True, False, True]
        assert found.logprobs.tolist() == [-1.5, 0.0, -0.5]
        assert found.metrics == {"unknown_logprobs:sum": 1}
        assert Experience.deserialize(found.serialize()) == found

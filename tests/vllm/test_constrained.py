"""Answers of a form that the request demands, sampled by vLLM from a model with random weights."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from trinity_mq.families.family import Family
from trinity_mq.families.forms import AnswerForm, FormError, grammar_of
from trinity_mq.families.table import FAMILIES, family_of
from trinity_mq.models.recording.responses import experiences_of

from .conftest import Engine, new_weights

QUESTION = [{"role": "user", "content": "2+3?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["kind", "sizes", "is_new"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "deep": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def ask(engine: Engine, status: int = 200, **body: Any) -> dict[str, Any]:
    defaults = {"messages": QUESTION, "max_tokens": 240, "temperature": 1.0, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=engine.url, timeout=60.0) as client:
        response = await client.post("/v1/chat/completions", json={**defaults, **body})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture
async def model(waiting: Engine) -> Any:
    model = new_weights(waiting.started.folder, 20)
    await waiting.sync(model, (1, 20))
    return model


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
async def test_a_random_model_writes_json_of_the_schema(waiting: Engine, temperature: float) -> None:
    answer = await ask(waiting, response_format=FORMAT, n=6, temperature=temperature)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        content = json.loads(choice["message"]["content"])
        assert content.keys() == {"kind", "sizes", "is_new"}
        assert content["kind"] in {"red", "green"}
        assert len(content["sizes"]) <= 3
        assert all(type(size) is int and 1 <= size <= 9 for size in content["sizes"])
        assert type(content["is_new"]) is bool


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_tool_is_called_once_with_arguments_of_its_schema(waiting: Engine, stream: bool) -> None:
    body = {"tools": [tool("add"), tool("sub")], "tool_choice": {"type": "function", "function": {"name": "sub"}}}
    if stream:
        async with httpx.AsyncClient(base_url=waiting.url, timeout=60.0) as client:
            sent = {"messages": QUESTION, "max_tokens": 240, "stream": True, **body}
            lines = (await client.post("/v1/chat/completions", json=sent)).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    else:
        [choice] = (await ask(waiting, **body))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        calls = choice["message"]["tool_calls"]
    [call] = calls
    assert call["function"]["name"] == "sub"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["a"] in {1, 2}
    assert type(arguments.get("deep", True)) is bool


@pytest.mark.usefixtures("model")
async def test_a_required_call_may_be_of_any_tool_and_is_single_without_parallel_calls(waiting: Engine) -> None:
    answer = await ask(
        waiting, tools=[tool("add"), tool("sub")], tool_choice="required", parallel_tool_calls=False, n=12
    )
    names = [[call["function"]["name"] for call in choice["message"]["tool_calls"]] for choice in answer["choices"]]
    assert {len(called) for called in names} == {1}
    assert {name for called in names for name in called} == {"add", "sub"}


async def test_tokens_that_the_schema_decided_are_not_trained_on_and_the_others_are_the_models(
    waiting: Engine, model: Any
) -> None:
    """The logprobs of an answer are of the allowed tokens; those without a mark are the model's own, nearly."""
    answer = await ask(waiting, response_format=FORMAT, logprobs=True, n=8)
    prompt = answer["prompt_token_ids"]
    marked = 0
    for choice, experience in zip(answer["choices"], experiences_of(answer, 1.0), strict=True):
        tokens = torch.tensor([[*prompt, *choice["token_ids"]]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        free = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()
        sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        for place, number in enumerate(choice["token_logprobs"]):
            assert sampled[place] >= free[place] - 1e-3
            is_decided = sampled[place] - free[place] > math.log(1 / 0.95)
            assert (number is None) == is_decided
            assert number is None or number == sampled[place]
            assert experience.action_mask is None or bool(experience.action_mask[place]) == (not is_decided)
            marked += is_decided
    assert marked > 8 * 10, "a random model is led through nearly all of the schema"


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("schema", "says"), [({"type": "bogus"}, "is refused: vLLM answered 400"), ({"properties": 3}, "is refused")]
)
async def test_a_schema_without_meaning_is_refused_and_the_engine_goes_on(
    waiting: Engine, schema: dict[str, Any], says: str
) -> None:
    body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await ask(waiting, 400, response_format=body)
    assert says in answer["error"]["message"]
    assert answer["error"]["code"] == "invalid_schema"
    await ask(waiting, response_format={"type": "json_object"}, max_tokens=8)


@pytest.mark.parametrize("stream", [False, True])
async def test_bias_minimum_and_likeliest_tokens_are_as_on_our_own_engine(
    waiting: Engine, model: Any, stream: bool
) -> None:
    bias = {5: 3.0, 1: 100.0}
    body = {"logit_bias": {str(token): value for token, value in bias.items()}, "min_tokens": 4, "top_logprobs": 3}
    body |= {"logprobs": True, "temperature": 0.8, "stop": ["\x00never"]} if stream else {"logprobs": True}
    temperature = body.get("temperature", 1.0)
    answer = await ask(waiting, **body)
    [choice] = answer["choices"]
    prompt, tokens = answer["prompt_token_ids"], choice["token_ids"]
    assert (len(tokens), tokens[-1], choice["finish_reason"]) == (5, 1, "stop")
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    for token, value in bias.items():
        logits[:, token] += value
    logits[:4, 1] = -math.inf
    logprobs = (logits / temperature).log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(choice["token_logprobs"]), expected, atol=1e-3, rtol=0)
    for entry, values in zip(choice["logprobs"]["content"], logprobs.topk(3).values.tolist(), strict=True):
        reported = [top["logprob"] for top in entry["top_logprobs"]]
        assert reported == pytest.approx([value for value in values if value > -9999][: len(reported)], abs=1e-3)
        assert reported


@pytest.mark.usefixtures("model")
async def test_an_ignored_end_does_not_end_the_answer(waiting: Engine) -> None:
    answer = await ask(waiting, logit_bias={"1": 100}, ignore_eos=True, max_tokens=6)
    assert (answer["choices"][0]["token_ids"], answer["choices"][0]["finish_reason"]) == ([1] * 6, "length")


# -- grammars without a model

THINKS = "{{ '<think>' }}"
HERMES = family_of("")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = CALL.replace("add", "sub")
TOOLS = (tool("add"), tool("sub"))
ANSWER = AnswerForm("response_format", {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]})
REQUIRED = AnswerForm("tool_choice", tools=TOOLS, must_call=True)
SINGLE = AnswerForm("tool_choice", tools=TOOLS, must_call=True, parallel=False)
AT_MOST_ONE = AnswerForm("parallel_tool_calls", tools=TOOLS, parallel=False)


@pytest.mark.parametrize(
    ("form", "template", "prompt", "accepted", "refused"),
    [
        (ANSWER, "", "", ['{"n": 1}'], ['{"n": 2}', '{"n": 1} and', "<think>\nx</think>{}", ""]),
        (ANSWER, THINKS, "", ['{"n": 1}', '<think>\na {"n": 2}</think>\n\n{"n": 1}'], ["<think>a", "a</think>"]),
        (ANSWER, THINKS, "<think>\n", ['a</think>\n\n{"n": 1}'], ['{"n": 1}', '<think>a</think>{"n": 1}']),
        (ANSWER, THINKS, "<think>\n\n</think>\n\n", ['{"n": 1}'], ['<think>a</think>{"n": 1}']),
        (
            SINGLE,
            "",
            "",
            [CALL, OTHER],
            ["text", CALL + "\n" + CALL, CALL.replace("1", "7")],
        ),
        (REQUIRED, "", "", [CALL, CALL + "\n" + OTHER], ["text", CALL[:-3]]),
        (REQUIRED, THINKS, "<think>\n", ["a</think>\n\n" + CALL], [CALL]),
        (AT_MOST_ONE, "", "", ["text", "text" + CALL, CALL], [CALL + CALL, CALL + "text" + OTHER]),
    ],
)
def test_a_grammar_takes_the_texts_of_its_form_alone(
    form: AnswerForm, template: str, prompt: str, accepted: list[str], refused: list[str]
) -> None:
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string

    grammar = Grammar.from_structural_tag(grammar_of(form, HERMES, template, prompt))
    assert [text for text in accepted if not _is_grammar_accept_string(grammar, text)] == []
    assert [text for text in refused if _is_grammar_accept_string(grammar, text)] == []


def byte_tokenizer() -> Any:
    """Return a tokenizer with a token for each byte, and an end of sequence."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sampled_texts(tag: str, count: int) -> Iterator[str]:
    """Yield texts whose bytes are drawn at random from those that the grammar allows."""
    import xgrammar

    tokenizer = byte_tokenizer()
    size, end = len(tokenizer), tokenizer.eos_token_id
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=[end])
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
    mask = xgrammar.allocate_token_bitmask(1, size)
    for seed in range(count):
        draw, matcher, tokens = random.Random(seed), xgrammar.GrammarMatcher(grammar), []
        while not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask)
            allowed = [token for token in range(size) if (int(mask[0, token // 32]) >> (token % 32)) & 1]
            tokens.append(draw.choice(allowed))
            assert matcher.accept_token(tokens[-1])
        yield tokenizer.decode(tokens[:-1])


@pytest.mark.parametrize("family", [row for row in FAMILIES if row.grammar], ids=lambda row: row.name)
def test_every_call_that_a_grammar_lets_through_is_read_as_that_call(family: Family) -> None:
    """Whatever a model samples under the grammar, the reader of its family finds the call in it."""
    if family.library:
        pytest.importorskip("renderers")
    texts = list(sampled_texts(grammar_of(SINGLE, family, "", ""), 20))
    names = set()
    for text in texts:
        [call] = family.read(text, "", TOOLS).calls
        names.add(call["function"]["name"])
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["a"] in {1, 2}
        assert type(arguments.get("deep", True)) is bool
        assert arguments.keys() <= {"a", "deep"}
    assert names == {"add", "sub"}
    assert len(set(texts)) > 10


@pytest.mark.parametrize("family", [row for row in FAMILIES if not row.grammar], ids=lambda row: row.name)
def test_calls_of_other_families_are_refused_with_a_reason(family: Family) -> None:
    with pytest.raises(FormError, match=f"cannot be promised for the model family {family.name}, whose calls have no"):
        grammar_of(SINGLE, family, "", "")

"""Experiences are what engines read and sampled: random conversations through the real gateway and the real engine
server, compared with what a witness saw in front of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.faithful import (
    DISCOUNT,
    LAST_REWARD,
    TAG,
    TEXTS,
    TOOLS,
    Agent,
    Sampled,
    Step,
    Witness,
    check,
    check_rewards,
    steps,
    user,
)
from tests.golden.families.makers import SOURCES, tokenizer_of, vocabulary_of
from tests.golden.families.proofs import TOOL_PROOFS
from tests.unit.gateway.serving import Serving, serving, serving_config
from tests.unit.models.conftest import built
from trinity_mq.config import ModelConfig
from trinity_mq.engines.generation.text import TextCodec, TextError
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.messages import Version
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.testing.scripted import CHAT_TEMPLATE, ScriptedGenerator, byte_codec, written_answer
from trinity_mq.workflows.sessions.assembly import session_experiences

CUTTING = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
"""A template that leaves out the thoughts of earlier turns."""
MERGES, SHARED = ("renderer", "prefix", "per_call"), ("first", "last", "mean")
REWRITE_THOUGHTS = {
    *("deepseek-r1", "deepseek-r1-distill", "glm4.5", "glm4.6", "glm4.7", "gpt-oss", "minimax-m2", "nemotron-3"),
    *("qwen3", "qwen3-thinking-2507", "qwen3.5", "qwen3.6"),
}
"""Templates that leave out the thoughts of an answer once the user speaks again: that turn begins an experience."""
REWRITE_ANSWERS = {
    *("deepseek-r1", "deepseek-r1-distill", "glm4.7", "minimax-m2", "nemotron-3"),  # they open thoughts in every prompt
    "gpt-oss",  # an answer ends with <|return|>, and in later prompts with <|end|>
}
"""Templates that write an earlier answer in another form, also without thoughts of the model."""


@functools.cache
def codec_of(family: str) -> TextCodec:
    """Return the tokens and the template of a family."""
    if family in {"chatml", "cutting"}:
        return byte_codec(CUTTING if family == "cutting" else CHAT_TEMPLATE)
    tokenizer = tokenizer_of(family)
    return TextCodec(tokenizer, frozenset(map(tokenizer.convert_tokens_to_ids, vocabulary_of(family).ends)))


def written(codec: TextCodec, message: dict[str, Any], prompt: str) -> str:
    """Return what a model samples for a message, as its template writes it."""
    thoughts = message.get("reasoning_content", "so")
    for parts in (message, {"reasoning_content": thoughts, **message}, {"content": message["content"]}):
        with contextlib.suppress(TextError, ValueError):
            return written_answer(codec, parts, prompt)
    opened = prompt.rstrip().endswith("<think>")  # templates that write no thoughts, not even those of the last answer
    return f"{thoughts}\n</think>\n\n{message['content']}" if opened else str(message["content"])


def look(number: int, what: str) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": "look", "arguments": {"what": what}}}


class Writer:
    """Writes answers in the format of a family, as its template writes them.

    Args:
        codec: Template and tokens of the family.
        texts: What the answers say, in turn.
        are_distinct: No two answers are equal.
    """

    def __init__(self, codec: TextCodec, texts: Sequence[str], *, are_distinct: bool) -> None:
        self._codec = codec
        self._answers = enumerate(itertools.cycle(texts))
        self._are_distinct = are_distinct

    def __call__(self, prompt: str) -> str:
        number, text = next(self._answers)
        if self._are_distinct:
            text = f"{number}{text}"
        message: dict[str, Any] = {"content": text}
        if number % 5 == 1:
            message["reasoning_content"] = f"I think {text}"
        if number % 4 == 2:
            message["tool_calls"] = [look(number, text)]
        return written(self._codec, message, prompt)


@contextlib.asynccontextmanager
async def engine(generator: Any) -> AsyncIterator[tuple[InferenceModel, Witness]]:
    """Serve a generator behind a witness, whose ``renew`` counts the version of the weights up."""

    def version() -> Version:
        assert server.state.version is not None
        return server.state.version

    def renew() -> None:
        server.state.version = (1, version()[1] + 1)

    witness = Witness(generator, version, renew)
    server = EngineServer(
        witness, ServerSettings(engine_id="e0", model_name="m", model_path="", token="t"), _no_weights
    )
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(lambda url: ready.set()))
        await ready.wait()
        server.state.phase, server.state.version = "current", (1, 0)
        try:
            yield InferenceModel("m", server.url, "m", version=(1, 0)), witness
        finally:
            server.stop("the test is over")


async def _no_weights(*_: Any) -> Any:
    raise RuntimeError("these engines take no weights")


async def prove(generator: Any, plan: Sequence[Step], *, merge: str, shared_prefix: str) -> tuple[Serving, Agent]:
    """Do the plan in two sessions, and compare the experiences of each with what the witness saw."""
    config = serving_config(
        gateway={"merge": merge, "sampling": "agent", "shared_prefix": shared_prefix, "calls_per_minute": 10_000}
    )
    async with serving((), config=config, server=lambda _: engine(generator)) as at:
        names = [(await at.open())["id"] for _ in range(2)]
        witness: Any = at.generator
        agent = Agent(at, names, witness.renew)
        await agent.do(plan)
        for name in names:
            sampled = [answer for answer in witness.sampled if agent.session_of[answer.tag] == name]
            compare(at, name, sampled, agent, merge=merge, shared_prefix=shared_prefix)
    return at, agent


def compare(at: Serving, session: str, sampled: Sequence[Sampled], agent: Agent, **options: Any) -> tuple[int, bool]:
    """Compare the experiences of a session with what the witness saw.

    Returns:
        The number of experiences, and whether their rewards could be compared.
    """
    calls = list(at.session(session).calls.values())
    experiences = session_experiences(calls, reward=1.0, call_rewards={}, turn_discount=1.0, **options)
    check(experiences, sampled, agent.thrown_away, agent.group_of, **options)
    turns = session_experiences(
        calls, reward=LAST_REWARD, call_rewards={}, turn_discount=DISCOUNT, **{**options, "merge": "per_call"}
    )
    credit = options["shared_prefix"]
    is_compared = check_rewards(turns, sampled, agent.thrown_away, agent.group_of, shared_prefix=credit)
    return len(experiences), is_compared


@pytest.mark.timeout(300)
@settings(max_examples=examples(160), deadline=None)
@given(
    family=st.sampled_from(["chatml", "cutting", *SOURCES]),
    plan=steps(),
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    merge=st.sampled_from(MERGES),
    shared_prefix=st.sampled_from(SHARED),
    are_distinct=st.booleans(),
)
def test_experiences_are_what_the_scripted_engine_read_and_sampled(
    family: str, plan: list[Step], texts: list[str], merge: str, shared_prefix: str, are_distinct: bool
) -> None:
    codec = codec_of(family)
    generator = ScriptedGenerator(Writer(codec, texts, are_distinct=are_distinct), codec=codec)
    asyncio.run(prove(generator, plan, merge=merge, shared_prefix=shared_prefix))


async def test_equal_conversations_of_two_sessions_do_not_mix() -> None:
    turns = [Step("turn", session, 0, text) for text in ("a", "b") for session in (0, 1)]
    codec = codec_of("chatml")
    at, agent = await prove(
        ScriptedGenerator(lambda prompt: "the same", codec=codec), turns, merge="renderer", shared_prefix="first"
    )
    for name in agent.sessions:
        first, second = at.session(name).calls.values()
        assert (first.continues, second.continues) == ("", first.call)


LETTERS = "abcd;"
TINY = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% else %};{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def random_generator(tmp_path_factory: pytest.TempPathFactory) -> TextGenerator:
    """A model with random weights and few tokens, so that the end of a response is often sampled."""
    tiny = {"characters": LETTERS, "chat_template": TINY, "max_position_embeddings": 512}
    config = ModelConfig.model_validate(
        {"tiny": tiny, "max_model_len": 512, "max_prompt_tokens": 400, "max_response_tokens": 24}
    )
    return built(config, ensure_model_folder(config, tmp_path_factory.mktemp("random") / "model", 0))


@pytest.mark.timeout(300)
@settings(max_examples=examples(40), deadline=None)
@given(
    plan=steps(st.text("abcd", min_size=1, max_size=5)), merge=st.sampled_from(MERGES), shared=st.sampled_from(SHARED)
)
def test_experiences_are_what_the_torch_engine_read_and_sampled(
    random_generator: TextGenerator, plan: list[Step], merge: str, shared: str
) -> None:
    without_tools = [replace(step, tools=False) for step in plan]
    asyncio.run(prove(random_generator, without_tools, merge=merge, shared_prefix=shared))


class Turns:
    """What a model says to a caller of sub-agents.

    Args:
        codec: Template and tokens of its family.
        kind: ``plain``, ``tools`` or ``thoughts``.
    """

    def __init__(self, codec: TextCodec, kind: str) -> None:
        self._codec, self._kind, self._number = codec, kind, itertools.count(1)

    def __call__(self, prompt: str) -> str:
        number = next(self._number)
        message: dict[str, Any] = {"content": f"answer {number}"}
        if self._kind == "thoughts":
            message["reasoning_content"] = f"thought {number}"
        if self._kind == "tools" and number == 1:
            message |= {"content": "", "tool_calls": [look(number, "it")]}
        return written(self._codec, message, prompt)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(SOURCES, ("plain", "thoughts")),
        *((proof.template, "tools") for proof in TOOL_PROOFS),
    ],
)
async def test_ten_sub_agents_and_a_compaction_break_nothing(family: str, kind: str) -> None:
    codec = codec_of(family)
    generator = ScriptedGenerator(Turns(codec, kind), codec=codec)
    async with serving((), server=lambda _: engine(generator)) as at:
        session = (await at.open())["id"]
        agent = Agent(at, [session])

        async def answered(messages: list[Any], **fields: Any) -> list[Any]:
            tag = f"{TAG}{len(agent.group_of)}"
            agent.group_of[tag] = len(agent.group_of)
            body = {"messages": messages, "stop": [tag], **fields}
            status, answer = await at.post(f"/s/{session}/v1/chat/completions", body)
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            return [*messages, {name: value for name, value in message.items() if value is not None}]

        offered = {"tools": TOOLS} if kind == "tools" else {}
        parent = await answered([user("Find it.")], **offered)
        for number in range(10):
            await answered([user(f"Look at place {number}.")])
        if kind == "tools":
            [called] = parent[-1]["tool_calls"]
            following = {"role": "tool", "tool_call_id": called["id"], "name": "look", "content": "found"}
        else:
            following = user("And?")
        await answered([*parent, following], **offered)
        compacted = await answered([user("So far: nothing.")])
        await answered([*compacted, user("And?")])
        witness: Any = at.generator
        count, has_compared_rewards = compare(
            at, session, witness.sampled, agent, merge="renderer", shared_prefix="first"
        )
        causes = [call.break_cause for call in at.session(session).calls.values() if call.break_cause]
    assert has_compared_rewards
    rewritten = family in REWRITE_ANSWERS or (family in REWRITE_THOUGHTS and kind == "thoughts")
    turns = [kind != "tools" and rewritten, rewritten]  # a turn after the result of a tool keeps the thoughts
    assert (count, len(causes)) == (12 + sum(turns), sum(turns)), causes

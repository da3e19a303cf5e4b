"""Experiences are what engines read and sampled: random conversations through the real gateway and the real engine
server, compared with what a witness saw in front of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.faithful import TEXTS, Agent, Step, Witness, check, steps
from tests.unit.gateway.serving import Serving, serving, serving_config
from trinity_mq.engines.generation.text import TextCodec, TextError
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.messages import Version
from trinity_mq.models.inference import InferenceModel
from trinity_mq.testing.scripted import CHAT_TEMPLATE, ScriptedGenerator, byte_codec, written_answer
from trinity_mq.workflows.sessions.assembly import session_experiences

CUTTING = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
"""A template that leaves out the thoughts of earlier turns."""
FAMILIES: dict[str, TextCodec] = {"chatml": byte_codec(), "cutting": byte_codec(CUTTING)}
MERGES, SHARED = ("prefix", "renderer", "per_call"), ("first", "last", "mean")


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
        if number % 3 == 1:
            message["reasoning_content"] = f"I think {text}"
        if number % 4 == 2:
            function = {"name": "look", "arguments": {"what": text}}
            message["tool_calls"] = [{"id": f"call{number:05}", "type": "function", "function": function}]
        for parts in (message, {"content": text, "reasoning_content": text}, {"content": text}):
            with contextlib.suppress(TextError, ValueError):
                return written_answer(self._codec, parts, prompt)
        return text


@contextlib.asynccontextmanager
async def engine(generator: Any) -> AsyncIterator[tuple[InferenceModel, Witness]]:
    """Serve a generator behind a witness. Every request gets a newer version of the weights than the one before."""

    def version() -> Version:
        assert server.state.version is not None
        return server.state.version

    witness = Witness(generator, version)
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


async def prove(
    generator: Any, plan: Sequence[Step], *, merge: str, shared_prefix: str, system: str = ""
) -> tuple[Serving, Agent]:
    """Do the plan in two sessions, and compare the experiences of each with what the witness saw."""
    config = serving_config(
        gateway={"merge": merge, "sampling": "agent", "shared_prefix": shared_prefix, "calls_per_minute": 10_000}
    )
    async with serving((), config=config, server=lambda _: engine(generator)) as at:
        names = [(await at.open())["id"] for _ in range(2)]
        agent = Agent(at, names, system=system)
        await agent.do(plan)
        witness: Any = at.generator
        for name in names:
            calls = list(at.session(name).calls.values())
            sampled = [one for one in witness.sampled if agent.session_of[one.tag] == name]
            experiences = session_experiences(
                calls,
                reward=1.0,
                call_rewards={},
                merge=merge,  # type: ignore[arg-type]
                turn_discount=1.0,
                shared_prefix=shared_prefix,  # type: ignore[arg-type]
            )
            check(
                experiences,
                sampled,
                agent.thrown_away,
                merge=merge,
                shared_prefix=shared_prefix,
            )
    return at, agent


@settings(max_examples=examples(200), deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    plan=steps(),
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    merge=st.sampled_from(MERGES),
    shared_prefix=st.sampled_from(SHARED),
    are_distinct=st.booleans(),
)
def test_experiences_are_what_the_scripted_engine_read_and_sampled(
    family: str, plan: list[Step], texts: list[str], merge: str, shared_prefix: str, are_distinct: bool
) -> None:
    codec = FAMILIES[family]
    generator = ScriptedGenerator(Writer(codec, texts, are_distinct=are_distinct), codec=codec)
    asyncio.run(prove(generator, plan, merge=merge, shared_prefix=shared_prefix))

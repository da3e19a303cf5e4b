"""Experiences of sessions are what vLLM read and sampled, by its own word: random conversations through the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.faithful import Agent, Sampled, Step
from tests.unit.gateway.serving import serving as gateway
from tests.unit.gateway.serving import serving_config
from tests.unit.models.test_faithful import SHARED, compare
from trinity_mq.models.inference import InferenceModel

from .conftest import Engine, new_weights
from .overheard import Overheard, serving

VERSION = (1, 7)
TURNS = st.builds(
    Step,
    action=st.sampled_from((*["turn"] * 5, "sub", "rewind", "compact", "rewrite", "retry")),
    session=st.just(0),
    which=st.sampled_from((0, 0, 0, 1, 2)),
    text=st.text("abc ", min_size=1, max_size=4),
    n=st.sampled_from((1, 1, 2)),
    chosen=st.integers(0, 1),
    stream=st.booleans(),
    cut=st.sampled_from((3, 6, 12)),
    temperature=st.sampled_from((1.0, 1.0, 0.5)),
)
"""One request at a time: what vLLM is asked names no request, so that their order has to tell which it is."""


@pytest.mark.timeout(900)
async def test_experiences_are_what_vllm_read_and_sampled(waiting: Engine) -> None:
    await waiting.sync(new_weights(waiting.started.folder, 71), VERSION)
    plans: list[tuple[list[Step], str, str]] = []

    @settings(
        max_examples=examples(24), phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(TURNS, min_size=4, max_size=9), st.sampled_from(("renderer", "prefix")), st.sampled_from(SHARED))
    def draw(plan: list[Step], merge: str, shared_prefix: str) -> None:
        plans.append((plan, merge, shared_prefix))

    draw()
    trained = 0
    for plan, merge, shared_prefix in plans:
        trained += await _prove(waiting, plan, merge=merge, shared_prefix=shared_prefix)
    assert trained >= len(plans)


async def _prove(engine: Engine, plan: list[Step], *, merge: str, shared_prefix: str) -> int:
    config = serving_config(gateway={"merge": merge, "sampling": "agent", "shared_prefix": shared_prefix})

    @contextlib.asynccontextmanager
    async def server(_: Any) -> AsyncIterator[tuple[InferenceModel, Any]]:
        async with serving(engine.started, VERSION) as (served, heard):
            yield InferenceModel("e0", served.url, "tiny", version=VERSION), heard

    async with gateway((), config=config, server=server, timeout=60.0) as at:
        session = (await at.open())["id"]
        agent = Agent(at, [session])
        await agent.do(plan)
        heard: Any = at.generator
        sampled = _sampled(heard, agent)
        return compare(at, session, sampled, agent, merge=merge, shared_prefix=shared_prefix)[0]


def _sampled(heard: Overheard, agent: Agent) -> list[Sampled]:
    """Return what vLLM said, with the requests of the agent in their order."""
    entries = zip(heard.prompts, heard.sampled, strict=True)
    sampled: list[Sampled] = []
    for request, (tag, n, temperature) in enumerate(agent.answered):
        for _ in range(n):
            prompt, choice = next(entries)
            ids, logprobs = tuple(choice.token_ids), tuple(choice.logprobs)
            sampled.append(Sampled(tuple(prompt), ids, logprobs, temperature, VERSION, tag, request))
    assert not list(entries), "vLLM was asked more often than the agent was answered"
    return sampled

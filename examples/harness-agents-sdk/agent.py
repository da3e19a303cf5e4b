"""The OpenAI Agents SDK 0.24.0, unmodified, as the program of a session: one agent hands the task off to another.

Argument: ``responses`` or ``chat_completions``, the API with which the SDK asks.
"""

import asyncio
import sys

import rollouts
from openai import AsyncOpenAI

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

API = {"responses": OpenAIResponsesModel, "chat_completions": OpenAIChatCompletionsModel}[sys.argv[1]]
SETTINGS = RunConfig(tracing_disabled=True)  # otherwise the SDK reports each run to its maker


@function_tool
def add(first: float, second: float) -> float:
    """Add two numbers."""
    return first + second


async def answer_of(rollout: dict) -> str:
    """Return the answer of the agents; empty after a mistake of the model."""
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["key"]) as client:
        model = API(rollout["model"], client)
        calculator = Agent("calculator", instructions="Answer with the number only.", tools=[add], model=model)
        reception = Agent("reception", instructions="Hand sums off.", handoffs=[calculator], model=model)
        try:
            run = await Runner.run(reception, rollout["task"]["question"], max_turns=8, run_config=SETTINGS)
        except AgentsException:  # too many turns, or a call of a tool that does not exist
            return ""
        return str(run.final_output)


def reward_of(rollout: dict) -> float:
    """Return 1 for the right answer, else 0."""
    return float(asyncio.run(answer_of(rollout)).strip() == rollout["task"]["answer"])


rollouts.serve(reward_of)

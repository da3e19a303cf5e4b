"""The OpenAI Agents SDK 0.24.0, unmodified, as the program of a session: one agent hands the task off to another.

Argument: ``responses`` or ``chat_completions``, the API with which the SDK asks.
"""

import asyncio
import sys

import rollouts
from openai import AsyncOpenAI

import agents

API = {"responses": agents.OpenAIResponsesModel, "chat_completions": agents.OpenAIChatCompletionsModel}[sys.argv[1]]
SETTINGS = agents.RunConfig(tracing_disabled=True)  # otherwise the SDK sends a record of each run to OpenAI


@agents.function_tool
def add(first: float, second: float) -> float:
    """Add two numbers."""
    return first + second


async def reward_of(rollout: dict) -> float:
    """Return 1 for the right answer; 0 for another answer, and for a mistake of the model."""
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["key"]) as client:
        model = API(rollout["model"], client)
        calculator = agents.Agent("calculator", instructions="Answer with the number only.", tools=[add], model=model)
        reception = agents.Agent("reception", instructions="Hand sums off.", handoffs=[calculator], model=model)
        try:
            run = await agents.Runner.run(reception, rollout["task"]["question"], max_turns=8, run_config=SETTINGS)
        except agents.AgentsException:  # too many turns, or a call of a tool that does not exist
            return 0.0
        return float(str(run.final_output).strip() == rollout["task"]["answer"])


rollouts.serve(lambda rollout: asyncio.run(reward_of(rollout)))

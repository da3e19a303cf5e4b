"""An agent of the OpenAI Agents SDK, trained through the gateway. The only change to it is the client that it gets.

trinity-mq serve examples/serve.yaml
pip install openai-agents && python examples/agents/agents_sdk.py --sessions 4000
"""

from __future__ import annotations

import argparse
import asyncio
import random

import httpx
from openai import AsyncOpenAI

from agents import Agent, ModelBehaviorError, OpenAIResponsesModel, Runner, set_tracing_disabled

AT_ONCE = 48


async def session(gateway: httpx.AsyncClient, openai: AsyncOpenAI, draw: random.Random) -> float:
    """Run the agent in its own session; return the reward of its answer."""
    digits = [str(draw.randrange(10)) for _ in range(3)]
    question, right = f"{','.join(digits)}=", max(digits)
    made = (await gateway.post("/sessions", json={})).raise_for_status().json()
    client = openai.with_options(base_url=made["base_url"], api_key=made["key"])
    agent = Agent(name="largest digit", model=OpenAIResponsesModel(model="any", openai_client=client))
    try:
        said = str((await Runner.run(agent, question)).final_output)
    except ModelBehaviorError:  # raised by the SDK for an answer that was cut at its limit
        said = ""
    worth = 1.0 if said == right else 0.4 * said.startswith(right) + 0.1 * (len(said) == 1)
    (await gateway.post(f"/s/{made['id']}/end", json={"reward": worth})).raise_for_status()
    return worth


async def main(url: str, sessions: int) -> None:
    """Run sessions, ``AT_ONCE`` at a time. Print the mean reward of each 500 sessions."""
    set_tracing_disabled(True)  # otherwise the SDK sends a record of each run to OpenAI
    draw, rewards, left = random.Random(0), list[float](), iter(range(sessions))
    async with httpx.AsyncClient(base_url=url, timeout=120) as gateway, AsyncOpenAI(api_key="of-the-session") as openai:

        async def work() -> None:
            for _ in left:
                rewards.append(await session(gateway, openai, draw))
                if len(rewards) % 500 == 0:
                    print(
                        f"{len(rewards)} sessions, reward of the last 500: {sum(rewards[-500:]) / 500:.3f}", flush=True
                    )

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8710", help="the gateway (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=4000, help="how many (default: %(default)s)")
    options = parser.parse_args()
    asyncio.run(main(options.url, options.sessions))

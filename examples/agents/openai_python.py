"""An agent that uses the OpenAI client without a change, trained through the gateway. Another request sends the reward.

trinity-mq serve examples/serve.yaml
python examples/agents/openai_python.py --sessions 4000
"""

from __future__ import annotations

import argparse
import asyncio
import random

import httpx
from openai import AsyncOpenAI

AT_ONCE = 48


async def session(gateway: httpx.AsyncClient, openai: AsyncOpenAI, draw: random.Random) -> float:
    """Ask one question in its own session; return the reward of the answer."""
    digits = [str(draw.randrange(10)) for _ in range(3)]
    question, right = f"{','.join(digits)}=", max(digits)
    made = (await gateway.post("/sessions", json={"labels": {"agent": "example"}})).raise_for_status().json()
    client = openai.with_options(base_url=made["base_url"], api_key=made["key"])
    answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}])
    said, ended = answer.choices[0].message.content or "", answer.choices[0].finish_reason == "stop"
    exact = ended and said == right
    worth = 1.0 if exact else 0.4 * said.startswith(right) + 0.1 * (ended and len(said) == 1)
    (await gateway.post(f"/s/{made['id']}/end", json={"reward": worth})).raise_for_status()
    return worth


async def main(url: str, key: str, sessions: int) -> None:
    """Run sessions, ``AT_ONCE`` at a time. Print the mean reward of each 500 sessions."""
    draw, rewards, left = random.Random(0), list[float](), iter(range(sessions))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as gateway,
        AsyncOpenAI(api_key="of-the-session") as openai,
    ):

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
    parser.add_argument("--key", default="", help="a key of gateway.key_file, where the gateway has one")
    parser.add_argument("--sessions", type=int, default=4000, help="how many (default: %(default)s)")
    options = parser.parse_args()
    asyncio.run(main(options.url, options.key, options.sessions))

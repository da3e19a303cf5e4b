"""Two gateways of one run behind TLS and keys: groups of sessions, the replay of one, rewards over the queue."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import aio_pika
import aiohttp
import pytest
import trustme

from tests.serve_clients import Agents, until_settled
from trinity_mq.local_broker.ports import free_ports, is_free
from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.yaml"
KEY = "a key of the operators of this test"
GROUPS, SIZE = 4, 4

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.timeout(240)]


def two_ports() -> int:
    """Return the first of two free ports beside each other."""
    while True:
        [port] = free_ports(1)
        if is_free(port + 1):
            return port


async def test_groups_replays_and_messages(tmp_path: Path) -> None:
    port, authority = two_ports(), trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "cert.pem"))
    (tmp_path / "keys").write_text(f"{KEY}\n")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    words = (
        "mode=serve",
        "name=grouped",
        "gateway.host=localhost",
        f"gateway.port={port}",
        "gateway.num_gateways=2",
        f"gateway.key_file={tmp_path / 'keys'}",
        f"gateway.cert_file={tmp_path / 'cert.pem'}",
        "gateway.batch_wait=1",
        "algorithm.repeat_times=4",
        "algorithm.estimator={kind: group}",
        "buffer.batch_size=4",
        "buffer.taskset={storage_type: queue, reward_fn: char_match}",
        "explorer.eval_on_startup=false",
        "explorer.eval_interval=10000",
        "explorer.max_consecutive_empty=100",
    )
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        LocalRun(EXAMPLE, tmp_path / "run", words) as run,
        aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=context)) as http,
    ):
        one, other = (Agents(f"https://localhost:{port + number}", http) for number in range(2))
        async with asyncio.timeout(90):
            for agents in (one, other):
                assert (await agents.send("GET", "/health"))[0] == 200
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as nobody:
            async with nobody.post(f"https://localhost:{port}/sessions", json={}) as response:
                assert response.status == 401

        async def session(reward: float | None, **opened: Any) -> str:
            status, made = await one.send("POST", "/sessions", opened)
            assert status == 201, made
            assert made["base_url"].startswith("https://localhost:")
            ask = {"messages": [{"role": "user", "content": "3,7,2="}]}
            status, answer = await other.send("POST", f"/s/{made['id']}/v1/chat/completions", ask)
            assert status == 200, answer
            if reward is not None:
                status, ended = await one.send("POST", f"/s/{made['id']}/end", {"reward": reward})
                assert status == 200, ended
            return str(made["id"])

        groups = [
            await session(float(number % 2), group=f"task-{group}") for group in range(GROUPS) for number in range(SIZE)
        ]
        replayed = await session(None, record="eval", task={"question": "3,7,2=", "answer": "7"})
        end = {"replay": {"workflow": "async_simple_workflow", "runs": SIZE}}
        assert (await other.send("POST", f"/s/{replayed}/end", end))[0] == 200
        told = [await session(None, group="told") for _ in range(SIZE)]
        url = (run.run_dir / "broker.url").read_text().strip()
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            exchange = await channel.get_exchange("tmq.grouped.sessions", ensure=False)
            for number, name in enumerate(told):
                for kind, body in (("session_reward", {"reward": number / SIZE}), ("session_end", {})):
                    message = aio_pika.Message(
                        json.dumps({"session": name, **body}).encode(),
                        content_type="application/json",
                        headers={"kind": kind},
                        message_id=f"{kind}-{name}",
                    )
                    await exchange.publish(message, "session")
        await until_settled(other, len(groups) + len(told) + 1)
        for agents in (one, other):
            _, found = await agents.send("GET", "/sessions?state=evaluated")
            assert found["sessions"] == []
            assert found["states"] == {"trained": len(groups) + len(told) + 1}
        steps = [value for _, value in run.values("groups/size")]
        assert set(steps) == {float(SIZE)}, "compared with each other, four at a time"

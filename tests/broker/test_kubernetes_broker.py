"""A broker set up as docs/kubernetes.md says: it takes the settings of the manifest of the cluster, and the user of the
autoscaler sees the depth of the operators' queue, what they hold included, and nothing that is in it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml

from tests.broker_fixtures import own_node
from tests.waiting import until
from trinity_mq.bus import Bus, Envelope, Topology, create_bus
from trinity_mq.bus.permissions import permissions, rabbitmqctl_lines
from trinity_mq.config import BrokerConfig
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]


@pytest.fixture
def node() -> Iterator[PrivateNode]:
    """A broker with the settings of the manifest."""
    [manifest] = yaml.safe_load_all((FOLDER / "rabbitmq" / "cluster.yaml").read_text())
    config = str(manifest["spec"]["rabbitmq"]["additionalConfig"])
    with own_node(plugins=("rabbitmq_management",), config=config) as made:
        yield made


async def set_up(node: PrivateNode, run: str) -> None:
    """Do what the page says, with passwords in place of the files."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    lines = re.findall(r"(?:^|\| )\s*ctl (rabbitmqctl .*)$", page, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        command = shlex.split(line.partition(" <")[0])[1:]
        await node.ctl(*command, *(["secret"] if command[0] == "add_user" else []))
        if command == ["add_user", "trinity"]:  # the next line of the page
            for granted in rabbitmqctl_lines("trinity", "trinity", permissions(run, "agent")):
                await node.ctl(*shlex.split(granted)[1:])


@pytest.fixture
async def agent(node: PrivateNode, unique_run: str) -> AsyncIterator[Bus]:
    """An operator's connection."""
    await set_up(node, unique_run)
    url = f"amqp://trinity:secret@127.0.0.1:{urlsplit(node.url).port}/trinity"
    bus = create_bus(BrokerConfig(url=url), Topology(unique_run), "operator-0")
    await bus.connect()
    yield bus
    await bus.close()


async def test_the_autoscaler_counts_what_operators_hold_and_sees_nothing_of_it(
    node: PrivateNode, agent: Bus, unique_run: str
) -> None:
    topology = Topology(unique_run)
    await agent.declare(*topology.durable)
    for number in range(3):
        await agent.publish(topology.exchange("batches"), "closed", Envelope(body=b"%d" % number, kind="note"))
    async with (
        await agent.consume(topology.closed, prefetch=1) as held,
        aiohttp.ClientSession(headers={"Authorization": aiohttp.encode_basic_auth("keda", "secret")}) as http,
    ):
        await anext(aiter(held))  # not acknowledged
        url = f"http://127.0.0.1:{node.ports['rabbitmq_management']}/api/queues/trinity/{topology.closed.name}"
        seen = {}

        async def counted() -> bool:
            async with http.get(url) as answer:
                assert answer.status == 200, await answer.text()
                seen.update(await answer.json())
            return (seen.get("messages"), seen.get("messages_unacknowledged")) == (3, 1)

        await until(counted, 30.0)
        asked = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
        async with http.post(f"{url}/get", json=asked) as answer:
            assert answer.status != 200
        async with http.delete(url) as answer:
            assert answer.status in {401, 403}

"""The bus of the tests on a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.broker_fixtures import Tools, Users, connected
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology


@pytest.fixture
async def bus(broker_url: str, topology: Topology) -> AsyncIterator[RabbitBus]:
    async with connected(broker_url, topology) as made:
        yield made


@pytest.fixture
def users(broker_url: str, broker_node: Tools) -> Users:
    return Users(broker_url, broker_node)

"""The routine that connects again, where the client does what a broker cannot be made to do at will."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trinity_mq.bus.base import BusUnavailable
from trinity_mq.bus.rabbit import bus as rabbit_bus
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.rabbit.connection import BrokerConnectError
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.testing.virtual_time import run_virtually


@pytest.mark.parametrize("ends_well", [False, True])
def test_a_cancellation_that_meets_the_end_of_an_attempt_ends_the_routine(
    monkeypatch: pytest.MonkeyPatch, ends_well: bool
) -> None:
    """As wait_for of Python 3.11 loses it: what it waited for is over in the same moment."""
    connecting = asyncio.Event()

    async def open_connection(*_: Any) -> Any:
        connecting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not ends_well:
                raise BrokerConnectError("refused") from None
        return None

    async def closed_while_it_connects() -> None:
        bus = RabbitBus("amqp://nobody@127.0.0.1:1/", Topology("r"), config=BrokerConfig(), name="test")
        monkeypatch.setattr(rabbit_bus, "open_connection", open_connection)
        monkeypatch.setattr(bus, "_renew_consuming", lambda _old: bus._open("consumes", print))
        bus._routine = asyncio.create_task(bus._keep())
        bus._broken.set()
        await connecting.wait()
        await bus.close()
        with pytest.raises(BusUnavailable):
            await bus.wait_usable()

    run_virtually(closed_while_it_connects(), limit=60)

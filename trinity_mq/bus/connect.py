"""Factory of a Bus from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_mq.bus.addresses import FORM, URL_FILE_VARIABLE, URL_VARIABLE, AddressError, Addresses
from trinity_mq.bus.base import Bus
from trinity_mq.bus.topology import Topology

if TYPE_CHECKING:
    from trinity_mq.config.bus import BrokerConfig  # pydantic takes longer to import than everything else here


def create_bus(config: BrokerConfig, topology: Topology, name: str) -> Bus:
    """Return a bus on the configured broker; ``connect()`` it before use.

    Args:
        config: Where the broker is and how patiently we talk to it.
        topology: Names of the run.
        name: Shown by the broker for this agent's connections.

    Raises:
        AddressError: No address is given, it is not an AMQP URL, or a file that it or its password are in cannot be
            read.
    """
    addresses = Addresses.of(config)
    if addresses is None:
        raise AddressError(
            f"no broker: set broker.url or {URL_VARIABLE} to {FORM}, or {URL_FILE_VARIABLE} to a file that holds it "
            "(`trinity-mq run` starts one by itself)"
        )
    addresses.read()  # what is wrong with it is better said now
    from trinity_mq.bus.rabbit.bus import RabbitBus  # slow to import, and not needed to name things

    return RabbitBus(addresses, topology, config=config, name=name)

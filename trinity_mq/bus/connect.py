"""Factory that creates a Bus from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_mq.bus.addresses import FORM, URL_FILE_VARIABLE, URL_VARIABLE, AddressError, Addresses
from trinity_mq.bus.base import Bus
from trinity_mq.bus.topology import Topology

if TYPE_CHECKING:
    from trinity_mq.config.bus import BrokerConfig  # importing pydantic takes longer than all other imports here


def create_bus(config: BrokerConfig, topology: Topology, name: str) -> Bus:
    """Return a bus for the configured broker. Call ``connect()`` before use.

    Args:
        config: Address of the broker, and timeouts.
        topology: Names of the run.
        name: Connection name that the broker shows for this agent.

    Raises:
        AddressError: No address is configured, it is not an AMQP URL, or the file with the URL or password cannot be
            read.
    """
    addresses = Addresses.of(config)
    if addresses is None:
        raise AddressError(
            f"no broker: set broker.url or {URL_VARIABLE} to {FORM}, or {URL_FILE_VARIABLE} to a file that holds it "
            "(`trinity-mq run` starts one by itself)"
        )
    addresses.read()  # report address errors early, before the first connect
    # RabbitBus is slow to import, and callers that only need names must not load it
    from trinity_mq.bus.rabbit.bus import RabbitBus

    return RabbitBus(addresses, topology, config=config, name=name)

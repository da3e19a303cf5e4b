"""Factory of a Bus from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_mq.bus.addresses import (
    FORM,
    PASSWORD_FILE_VARIABLE,
    URL_FILE_VARIABLE,
    URL_VARIABLE,
    AddressError,
    Addresses,
    check_url,
)
from trinity_mq.bus.base import Bus
from trinity_mq.bus.topology import Topology

if TYPE_CHECKING:
    from trinity_mq.config.bus import BrokerConfig  # pydantic takes longer to import than everything else here

__all__ = [
    "PASSWORD_FILE_VARIABLE",
    "URL_FILE_VARIABLE",
    "URL_VARIABLE",
    "AddressError",
    "Addresses",
    "broker_url",
    "check_url",
    "create_bus",
]


def broker_url(config: BrokerConfig) -> str | None:
    """Return the broker's address: the configured one, else the environment's, None where neither is given.

    Several URLs have commas between. A URL from a file is what is in it now; a password from a file is not in it.

    Raises:
        AddressError: The file that holds it cannot be read.
    """
    addresses = Addresses.of(config)
    return None if addresses is None else addresses.text()


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

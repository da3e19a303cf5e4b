"""From a configuration to a Bus."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trinity_mq.bus.base import Bus, BusError
from trinity_mq.bus.topology import Topology

if TYPE_CHECKING:
    from trinity_mq.config.bus import BrokerConfig  # pydantic takes longer to import than everything else here

URL_VARIABLE = "TRINITY_MQ_BROKER_URL"
FORM = "amqp://user:password@host:port/vhost"


class AddressError(BusError):
    """No usable address of a broker was given."""


def broker_url(config: BrokerConfig) -> str | None:
    """Return the broker's address: the configured one, else the environment's, None where neither is given."""
    return config.url or os.environ.get(URL_VARIABLE) or None


def create_bus(config: BrokerConfig, topology: Topology, name: str) -> Bus:
    """Return a bus on the configured broker; ``connect()`` it before use.

    Args:
        config: Where the broker is and how patiently we talk to it.
        topology: Names of the run.
        name: Shown by the broker for this agent's connections.

    Raises:
        AddressError: No address is given, or it is not an AMQP URL.
    """
    url = broker_url(config)
    if url is None:
        raise AddressError(
            f"no broker: set broker.url or {URL_VARIABLE} to {FORM} (`trinity-mq run` starts one by itself)"
        )
    check_url(url)
    from trinity_mq.bus.rabbit import RabbitBus  # slow to import, and not needed to name things

    return RabbitBus(url, topology, config=config, name=name)


def check_url(url: str) -> None:
    """Refuse what is not an AMQP URL, without repeating its password.

    Raises:
        AddressError: With the part that is wrong.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressError(f"broker.url is not a URL ({error}), wanted {FORM}") from None
    if parts.scheme not in {"amqp", "amqps"}:
        raise AddressError(f"broker.url begins with {parts.scheme or 'nothing'!r}, wanted amqp or amqps: {FORM}")
    if not parts.hostname or port == 0:
        raise AddressError(f"broker.url names no host and port, wanted {FORM}")

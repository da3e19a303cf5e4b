"""The message bus: broker names as data, one protocol, and its implementations on RabbitMQ and, for tests, in
memory.
"""

from trinity_mq.bus.addresses import AddressError, broker_url
from trinity_mq.bus.base import (
    Bus,
    BusError,
    BusRefused,
    BusUnavailable,
    Consumer,
    Delivery,
    Incoming,
    Lock,
    LockHeld,
    MessageTooLarge,
    QueueGone,
    StaleDelivery,
    StreamCut,
)
from trinity_mq.bus.connect import create_bus
from trinity_mq.bus.properties import Envelope, HeaderValue
from trinity_mq.bus.topology import Binding, Queue, Topology, batch_key

__all__ = [
    "AddressError",
    "Binding",
    "Bus",
    "BusError",
    "BusRefused",
    "BusUnavailable",
    "Consumer",
    "Delivery",
    "Envelope",
    "HeaderValue",
    "Incoming",
    "Lock",
    "LockHeld",
    "MessageTooLarge",
    "Queue",
    "QueueGone",
    "StaleDelivery",
    "StreamCut",
    "Topology",
    "batch_key",
    "broker_url",
    "create_bus",
]

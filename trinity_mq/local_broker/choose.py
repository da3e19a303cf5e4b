"""Choice between an installed RabbitMQ and Docker."""

from __future__ import annotations

from pathlib import Path

from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.container import DockerNode, is_docker_available
from trinity_mq.local_broker.node import NOT_INSTALLED, NodeError, PrivateNode, epmd_command, find_rabbitmq

__all__ = ["LocalNode", "local_broker", "local_broker_class"]


async def local_broker_class() -> type[PrivateNode | DockerNode]:
    """Return the kind of broker that :func:`local_broker` starts on this machine.

    Raises:
        NodeError: Neither kind can be started; the message says what to do.
    """
    if find_rabbitmq() is not None:
        epmd_command()
        return PrivateNode
    if await is_docker_available():
        return DockerNode
    raise NodeError(NOT_INSTALLED)


async def local_broker(base: Path) -> LocalNode:
    """Start a local broker in ``base`` and return it when ready: the installed RabbitMQ, else Docker.

    Raises:
        NodeError: Neither is available, or the broker did not start; the message says what to do.
    """
    kind = await local_broker_class()
    node = kind(base)
    await node.launch()
    return node

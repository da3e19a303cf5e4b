"""Choice between an installed RabbitMQ and Docker."""

from __future__ import annotations

from pathlib import Path

from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.container import DockerNode, docker_answers
from trinity_mq.local_broker.node import NOT_INSTALLED, NodeError, PrivateNode, find_rabbitmq

__all__ = ["LocalNode", "local_broker"]


async def local_broker(base: Path) -> LocalNode:
    """Start a broker of our own in ``base`` and return it, ready: the installed RabbitMQ, else Docker.

    Raises:
        NodeError: Neither is there, or it did not start; the message says what to do.
    """
    node: LocalNode
    if find_rabbitmq() is not None:
        node = PrivateNode(base)
    elif await docker_answers():
        node = DockerNode(base)
    else:
        raise NodeError(NOT_INSTALLED)
    await node.launch()
    return node

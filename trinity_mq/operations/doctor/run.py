"""Runs the checks of a broker and of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trinity_mq.bus import AddressError, BusRefused
from trinity_mq.bus.addresses import Addresses
from trinity_mq.bus.rabbit.connection import BrokerConnectError
from trinity_mq.bus.tls import tls_context
from trinity_mq.config import BrokerConfig
from trinity_mq.local_broker.choose import local_broker_class
from trinity_mq.local_broker.container import DockerNode
from trinity_mq.local_broker.node import NodeError, PrivateNode, find_rabbitmq
from trinity_mq.operations.doctor.checks import BROKER_CHECKS, MACHINE_CHECKS, DoctorFinding, Verdict, findings
from trinity_mq.operations.doctor.facts import (
    API_PATHS,
    Ctl,
    DoctorFacts,
    Needs,
    ask_amqp,
    ask_machine,
    ask_management,
    ask_rabbitmqctl,
    management_url,
)
from trinity_mq.operations.rendering import NO_ROW, rendering_of
from trinity_mq.runtime.plugins import UnknownNameError
from trinity_mq.telemetry import mask_passwords


async def check_all(
    folder: Path, broker: BrokerConfig, needs: Needs, management: str | None, node: Path | None
) -> list[DoctorFinding]:
    """Check this machine, the renderer of the model and a broker concurrently. Return the findings, broker first. The
    arguments are as for :func:`check_broker`; ``folder`` is the run folder.
    """
    machine, of_model, of_broker = await asyncio.gather(
        asyncio.to_thread(ask_machine, folder),
        asyncio.to_thread(check_rendering, needs),
        check_broker(broker, needs, management, node),
    )
    return [*of_broker, *findings(MACHINE_CHECKS, machine, needs), *of_model]


def check_rendering(needs: Needs) -> list[DoctorFinding]:
    """Return a finding on the renderer of the policy's conversations; empty without a configuration, or if the renderer
    is unknown, for example because the tokenizer is not on this machine.
    """
    try:
        rendering = rendering_of(needs.config) if needs.exact else None
    except UnknownNameError as error:
        return [DoctorFinding("model family", "problem", str(error), "a family that exists", "correct model.family")]
    if rendering is None:
        return []
    verdict: Verdict = "ok" if rendering.has_family else "warning"
    advice = "" if rendering.has_family else NO_ROW
    return [DoctorFinding("model family", verdict, rendering.description, "a family that fits the model", advice)]


async def check_broker(
    broker: BrokerConfig, needs: Needs, management: str | None, node: Path | None, ctl: Ctl | None = None
) -> list[DoctorFinding]:
    """Check a broker through every available source.

    Args:
        broker: Settings of the broker, with its address. Without an address, the finding is about a private broker.
        needs: The run's requirements.
        management: URL of the broker's management API. None: on the broker's host.
        node: Folder of a private node that may be this broker.
        ctl: Runs the broker's rabbitmqctl. None: the rabbitmqctl of ``node``, if the broker is that node.
    """

    def no_broker(verdict: Verdict, seen: str, do: str) -> list[DoctorFinding]:
        return [DoctorFinding("broker", verdict, mask_passwords(seen), "a broker that answers", do)]

    try:
        addresses = Addresses.of(broker)
        if addresses is None:
            try:
                kind = await local_broker_class()
            except NodeError as error:
                return no_broker(
                    "problem", "no broker is known, and `trinity-mq run` cannot start a private broker", str(error)
                )
            source = "in a Docker container" if kind is DockerNode else f"with {find_rabbitmq()}"
            return no_broker("ok", f"no broker is set: `trinity-mq run` starts a private RabbitMQ {source}", "")
        urls = await asyncio.to_thread(addresses.read)
        parts = urlsplit(urls[0])
        facts = DoctorFacts(
            urls=urls,
            tls_verified=broker.tls is None or broker.tls.verify,
            user=unquote(parts.username or "guest"),
            vhost=unquote(parts.path[1:]) or "/",
        )
        await ask_amqp(urls, broker.tls, needs.topology, facts)
    except (AddressError, BusRefused) as error:
        return no_broker("problem", str(error), "see the message above")
    except (BrokerConnectError, TimeoutError) as error:
        do = "is it running, and are host and port right? Does a firewall block the connection?"
        return no_broker("problem", str(error) or "it does not answer", do)
    if ctl := ctl or _ctl_of(node, parts.port):
        await ask_rabbitmqctl(ctl, facts)
    else:
        facts.missing("only the broker's own rabbitmqctl reports it", "limits")
    if any(question not in facts for question in API_PATHS):
        api = management_url(urls[0], management)
        await ask_management(api, await tls_context(broker.tls) if api.startswith("https") else None, facts)
    return list(findings(BROKER_CHECKS, facts, needs))


def _ctl_of(folder: Path | None, port: int | None) -> Ctl | None:
    """Return the rabbitmqctl of the private node in ``folder``; None if it is not the node at ``port``."""
    if folder is None or not (folder / "rabbitmq.conf").exists():
        return None
    node = PrivateNode(folder)
    try:
        node.attach()
    except NodeError:
        return None
    return node.ctl if node.ports.get("amqp") == port else None

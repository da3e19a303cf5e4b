"""``trinity-mq doctor``: looks at a live broker and at this machine, and says what to do; changes nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trinity_mq.bus import AddressError, BusRefused
from trinity_mq.bus.connect import Addresses
from trinity_mq.cli.broker.connection import known_broker
from trinity_mq.cli.doctor.broker import judge_broker
from trinity_mq.cli.doctor.facts import Facts, Finding, Needs
from trinity_mq.cli.doctor.local import look_here
from trinity_mq.cli.doctor.management import ASKED, Management, management_url
from trinity_mq.cli.doctor.node import Ctl, ask_node
from trinity_mq.cli.doctor.policies import judge_policies
from trinity_mq.cli.errors import CommandError
from trinity_mq.config import BrokerConfig, Config, load_config
from trinity_mq.local_broker.node import NodeError, PrivateNode
from trinity_mq.telemetry import mask_passwords

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM", "not looked at": "-      "}


def doctor(arguments: argparse.Namespace) -> int:
    """Print findings; 1 where there is a problem, else 0."""
    config = load_config(arguments.config) if arguments.config is not None else None
    if config is not None and arguments.run is not None:
        raise CommandError("give either the run's CONFIG or --run NAME, not both")
    try:
        needs = Needs.of(config, arguments.run)
    except ValueError as error:
        raise CommandError(str(error)) from error
    broker = _broker(config, arguments.broker)
    node = Path(arguments.node) if arguments.node else config.path / "broker" if config is not None else None
    findings = asyncio.run(_everything(config, broker, needs, arguments.management, node))
    print(_as_json(findings) if arguments.json else "\n".join(lines(findings)))
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def _broker(config: Config | None, given: str | None) -> BrokerConfig:
    broker = config.broker if config is not None else BrokerConfig()
    url = given or (known_broker(config) if config is not None else None)
    return broker.model_copy(update={"url": url, "url_file": None}) if url else broker


async def _everything(
    config: Config | None, broker: BrokerConfig, needs: Needs, management: str | None, node: Path | None
) -> list[Finding]:
    async with asyncio.TaskGroup() as group:
        here = group.create_task(look_here(config))
        there = group.create_task(look_there(broker, needs, management, node))
    return [*there.result(), *here.result()]


async def look_there(
    broker: BrokerConfig, needs: Needs, management: str | None, node: Path | None, ctl: Ctl | None = None
) -> list[Finding]:
    """Look at a broker by every way that is open.

    Args:
        broker: Where it is.
        needs: What is asked of it.
        management: URL of its management API; None: on the same host.
        node: Folder of a private node that it may be.
        ctl: Runs its rabbitmqctl; None: that of ``node``, if it is that node.
    """
    from trinity_mq.bus.rabbit.connection import BrokerConnectError  # the AMQP client takes a while to import
    from trinity_mq.bus.rabbit.probe import examine

    subject, wanted = "broker", "one that answers"
    try:
        addresses = Addresses.of(broker)
        if addresses is None:
            do = "give --broker amqp://user:password@host:port/vhost, or set TRINITY_MQ_BROKER_URL"
            seen = "none is known; `trinity-mq run` would start one of its own"
            return [Finding(subject=subject, verdict="warning", seen=seen, wanted=wanted, do=do)]
        urls = await asyncio.to_thread(addresses.read)
        seen_by_amqp = await examine(urls, broker.tls, needs.topology)
    except (AddressError, BusRefused) as error:
        do = "see what it says above"
        return [Finding(subject=subject, verdict="problem", seen=mask_passwords(str(error)), wanted=wanted, do=do)]
    except (BrokerConnectError, TimeoutError) as error:
        seen = mask_passwords(str(error)) or "it does not answer"
        do = "is it running, and are host and port right? Is a firewall between?"
        return [Finding(subject=subject, verdict="problem", seen=seen, wanted=wanted, do=do)]
    parts = urlsplit(urls[0])
    facts = Facts(
        version=str(seen_by_amqp.properties.get("version", "")) or None,
        product=str(seen_by_amqp.properties.get("product", "unknown")),
        capabilities=seen_by_amqp.properties.get("capabilities") or {},
        user=unquote(parts.username or "guest"),
        vhost=unquote(parts.path[1:]) or "/",
        blocked=seen_by_amqp.blocked,
        tried=tuple(seen_by_amqp.tried),
        refused=seen_by_amqp.refused,
        queues={name: (depth.messages, depth.consumers) for name, depth in seen_by_amqp.queues.items()},
    )
    await _ask_others(urls, broker, needs, management, ctl or _tools(node, parts.port), facts)
    return [*transport(urls, broker), *judge_broker(facts, needs), *judge_policies(facts, needs)]


async def _ask_others(
    urls: tuple[str, ...], broker: BrokerConfig, needs: Needs, management: str | None, ctl: Ctl | None, facts: Facts
) -> None:
    """Ask the node's own tools, else the management API."""
    from trinity_mq.bus.tls import tls_context

    prefix = needs.topology.prefix if needs.topology is not None else None
    by_amqp = dict(facts.queues or {})
    if ctl is not None:
        await ask_node(ctl, facts, prefix)
    else:
        facts.missing("only the broker's own rabbitmqctl tells it", "consumer_timeout_ms", "max_message_bytes")
    if any(getattr(facts, name) is None for name in ASKED):
        url = management_url(urls[0], management)
        secure = url.startswith("https")
        await Management(url, facts).tell(prefix, await tls_context(broker.tls) if secure else None)
    # what AMQP counts is the moment's, of ready messages
    facts.queues = {**(facts.queues or {}), **by_amqp}


def _tools(folder: Path | None, port: int | None) -> Ctl | None:
    """Return the rabbitmqctl of the private node in ``folder``, None where it is not the one that we talk to."""
    if folder is None or not (folder / "rabbitmq.conf").exists():
        return None
    node = PrivateNode(folder)
    try:
        node.attach()
    except NodeError:
        return None
    return node.ctl if node.ports.get("amqp") == port else None


def transport(urls: Sequence[str], broker: BrokerConfig) -> list[Finding]:
    """Judge how passwords and experiences travel."""
    subject, wanted = "connection", "TLS that verifies, unless the broker is on this machine"
    clear = [urlsplit(url).hostname or "" for url in urls if urlsplit(url).scheme == "amqp"]
    away = [host for host in clear if host not in LOOPBACK]
    if away:
        do = "write amqps:// and give the broker a certificate, or make sure that nobody listens in between"
        seen = f"to {', '.join(away)} in clear, the password too"
        return [Finding(subject=subject, verdict="warning", seen=seen, wanted=wanted, do=do)]
    if not clear and broker.tls is not None and not broker.tls.verify:
        do = "remove broker.tls.verify: false, and set broker.tls.ca_file"
        seen = "TLS, but anybody may pose as the broker"
        return [Finding(subject=subject, verdict="warning", seen=seen, wanted=wanted, do=do)]
    return [Finding(subject=subject, verdict="ok", seen="on this machine" if clear else "TLS, verified", wanted=wanted)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the report for a person."""
    width = max((len(finding.subject) for finding in findings), default=0)
    report = []
    for finding in findings:
        seen = f"not looked at, because {finding.seen}" if finding.verdict == "not looked at" else finding.seen
        report.append(f"{SIGNS[finding.verdict]}  {finding.subject:{width}}  {seen}")
        more = [f"wanted: {finding.wanted}"] if finding.wanted and finding.verdict in {"warning", "problem"} else []
        more += [f"do: {finding.do}" if finding.verdict != "not looked at" else finding.do] if finding.do else []
        for text in more:
            report += textwrap.wrap(
                text, 110, initial_indent=" " * 11, subsequent_indent=" " * 13, break_long_words=False
            )
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in SIGNS}
    return [*report, ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)]


def _as_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2, ensure_ascii=False)

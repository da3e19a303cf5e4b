"""``trinity-mq doctor``: checks a live broker and this machine, and recommends actions; changes nothing."""

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
from trinity_mq.bus.addresses import Addresses
from trinity_mq.bus.rabbit.connection import BrokerConnectError
from trinity_mq.bus.tls import tls_context
from trinity_mq.cli.arguments import add_broker, add_target
from trinity_mq.cli.broker.connection import known_broker
from trinity_mq.cli.doctor.checks import BROKER_CHECKS, MACHINE_CHECKS, Finding, Verdict, findings
from trinity_mq.cli.doctor.facts import (
    API_PATHS,
    Ctl,
    Facts,
    Needs,
    ask_amqp,
    ask_machine,
    ask_management,
    ask_rabbitmqctl,
    management_url,
)
from trinity_mq.cli.run_folder import RunFolder
from trinity_mq.cli.target import broker_of_name, find_configuration
from trinity_mq.config import BrokerConfig
from trinity_mq.local_broker.choose import own_kind
from trinity_mq.local_broker.node import NodeError, PrivateNode
from trinity_mq.telemetry import mask_passwords

SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM", "not looked at": "-      "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq doctor``."""
    add_target(parser, optional=True)
    add_broker(parser, "--url")
    parser.add_argument(
        "--management",
        metavar="URL",
        help="its management API, http://[user:password@]host:port (default: the broker's host, port 15672 or 15671)",
    )
    parser.add_argument(
        "--node", metavar="FOLDER", help="folder of the private node that the broker is (default: in the run's folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def doctor(arguments: argparse.Namespace) -> int:
    """Print findings. Return 1 if there is a problem, else 0."""
    target = arguments.target
    config = None if target is None else find_configuration(target, arguments.overrides)
    needs = Needs.of(config, None if config is not None else target)
    broker = config.broker if config is not None else broker_of_name(target or "run", arguments.overrides)
    if url := arguments.broker or (known_broker(config) if config is not None else None):
        broker = broker.model_copy(update={"url": url, "url_file": None})
    node = Path(arguments.node) if arguments.node else RunFolder(config).broker if config is not None else None
    folder = config.path if config is not None else Path("runs")
    results = asyncio.run(_check_all(folder, broker, needs, arguments.management, node))
    if arguments.json:
        print(json.dumps({"findings": [asdict(finding) for finding in results]}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(results)))
    return 1 if any(finding.verdict == "problem" for finding in results) else 0


async def _check_all(
    folder: Path, broker: BrokerConfig, needs: Needs, management: str | None, node: Path | None
) -> list[Finding]:
    machine, of_broker = await asyncio.gather(
        asyncio.to_thread(ask_machine, folder), check_broker(broker, needs, management, node)
    )
    return [*of_broker, *findings(MACHINE_CHECKS, machine, needs)]


async def check_broker(
    broker: BrokerConfig, needs: Needs, management: str | None, node: Path | None, ctl: Ctl | None = None
) -> list[Finding]:
    """Check a broker through every available source.

    Args:
        broker: Address of the broker.
        needs: The run's requirements.
        management: URL of its management API. None: on the broker's host.
        node: Folder of a private node that may be this broker.
        ctl: Runs its rabbitmqctl. None: the rabbitmqctl of ``node``, if the broker is that node.
    """

    def no_broker(verdict: Verdict, seen: str, do: str) -> list[Finding]:
        return [Finding("broker", verdict, mask_passwords(seen), "one that answers", do)]

    try:
        addresses = Addresses.of(broker)
        if addresses is None:
            try:
                await own_kind()
            except NodeError as error:
                return no_broker("problem", "none is known, and `trinity-mq run` can start none of its own", str(error))
            do = "give --broker amqp://user:password@host:port/vhost, or set TRINITY_MQ_BROKER_URL"
            return no_broker("warning", "none is known; `trinity-mq run` would start one of its own", do)
        urls = await asyncio.to_thread(addresses.read)
        parts = urlsplit(urls[0])
        facts = Facts(
            urls=urls,
            tls_verified=broker.tls is None or broker.tls.verify,
            user=unquote(parts.username or "guest"),
            vhost=unquote(parts.path[1:]) or "/",
        )
        await ask_amqp(urls, broker.tls, needs.topology, facts)
    except (AddressError, BusRefused) as error:
        return no_broker("problem", str(error), "see what it says above")
    except (BrokerConnectError, TimeoutError) as error:
        do = "is it running, and are host and port right? Is a firewall between?"
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


def lines(results: Sequence[Finding]) -> list[str]:
    """Return the report for a person."""
    width = max((len(finding.subject) for finding in results), default=0)
    report = []
    for finding in results:
        unseen = finding.verdict == "not looked at"
        seen = f"not looked at, because {finding.seen}" if unseen else finding.seen
        report.append(f"{SIGNS[finding.verdict]}  {finding.subject:{width}}  {seen}")
        more = [f"wanted: {finding.wanted}"] if finding.wanted and finding.verdict in {"warning", "problem"} else []
        more += [finding.do if unseen else f"do: {finding.do}"] if finding.do else []
        for text in more:
            report += textwrap.wrap(
                text, 110, initial_indent=" " * 11, subsequent_indent=" " * 13, break_long_words=False
            )
    counts = {verdict: sum(finding.verdict == verdict for finding in results) for verdict in SIGNS}
    return [*report, ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)]

"""Facts about a broker and this machine, their sources, and the needs of a run.

Sources: AMQP, the management API, ``rabbitmqctl`` of a private node, and this machine. The sources do not change the
broker: only an exclusive queue is declared, and it is deleted with the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import operator
import os
import re
import secrets
import shutil
import sysconfig
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from ssl import SSLContext
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import aiohttp
from yarl import URL

from trinity_mq.bus.base import BusRefused, QueueGone
from trinity_mq.bus.rabbit.connection import BrokerConnectError, BrokerConnection, amqp_errors, open_connection
from trinity_mq.bus.topology import Topology
from trinity_mq.config import Config, load_config
from trinity_mq.config.bus import TlsConfig
from trinity_mq.config.engines import ENGINES
from trinity_mq.engines.host.ready_file import free_gpus
from trinity_mq.local_broker.node_files import NodeError
from trinity_mq.messages import DecodeError, Heartbeat, decode
from trinity_mq.observability.report.text import newest_checkpoint
from trinity_mq.runtime.gpus import ask_torch, has_gpu_devices
from trinity_mq.runtime.peers import HEARTBEAT_INTERVAL
from trinity_mq.runtime.process import is_run_over

Ctl = Callable[..., Awaitable[str]]
"""Runs rabbitmqctl with arguments and returns its output."""
ANSWER_SECONDS = 10.0
HEARING_SECONDS = 1.5 * HEARTBEAT_INTERVAL
"""Seconds within which each living agent sends a heartbeat."""
API_PATHS = {
    "nodes": "/api/nodes",
    "policies": "/api/policies/{vhost}",
    "operator_policies": "/api/operator-policies/{vhost}",
    "permissions": "/api/permissions/{vhost}/{user}",
    "feature_flags": "/api/feature-flags",
    "queues": "/api/queues/{vhost}?columns=name,messages,consumers",
}
"""Paths of the questions to the management API. Answers of ``rabbitmqctl`` are converted to the same form."""
STATUS_REASONS = {
    401: "wrong user name or password, or the user has no tag that permits this",
    403: "the user has no tag that permits this",
}


class DoctorFacts(dict[str, Any]):
    """Answers by question. Unanswered questions are not keys; :meth:`why` returns the reasons."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(answers)
        self._reasons: dict[str, list[str]] = {}

    def missing(self, why: str, *questions: str) -> None:
        """Record why questions are not answered."""
        for question in questions:
            self._reasons.setdefault(question, []).append(why)

    def why(self, question: str) -> str:
        """Return why a question is not answered."""
        return "; ".join(dict.fromkeys(self._reasons.get(question, ()))) or "no source reports it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of a run on its broker and on this machine."""

    topology: Topology | None
    config: Config
    """The run's configuration, else a default configuration."""
    exact: bool
    """True if the needs come from a configuration, False if they come from the defaults."""
    engine: str | None = None
    folder_finished: bool | None = None
    """True if the run's folder is marked as finished; None: the folder does not exist here."""

    @classmethod
    def of(cls, run_config: Config | None, run: str | None) -> Needs:
        """Return the needs of ``run_config``, else of the defaults for the run name ``run``; None: no run is named.
        Raises ValueError for an invalid name.
        """
        config = run_config or load_config({"name": "defaults", "model": {"tiny": {}}})
        name = run if run_config is None else run_config.name
        return cls(
            topology=None if name is None else Topology.on(name, config.broker),
            config=config,
            exact=run_config is not None,
            engine=None if run_config is None else run_config.explorer.rollout_model.engine,
            folder_finished=is_run_over(run_config.path)
            if run_config is not None and run_config.path.exists()
            else None,
        )

    @property
    def named(self) -> Topology:
        """The topology; only for checks of a named run."""
        assert self.topology is not None
        return self.topology

    @property
    def hold_seconds(self) -> float:
        """The longest time in seconds that an agent holds a delivery."""
        return max(self.config.hold_seconds.values())

    @property
    def stream_bytes(self) -> int:
        """Upper bound of the size of the run's streams in bytes."""
        return self.config.broker.ready_max_bytes + self.config.broker.results_max_bytes


async def ask_amqp(urls: tuple[str, ...], tls: TlsConfig | None, topology: Topology | None, facts: DoctorFacts) -> None:
    """Add ``server`` (the broker's properties), ``depths`` and ``beats`` to ``facts``, over an AMQP connection.

    ``depths`` are (ready messages, consumers) of the run's existing durable queues. ``beats`` are the last heartbeats
    of the run's agents by id. Without ``topology`` neither is added; without consumers, ``beats`` is not added.

    Raises:
        BusRefused: The broker refuses the connection.
        BrokerConnectError: The broker cannot be reached, or the connection was lost.
        TimeoutError: The broker does not answer.
    """
    connection = await open_connection(urls, tls, "doctor", ANSWER_SECONDS, lambda _reason: None)
    try:
        facts["server"] = dict(connection.server_properties)
        if topology is not None:
            facts["depths"] = await _depths(connection, topology)
            if any(consumers for _, consumers in facts["depths"].values()):
                await _collect_heartbeats(connection, topology, facts)
    finally:
        await connection.close()


async def _call(connection: BrokerConnection, question: Callable[[Any], Awaitable[Any]]) -> Any:
    """Ask on a separate channel, because a refusal closes the channel."""
    async with asyncio.timeout(ANSWER_SECONDS):
        channel = await connection.channel()
        with amqp_errors():
            return await question(channel)


async def _depths(connection: BrokerConnection, topology: Topology) -> dict[str, tuple[int, int]]:
    depths = {}
    for name in (queue.name for queue in topology.durable):
        with contextlib.suppress(QueueGone, BrokerConnectError, BusRefused):
            reply = await _call(connection, operator.methodcaller("queue_declare", name, passive=True))
            depths[name] = (reply.message_count or 0, reply.consumer_count or 0)
    return depths


async def _collect_heartbeats(connection: BrokerConnection, topology: Topology, facts: DoctorFacts) -> None:
    """Record the heartbeats of a run's agents within :data:`HEARING_SECONDS`."""
    queue = topology.listener("doctor", secrets.token_hex(6), "telemetry").name
    beats: dict[str, Heartbeat] = {}
    try:
        await _call(connection, lambda channel: channel.queue_declare(queue, exclusive=True))
        await _call(connection, lambda channel: channel.queue_bind(queue, topology.exchange("telemetry"), "beat.#"))
        await asyncio.sleep(HEARING_SECONDS)
        while (reply := await _call(connection, lambda channel: channel.basic_get(queue, no_ack=True))).body:
            with contextlib.suppress(DecodeError):  # heartbeats of another release may have another form
                beat = decode(reply.body, Heartbeat, reply.header.properties.content_type)
                beats[beat.id] = beat
    except (BrokerConnectError, BusRefused) as error:
        facts.missing(f"heartbeats cannot be received ({error})", "beats")
        return
    facts["beats"] = beats


def management_url(broker: str, management: str | None) -> str:
    """Return the URL of the management API, without a slash at the end: ``management``, else on the broker's host.

    >>> management_url("amqp://u:p@host/v", None)
    'http://u:p@host:15672'
    """
    parts = urlsplit(broker)
    login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else "guest:guest@"
    if management:
        address = urlsplit(management if "://" in management else f"http://{management}")
        return f"{address.scheme}://{'' if '@' in address.netloc else login}{address.netloc}{address.path}".rstrip("/")
    secure = parts.scheme == "amqps"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{'https' if secure else 'http'}://{login}{host}:{15671 if secure else 15672}"


async def ask_management(url: str, ssl: SSLContext | None, facts: DoctorFacts) -> None:
    """Add answers to the open questions of :data:`API_PATHS`, and ``clock``, to ``facts`` through the management API.

    Args:
        url: URL of the API, with user and password.
        ssl: The TLS context, for https.
        facts: Receives the answers, or the reasons for missing answers.
    """
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    names = {name: quote(facts[name], safe="") for name in ("vhost", "user")}
    login = aiohttp.encode_basic_auth(unquote(parts.username or "guest"), unquote(parts.password or ""), "utf-8")
    async with aiohttp.ClientSession(
        headers={"Authorization": login},
        timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
        connector=aiohttp.TCPConnector(ssl=ssl if ssl is not None else True),
    ) as session:
        for question in [name for name in API_PATHS if name not in facts]:
            path = API_PATHS[question].format(**names)
            before = time.time()
            try:
                async with session.get(URL(base + path, encoded=True)) as answer:
                    if "clock" not in facts and (date := answer.headers.get("Date")) is not None:
                        facts["clock"] = _clock(date, before, time.time())
                    if answer.status == 200:
                        facts[question] = await answer.json(content_type=None)
                    else:
                        reason = STATUS_REASONS.get(answer.status, answer.reason)
                        facts.missing(f"{base}{path} answers {answer.status}: {reason}", question)
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                why = str(error) or type(error).__name__
                why = f"no management API at {base} ({why}); is rabbitmq_management enabled?"
                facts.missing(why, "clock", *API_PATHS)
                return


def _clock(date: str, before: float, after: float) -> tuple[float, float]:
    """Return the seconds that a server's clock is ahead, and the maximum error in seconds."""
    theirs = email.utils.parsedate_to_datetime(date).timestamp() + 0.5  # the header is truncated to whole seconds
    return theirs - (before + after) / 2, 0.5 + (after - before) / 2


# One call for all questions, because each call takes up to a second. Names are passed as bytes, so that they are never
# evaluated as code.
SCRIPT = """
V = %(vhost)s, U = %(user)s,
E = fun(K) -> case application:get_env(rabbit, K) of {ok, X} when is_integer(X) -> X; _ -> 0 end end,
D = fun(X) when is_integer(X) -> X; (_) -> null end,
P = fun(L) -> [#{name => proplists:get_value(name, X), pattern => proplists:get_value(pattern, X),
  'apply-to' => proplists:get_value('apply-to', X), priority => proplists:get_value(priority, X),
  definition => maps:from_list(proplists:get_value(definition, X))} || X <- L, proplists:get_value(vhost, X) =:= V] end,
R = try rabbit_auth_backend_internal:list_user_vhost_permissions(U, V) of
  [X | _] -> maps:from_list(X); [] -> null catch _:_ -> null end,
A = [case X of {{resource_limit, W, _}, _} -> W; {W, _} -> W end || X <- rabbit_alarm:get_alarms()],
F = fun(S) -> [#{name => X, state => S} || X <- maps:keys(rabbit_feature_flags:list(S))] end,
io:put_chars(rabbit_json:encode(#{
  limits => #{consumer_timeout => E(consumer_timeout), max_message_size => E(max_message_size)},
  nodes => [#{name => node(), mem_alarm => lists:member(memory, A), disk_free_alarm => lists:member(disk, A),
    other_alarms => A -- [memory, disk], disk_free => D(rabbit_disk_monitor:get_disk_free()),
    disk_free_limit => D(rabbit_disk_monitor:get_disk_free_limit())}],
  policies => P(rabbit_policy:list()), operator_policies => P(rabbit_policy:list_op()), permissions => R,
  feature_flags => F(enabled) ++ F(disabled),
  queues => [#{name => element(4, amqqueue:get_name(X))} || X <- rabbit_amqqueue:list(V)]})), io:nl(), ok.
"""


async def ask_rabbitmqctl(ctl: Ctl, facts: DoctorFacts) -> None:
    """Add ``limits``, ``clock`` and answers to the questions of :data:`API_PATHS` to ``facts``, through the
    ``rabbitmqctl`` of a private node.
    """
    questions = ("limits", *API_PATHS)
    as_bytes = {name: f"<<{','.join(str(byte) for byte in facts[name].encode())}>>" for name in ("vhost", "user")}
    try:
        printed = await ctl("eval", " ".join((SCRIPT % as_bytes).split()))
        report = json.loads(next(line for line in printed.split("\n") if line.startswith("{")))
        answers = {question: report[question] for question in questions if report[question] is not None}
    except (NodeError, StopIteration, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        facts.missing(f"rabbitmqctl does not report it ({why})", *questions, "clock")
        return
    facts.update(answers, clock=(0.0, 0.0))  # the clock of a private node is this machine's clock
    facts.missing(f"the broker knows no permission of user {facts['user']!r} on {facts['vhost']!r}", "permissions")


def ask_machine(folder: Path) -> DoctorFacts:
    """Return the facts about this machine. The call takes seconds.

    Args:
        folder: The run folder; it does not need to exist.
    """
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    saved = newest_checkpoint(folder)
    return DoctorFacts(
        **{engine: _installed(row.packages) for engine, row in ENGINES.items() if row.packages},
        torch=ask_torch(),
        has_gpu_devices=has_gpu_devices(),
        gpus=free_gpus(folder),
        driver=driver_version(Path("/proc/driver/nvidia/version")),
        vllm_refusal=_vllm_refusal(),
        compiler=find_compiler(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        folder=folder,
        folder_free=shutil.disk_usage(existing).free,
        folder_is_writable=os.access(existing, os.W_OK),
        checkpoint_bytes=sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) if saved else 0,
    )


def driver_version(path: Path) -> str | None:
    """Return the version of the NVIDIA driver, such as ``580.65.06``, from the kernel module's description in ``path``;
    None: no driver.
    """
    try:
        text = path.read_text()
    except OSError:
        return None
    version = re.search(r"\s(\d+(?:\.\d+)+)\s", text)
    return None if version is None else version[1]


def find_compiler() -> str | None:
    """Return the C compiler that Triton calls: ``CC``, else gcc, else clang; None: none is installed."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


def _vllm_refusal() -> str:
    """Return why the installed vLLM cannot be used; empty: its version is supported."""
    from trinity_mq.engines.vllm.api import checked_version
    from trinity_mq.models.errors import ModelError

    try:
        checked_version()
    except ModelError as error:
        return str(error)
    return ""


def _installed(names: Sequence[str]) -> dict[str, str]:
    return {package.name: package.version for name in names for package in distributions(name=name)}

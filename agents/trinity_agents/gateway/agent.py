"""The gateway: answers HTTP requests of agents, and submits rewarded sessions as tasks.

Input: HTTP requests; rewards and ends on ``sessions``; the trainer's progress on ``results``; engines' heartbeats.
Output: HTTP responses; events on ``sessions``; tasks to ``submit``.
Waits for: the run's id in an explorer's heartbeat, and engines with weights, but never for the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Callable

import structlog
from aiohttp import web

from trinity_agents.gateway.acting_gateway import ActingGateway
from trinity_agents.gateway.session_stream import SessionStream
from trinity_mq.bus import Bus, Topology
from trinity_mq.config import Config
from trinity_mq.gateway.access import Access, read_keys
from trinity_mq.gateway.app import SHUTDOWN_SECONDS, GatewayApp
from trinity_mq.gateway.engines import EngineCalls
from trinity_mq.gateway.lineages import BREAK_CAUSES
from trinity_mq.gateway.settings import AppSettings
from trinity_mq.messages import GatewayStatus
from trinity_mq.models.clients import EngineClients
from trinity_mq.models.engine_selection import EngineSelector
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.telemetry import MetricsWriter

log = structlog.get_logger(__name__)

REPORT_SECONDS = 10.0
"""Seconds between two reports of metrics."""


class Gateway(Agent):
    """One gateway of a run; any number of gateways can serve the same sessions.

    Args:
        config: The run's configuration.
        bus: A bus that is not connected yet.
        topology: Names of the run's queues and exchanges.
        agent_id: This agent's id; the number at the end of the id is added to ``gateway.port``, unless that is 0.
        metrics: Writes metrics.
        clock: Returns seconds since the epoch.
    """

    role = "gateway"

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        agent_id: str = "gateway-0",
        metrics: MetricsWriter | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self._clock = clock
        self._access = Access(read_keys(config.gateway.key_file))
        self._tls = _tls(config)
        self._selector = EngineSelector(lambda: self.peers.alive("engine"))
        self.store: SessionStream | None = None
        self._app: GatewayApp | None = None
        self._acts = False
        self.url = ""
        """Base URL at which the gateway listens, empty before it listens."""

    def detail(self) -> GatewayStatus:
        """Return the gateway's URL and counters, with the number of sessions in each state."""
        if self.store is None or self._app is None:
            return GatewayStatus(url=self.url)
        ledger, app = self.store.ledger, self._app
        return GatewayStatus(
            url=self.url if self.store.is_ready() else "",
            acting=self._acts,
            open=ledger.open,
            parked=ledger.over - ledger.waiting,
            waiting=ledger.waiting,
            kept_bytes=ledger.kept_bytes,
            asking=app.asking,
            calls=app.counts["calls"],
            unrecorded=app.counts["unrecorded"],
            trained=ledger.counts["trained"],
            dropped=ledger.counts["dropped"],
            sampled_out=ledger.counts["sampled_out"],
        )

    async def serve(self) -> None:
        """Serve sessions until drained or the run is over."""
        self.set_state("holding", "an explorer that says which run this is")
        await self.woken.until(lambda: self.bus.run_id is not None or self.draining.is_set())
        if self.draining.is_set():
            return
        settings = self.config.gateway
        async with contextlib.AsyncExitStack() as stack:
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            clients = await stack.enter_async_context(EngineClients())
            recording = await stack.enter_async_context(asyncio.TaskGroup())
            self.store = SessionStream(
                self.bus,
                self.topology,
                record_timeout=settings.record_timeout,
                tasks=recording,
                clock=self._clock,
            )
            engines = EngineCalls(
                self._selector,
                clients,
                not_ready_timeout=settings.not_ready_timeout,
                request_timeout=settings.request_timeout,
            )
            self._app = GatewayApp(
                AppSettings.of(self.config), self.store, engines, self._access, self._public_url, self._clock
            )
            await self.run_with_background(
                self._serve_http(self._app),
                self.store.follow(),
                self._act(self.store),
                self._follow_engines(),
                self._report_metrics(),
            )

    async def _serve_http(self, app: GatewayApp) -> None:
        runner = web.AppRunner(
            app.application(), access_log=None, handler_cancellation=True, shutdown_timeout=self._shutdown_seconds
        )
        await runner.setup()
        try:
            settings = self.config.gateway
            port = settings.port + _number(self.id) if settings.port else 0
            site = web.TCPSite(runner, settings.host, port, ssl_context=self._tls)
            try:
                await site.start()
            except OSError as error:
                raise FatalError(
                    f"the gateway cannot listen on {settings.host}:{port}: {error.strerror or error}; set gateway.port "
                    "to a free one, or to 0 for any"
                ) from error
            scheme = "http" if self._tls is None else "https"
            self.url = f"{scheme}://{settings.host}:{site.port}"
            log.info("gateway_listens", agent=self.id, url=self.url)
            self.set_state("working")
            self.heartbeat_now()
            await self.woken.until(lambda: self.draining.is_set() or self.peers.explorer.finished)
        finally:
            await runner.cleanup()

    @property
    def _shutdown_seconds(self) -> float:
        return min(SHUTDOWN_SECONDS, self.config.runner.drain_timeout)

    def _public_url(self) -> str:
        return (self.config.gateway.public_url or self.url).rstrip("/")

    async def _act(self, store: SessionStream) -> None:
        """Act for the run once the stream has been read and no other gateway holds the lock; return if drained."""
        await store.changed.until(store.is_ready)
        self.heartbeat_now()
        if not await self.take_lock("gateway", "working", "", until=self.draining.is_set):
            return
        self._acts = True
        acting = ActingGateway(
            self.config,
            self.bus,
            self.topology,
            store,
            agent_id=self.id,
            clock=self._clock,
            may_act=lambda: self.lock is not None and self.lock.held,
        )
        await self.run_with_background(self.restart_when_lock_lost(), acting.run())

    async def _follow_engines(self) -> None:
        while True:
            self._selector.receive()
            await self.peers.changed.wait()

    async def _report_metrics(self) -> None:
        """Report the sessions' metrics with the trainer's latest step, until cancelled. Only the acting gateway and
        gateways that have had calls report.
        """
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            status, app = self.detail(), self._app
            if app is None or not (self._acts or app.counts["calls"]):
                continue
            names = (
                "open",
                "parked",
                "waiting",
                "kept_bytes",
                "calls",
                "unrecorded",
                "trained",
                "dropped",
                "sampled_out",
            )
            values = {f"serve/{name}": float(getattr(status, name)) for name in names}
            values |= {f"serve/{name}": float(app.counts[name]) for name in ("lineages", "ties", "malformed_calls")}
            values |= {f"serve/breaks/{cause}": float(app.counts[f"breaks_{cause}"]) for cause in BREAK_CAUSES}
            rewards, app.store.ledger.evaluated = app.store.ledger.evaluated, []
            if rewards and self._acts:
                values |= {
                    "serve/eval_reward": math.fsum(rewards) / len(rewards),
                    "serve/eval_sessions": float(len(rewards)),
                }
            self.report(self.peers.trainer.step, values)


def _number(agent_id: str) -> int:
    last = agent_id.rpartition("-")[2]
    return int(last) if last.isdecimal() else 0


def _tls(config: Config) -> ssl.SSLContext | None:
    settings = config.gateway
    if settings.cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.cert_file, settings.cert_key_file)
    except (OSError, ssl.SSLError) as error:
        raise FatalError(f"gateway.cert_file {settings.cert_file} cannot be used: {error}") from error
    return context


def main(config: Config, agent_id: str = "gateway-0") -> int:
    """Run one gateway until the run is over or the gateway is drained; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Gateway:
        metrics = MetricsWriter(config.path, "gateway", agent_id, config.monitor.tensorboard)
        return Gateway(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)

    return run_daemon(config, agent_id, "gateway", build)

"""Host of an engine: starts it or adopts a living engine, keeps it alive, and forwards the sync gate's commands.

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)

from trinity_mq.config import AuxiliaryModelConfig, Config
from trinity_mq.config.engines import engine_row
from trinity_mq.config.threads import cpu_threads
from trinity_mq.engines.card import CardLock
from trinity_mq.engines.host.admin_client import EngineAdmin
from trinity_mq.engines.host.process import ENGINE_COMMAND, EngineProcess
from trinity_mq.engines.host.ready_file import ReadyFile, engine_digest, free_gpus
from trinity_mq.engines.state import PAUSE_LEASE
from trinity_mq.messages import EngineUse, Version
from trinity_mq.models.errors import EngineError, EngineFailed, EngineLost
from trinity_mq.models.inference import EngineSnapshot
from trinity_mq.runtime.gpus import visible_devices
from trinity_mq.runtime.placement import engine_environments, engine_names
from trinity_mq.runtime.process import write_atomic
from trinity_mq.runtime.processes.exit_reasons import describe_exit_code, exit_reason, read_output_tail

log = structlog.get_logger(__name__)

START_TIMEOUT = 300.0
STOP_GRACE = 40.0
"""Seconds that an engine has to end after ``shutdown``; longer than an engine's own grace for its running batch step.
"""
MAX_RENEW_INTERVAL = 2.0
"""Maximum seconds between two renewals of a lease. Renewals also return the engine's load, by which runners choose an
engine.
"""
ADOPT_TIMEOUT = 10.0
REPORTED = ("state", "name", "model_path", "fingerprint", "progress", "load", "tokens")
"""Fields of an engine's state that its snapshot also holds."""


class EngineHost:
    """Host of one engine: call ``start``, run ``keep`` as a task, and end with ``stop`` or with ``detach``, which
    leaves the engine running.

    With ``auxiliary`` the engine serves that model instead of the policy, and accepts none of the sync gate's commands.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        engine_id: str,
        *,
        auxiliary: AuxiliaryModelConfig | None = None,
        on_change: Callable[[], None] = lambda: None,
        command: Sequence[str] | None = None,
        start_timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.id, self.auxiliary = config, engine_id, auxiliary
        self.run_dir = run_dir.resolve()
        self.snapshot = EngineSnapshot(engine_id)
        self.on_change = on_change
        self._command = command or ENGINE_COMMAND
        self.environment = environment or {}
        """Environment variables of the engine in addition to the environment of this process."""
        self._start_timeout = start_timeout or _start_timeout(config, auxiliary)
        self._lease = config.explorer.rollout_model.lease
        self._process: EngineProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._closing = False

    @property
    def ready_file(self) -> Path:
        """File in which the engine reports that it is ready."""
        return self.run_dir / "engines" / f"{self.id}.ready.json"

    @property
    def output(self) -> Path:
        """File that receives the engine's stdout and stderr."""
        return self.run_dir / "logs" / f"engine-{self.id}.out"

    async def start(self) -> None:
        """Adopt the living engine of this id, or start an engine.

        Raises:
            ModelError: No engine can run with this model.
            EngineFailed: The engine did not become ready.
        """
        for path in (self.ready_file, self.output):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._session = aiohttp.ClientSession()
        try:
            if not await self._adopt():
                await self._spawn()
        except BaseException:
            await self._session.close()
            raise

    async def hold(self) -> None:
        """Renew the lease of the started engine until cancelled, while other engines start and :meth:`keep` does not
        run.
        """
        assert self._process is not None, "start the engine first"
        await self._renew(self._process)

    async def keep(self) -> None:
        """Renew the engine's lease, and restart the engine whenever it dies, until :meth:`stop`.

        Raises:
            ModelError: No engine can run with this model.
            EngineFailed: The engine did not become ready, or died soon after its start, too many times in a row.
        """
        while not self._closing:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(EngineFailed),
                wait=wait_exponential_jitter(multiplier=0.1, max=15.0, jitter=0.2),
                stop=stop_after_attempt(self.config.supervisor.max_restarts + 1),
                before_sleep=_log_restart,
                reraise=True,
            ):
                with attempt:
                    await self._run_until_death()

    async def stop(self) -> None:
        """End the engine for good; it finishes its batch step. Cancel :meth:`keep` before or after this call."""
        self._closing = True
        if self._process is not None:
            with contextlib.suppress(EngineError):
                await self._admin().post("shutdown", {})
            try:
                async with asyncio.timeout(STOP_GRACE):
                    await self._process.exited()
            except TimeoutError:
                log.warning("engine_killed", engine=self.id, after_seconds=STOP_GRACE)
                self._process.kill()
                await self._process.exited()
            self._mark_gone("gone")
            self.ready_file.unlink(missing_ok=True)
        await self._close_session()

    async def detach(self) -> None:
        """Leave the engine alive until its lease runs out, for a successor to adopt. Cancel :meth:`keep` before this
        call.
        """
        self._closing = True
        if self._process is not None:
            self._process.detach()
        await self._close_session()

    # -- commands of the sync gate

    async def pause(self, timeout: float = 60.0) -> None:
        """Start no more batch steps and wait for the running step. The engine resumes by itself after the larger of
        twice ``timeout`` and :data:`PAUSE_LEASE` seconds.

        Raises:
            EngineRefused: 504; the batch step did not end within ``timeout`` seconds, and the engine resumes.
            EngineLost: The engine did not answer.
        """
        lease = max(PAUSE_LEASE, 2 * timeout)
        await self._command_engine("pause", {"timeout": timeout, "lease": lease}, timeout + 10.0)

    async def receive(self, spec: dict[str, Any], timeout: float = 600.0) -> dict[str, Any]:
        """Make the paused engine receive the weights of ``spec``. Return a mapping: ``seconds`` holds the durations of
        ``receive`` and ``apply``; ``logprobs`` holds the canary's logprobs, if ``spec`` has canary tokens.

        Raises:
            ReceiveFailed: The weights did not arrive or do not fit, the engine is not paused, or it has another
                transfer. ``touched`` says whether the old weights are lost.
            EngineLost: The engine did not answer.
        """
        answer = await self._command_engine("receive", {"spec": spec, "timeout": timeout}, timeout + 30.0)
        return {**answer["canary"], "seconds": answer["seconds"]}

    async def commit(self, version: Version, progress: int) -> None:
        """Record ``version`` for the received weights, and serve them.

        Raises:
            EngineRefused: No weights were received, or weights of another version.
            EngineLost: The engine did not answer.
        """
        await self._command_engine("commit", {"version": list(version), "progress": progress})

    async def resume(self) -> None:
        """Cut off a running transfer and serve the present weights: the old version if it is untouched, else nothing.

        Raises:
            EngineLost: The engine did not answer.
        """
        await self._command_engine("resume", {})

    async def refresh(self) -> EngineSnapshot:
        """Fetch the engine's state and return the updated snapshot.

        Raises:
            EngineLost: The engine did not answer.
        """
        self._update(await self._admin().state())
        return self.snapshot

    async def weight(self, name: str) -> bytes:
        """Return one committed weight as safetensors bytes.

        Raises:
            EngineRefused: No weight has this name, or nothing is committed.
            EngineLost: The engine did not answer.
        """
        return await self._admin().weight(name)

    # -- internals

    async def _command_engine(self, command: str, body: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        answer = await self._admin().post(command, body, timeout)
        self._update(answer["state"])
        return answer

    def _admin(self) -> EngineAdmin:
        if self._process is None or self._session is None:
            raise EngineLost(f"engine {self.id} is not running")
        return EngineAdmin(self._session, self._process.ready.url, self._process.ready.token)

    async def _adopt(self) -> bool:
        """Adopt the engine of an earlier host if it is alive, answers, and was built from the same settings.

        Otherwise a living engine is killed.
        """
        ready = ReadyFile.read(self.ready_file)
        if ready is None or not ready.lives():
            return False
        process = self._process = EngineProcess(ready, None)
        try:
            state = await self._admin().state(ADOPT_TIMEOUT)
            devices = visible_devices({**os.environ, **self.environment})
            if ready.digest == engine_digest(self.config, self.auxiliary, devices):
                await self._command_engine("lease", {"seconds": self._lease})
                # the earlier host paused the engine for a sync whose end will not be reported to the engine
                if state["state"] == "paused":
                    await self.resume()
                log.info(
                    "engine_adopted", engine=self.id, pid=ready.pid, state=state["state"], version=state["version"]
                )
                return True
            log.info("engine_outdated", engine=self.id, pid=ready.pid)
        except EngineError as error:
            log.warning("engine_not_adopted", engine=self.id, pid=ready.pid, reason=str(error))
        process.kill()
        await process.exited()
        self._process = None
        return False

    async def _spawn(self) -> None:
        settings = self.ready_file.with_name(f"{self.id}.config.json")
        data = self.config.model_dump(mode="json")
        data["broker"]["url"] = None  # an engine needs no broker, and the URL may hold a password
        data["run_dir"] = str(self.run_dir)
        write_atomic(settings, json.dumps(data).encode(), 0o600)
        self._change(alive=False, state="loading", url="", version=None, load=0)
        command = [*self._command, "--config", str(settings), "--id", self.id]
        threads = self.config.explorer.rollout_model.num_threads
        if self.auxiliary is not None:
            command += ["--auxiliary", self.auxiliary.name]
            threads = self.auxiliary.num_threads
        async with self._card():
            process = self._process = await EngineProcess.spawn(
                command,
                self.ready_file,
                self.output,
                environment={**self.environment, "OMP_NUM_THREADS": str(cpu_threads(self.config, threads))},
                timeout=self._start_timeout,
            )
        await self.refresh()
        log.info("engine_started", engine=self.id, pid=process.ready.pid, url=process.ready.url)

    @contextlib.asynccontextmanager
    async def _card(self) -> AsyncIterator[None]:
        """If the engine shares its card with the trainer, wait for the card's lock and hold it during the start."""
        lock = CardLock(self.run_dir)
        if self.config.synchronizer.colocated and self.auxiliary is None:
            await lock.take(shared=True)
        try:
            yield
        finally:
            lock.release()

    async def _run_until_death(self) -> None:
        """Start the engine unless it is alive, and watch it until it dies; raise EngineFailed if it died within one
        lease.
        """
        if self._process is None:
            await self._spawn()
            self._change(restarts=self.snapshot.restarts + 1)
        process = self._process
        assert process is not None
        loop = asyncio.get_running_loop()
        born = loop.time()
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(self._renew(process))
            code = await process.exited()
            renewing.cancel()
        if self._closing:
            return
        self._mark_gone("loading")
        seconds = loop.time() - born
        log.warning("engine_died", engine=self.id, exit_code=code, after_seconds=round(seconds, 1))
        if seconds < self._lease:
            why = self._why_it_died(code)
            raise EngineFailed(f"engine {self.id} died after {seconds:.0f} s: {why}; see {self.output}")

    def _why_it_died(self, code: int | None) -> str:
        """Return the cause of death from ``code``, an exit code of Popen. ``code`` is None for an adopted engine."""
        if code is None:
            return exit_reason(read_output_tail(self.output), 1) or "its exit code is not known"
        code = code if code >= 0 else 128 - code
        return exit_reason(read_output_tail(self.output), code) or describe_exit_code(code)

    async def _renew(self, process: EngineProcess) -> None:
        """Renew the lease until cancelled. Kill an engine that has not answered for a whole lease: it is frozen."""
        loop = asyncio.get_running_loop()
        interval = min(self._lease / 4, MAX_RENEW_INTERVAL)
        answered = loop.time()
        while True:
            await asyncio.sleep(interval)
            # no call of on_change: the next heartbeat reports for how long the engine has not answered
            self.snapshot = dataclasses.replace(self.snapshot, asked_at=self.snapshot.asked_at or loop.time())
            try:
                await self._command_engine("lease", {"seconds": self._lease}, self._lease / 4)
                answered = loop.time()
                self.snapshot = dataclasses.replace(self.snapshot, asked_at=None)
            except EngineError as error:
                log.warning("lease_not_renewed", engine=self.id, reason=str(error))
                if loop.time() - answered > self._lease:
                    process.kill()

    def _update(self, state: dict[str, Any]) -> None:
        version = None if state["version"] is None else tuple(state["version"])
        reported = {name: state[name] for name in REPORTED}
        use = EngineUse.model_validate(state["use"]) if state.get("use") else None
        self._change(alive=True, url=self._admin().url, version=version, use=use, **reported)

    def _mark_gone(self, state: str) -> None:
        self._process = None
        self._change(alive=False, state=state, url="", version=None, load=0, use=None, asked_at=None)

    def _change(self, **fields: Any) -> None:
        changed = dataclasses.replace(self.snapshot, **fields)
        if changed != self.snapshot:
            self.snapshot = changed
            self.on_change()

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()


def _start_timeout(config: Config, auxiliary: AuxiliaryModelConfig | None) -> float:
    model = auxiliary or config.explorer.rollout_model
    section = getattr(model, engine_row(model.engine).settings, None)
    return START_TIMEOUT if section is None else float(section.start_timeout)


def rollout_hosts(config: Config, agent_id: str) -> list[EngineHost]:
    """Return the hosts of an agent's policy engines."""
    environment = engine_environments(config, agent_id, lambda: free_gpus(config.path).gpus, auxiliary=False)
    return [
        EngineHost(config, config.path, name, environment=environment(name))
        for name in engine_names(f"{agent_id}-engine", config.explorer.rollout_model.engine_num)
    ]


def auxiliary_hosts(config: Config, agent_id: str) -> list[EngineHost]:
    """Return the hosts of an agent's auxiliary engines."""
    environment = engine_environments(config, agent_id, lambda: free_gpus(config.path).gpus, auxiliary=True)
    return [
        EngineHost(config, config.path, name, auxiliary=model, environment=environment(name))
        for model in config.explorer.auxiliary_models
        for name in engine_names(f"{agent_id}-auxiliary-{model.name}", model.engine_num)
    ]


def _log_restart(state: RetryCallState) -> None:
    pause = state.next_action.sleep if state.next_action else 0.0
    log.info("engine_restart_scheduled", tries=state.attempt_number, in_seconds=round(pause, 2))

"""The engine ``vllm``: runs vLLM's server as a child process, with a generator, a batcher and a receiver for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from tenacity import AsyncRetrying, retry_if_result, wait_fixed

from trinity_mq.config import ModelConfig
from trinity_mq.engines.generation.batch_step import PauseMode
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.host.ready_file import TOKEN_VARIABLE
from trinity_mq.engines.protocol import Engine, EngineJob
from trinity_mq.engines.server.http_server import HttpServer
from trinity_mq.engines.state import EngineState
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import VllmClient
from trinity_mq.models.errors import EngineFailed
from trinity_mq.runtime.gpu_memory import shares_gpu
from trinity_mq.runtime.gpus import visible_devices
from trinity_mq.runtime.placement import PLACED_VARIABLE

if TYPE_CHECKING:
    from trinity_mq.engines.server.server import EngineServer

log = structlog.get_logger(__name__)

ASK_EVERY = 0.2
STOP_SECONDS = 10.0
"""Seconds that vLLM has to stop before it is killed. It holds no state that is worth a longer wait."""


async def _until_ready(child: Process, client: VllmClient) -> None:
    """Wait until vLLM accepts requests. The engine's host limits the time.

    Raises:
        EngineFailed: vLLM ended before it was ready.
    """
    asking = AsyncRetrying(
        retry=retry_if_result(lambda healthy: not healthy and child.returncode is None), wait=wait_fixed(ASK_EVERY)
    )
    await asking(client.healthy)
    if child.returncode is not None:
        raise EngineFailed(f"vLLM ended before it accepted requests (exit code {child.returncode})")


@contextlib.asynccontextmanager
async def _running(command: Sequence[str], settings: Mapping[str, str]) -> AsyncIterator[Process]:
    """Run vLLM's server during the block, with the environment ``settings`` in addition to ours without the token."""
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, env={**inherited, **settings}
    )
    log.info("vllm_started", pid=child.pid)
    try:
        yield child
    finally:
        await _stop(child)


async def _stop(child: Process) -> None:
    """End vLLM's server."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await child.wait()
    except TimeoutError:
        log.warning("vllm_killed", pid=child.pid, after_seconds=STOP_SECONDS)
        _kill(child)
        await child.wait()


def _kill(child: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()


class VllmEngine(Engine):
    """Runs vLLM's server, which ends when this process ends, for any reason."""

    def check(self) -> None:
        """Raise ModelError if vLLM is not installed or its version is not supported."""
        api.checked_version()

    @contextlib.asynccontextmanager
    async def serve(self, job: EngineJob) -> AsyncIterator[HttpServer]:
        """Run vLLM's server, and stop the yielded server when vLLM ends by itself; the host then restarts both."""
        folder = job.folder()
        async with _vllm_server(job, folder) as (server, child), asyncio.TaskGroup() as group:
            if job.auxiliary is not None:
                server.state.serve_fixed_weights()
            watching = group.create_task(_stop_with(child, server.stop), name="vllm")
            yield server
            watching.cancel()


def _routed_layers(model: ModelConfig, *, cpu: bool, fixed: bool) -> list[int]:
    """Return the numbers of the layers whose experts are part of answers; empty if answers do not carry experts.

    Raises:
        ModelError: The model has no routers of a known kind.
    """
    from trinity_mq.models.model_folder import empty_model
    from trinity_mq.models.routers import Routers

    empty = empty_model(model) if api.returns_experts(model, cpu=cpu, fixed=fixed) else None
    return [] if empty is None else Routers(empty).places


@contextlib.asynccontextmanager
async def _vllm_server(job: EngineJob, folder: Path) -> AsyncIterator[tuple[EngineServer, Process]]:
    """Run vLLM's server during the block. Its weights come from ``folder`` for an auxiliary model, or if the sync sends
    adapters; otherwise they are random.

    The receiver of ``job`` receives adapters; full weights are received by vLLM's workers.

    Raises:
        ModelError: vLLM is not installed, its version is not supported, or it does not support this model or adapters
            on it.
        EngineFailed: vLLM did not start.
    """
    from trinity_mq.engines.torch.generator import choose_device, refuse_transfer
    from trinity_mq.engines.vllm.adapters import AdapterGenerator, VllmAdapters, adapter_plan
    from trinity_mq.engines.vllm.flow import VllmBatcher
    from trinity_mq.engines.vllm.generator import VllmGenerator, model_limits

    version = api.checked_version()
    config, auxiliary, model = job.config, job.auxiliary, job.model
    rollout, fixed = config.explorer.rollout_model, auxiliary is not None
    mode: PauseMode = "wait" if fixed else config.synchronizer.effective_pause_mode
    if auxiliary is not None:
        same = {"vllm": auxiliary.vllm, "tensor_parallel_size": auxiliary.tensor_parallel_size}
        rollout = rollout.model_copy(update=same)
    cpu = choose_device(model.device) == "cpu"
    codec = TextCodec.of_model(folder, model)
    vocabulary, max_model_len = model_limits(model, folder, job.tensor_parallel_size)
    plan = None if fixed else adapter_plan(config, folder, cpu=cpu)
    # only a supervisor knows all processes of this machine
    dedicated = PLACED_VARIABLE in os.environ and bool(visible_devices()) and not shares_gpu()
    sleeps = config.synchronizer.colocated and not cpu and not fixed
    log.info("vllm_starts", version=version, model=str(folder))
    # a private folder, because access to the socket gives control of the server; its path must be short
    with tempfile.TemporaryDirectory(prefix="tmq-vllm-", ignore_cleanup_errors=True) as private:
        home = Path(private)
        socket, room = home / "http.sock", plan.room if plan else None
        command = api.server_command(
            folder, socket, model, rollout, max_model_len, cpu=cpu, dedicated=dedicated, room=room, fixed=fixed
        )
        command += ["--enable-sleep-mode"] if sleeps else []
        settings = api.server_environment(rollout, job.num_threads, cpu=cpu, adapters=plan is not None)
        async with _running(command, settings) as child, VllmClient(socket) as client:
            await _until_ready(child, client)
            build: Callable[..., VllmGenerator] = VllmGenerator
            adapters: VllmAdapters | None = None
            if plan:
                adapters = VllmAdapters(client, home, plan)
                build = functools.partial(AdapterGenerator, adapters, plan, job.receiver)
            generator = build(
                codec,
                client,
                vocabulary=vocabulary,
                max_model_len=max_model_len,
                pause_mode=mode,
                recompute_cache=rollout.vllm.recompute_cache,
                give_up=lambda: _kill(child),
                home=home,
                workers=job.tensor_parallel_size,
                sleeps=sleeps,
            )
            receive = refuse_transfer if fixed else generator.receive

            def batcher(state: EngineState) -> VllmBatcher:
                return VllmBatcher(
                    client,
                    state,
                    codec,
                    max_sequences=rollout.max_batch_sequences,
                    pause_mode=mode,
                    adapters=adapters,
                    routed_layers=_routed_layers(model, cpu=cpu, fixed=fixed),
                )

            yield job.server(generator, folder, receive, batcher), child


async def _stop_with(child: Process, stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the reason when vLLM ends by itself."""
    stop(f"vLLM ended (exit code {await child.wait()})")

"""Process of one rollout engine: loads structure and tokenizer from the model folder, gets weights from the trainer,
and serves HTTP.

Its host (:class:`trinity_mq.models.EngineHost`) starts it; the engine survives its host for the time of a lease.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from trinity_mq.config import Config
from trinity_mq.config.threads import cpu_threads
from trinity_mq.engines.host.ready_file import TOKEN_VARIABLE, engine_digest, ready_descriptor, refuse, write_ready
from trinity_mq.engines.server.admin_api import Receiver
from trinity_mq.engines.server.server import EngineServer, ServerSettings
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.engines.vllm.engine import VllmParts, stop_with, vllm_parts
from trinity_mq.engines.vllm.generator import VllmGenerator
from trinity_mq.models.errors import EngineFailed
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.runtime.errors import EXIT_FATAL, FatalError
from trinity_mq.runtime.event_loop import run_on_fast_loop
from trinity_mq.telemetry import flush_trace, setup_logging, start_trace

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None, receiver: Receiver | None = None) -> int:
    """Run one engine until its lease expires or it is stopped; returns the exit code.

    Args:
        arguments: The command line.
        receiver: Receives weights; None: the receiver for all channels of the trainer.
    """
    parser = argparse.ArgumentParser(prog="python -m trinity_agents.engine.agent", description="One rollout engine.")
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration as JSON")
    parser.add_argument("--id", required=True, help="the engine's id")
    parser.add_argument("--ready-file", type=Path, required=True, help="file written once the engine accepts requests")
    parser.add_argument(
        "--ready-fd", type=ready_descriptor, help="file descriptor closed after the ready file is written"
    )
    options = parser.parse_args(arguments)
    try:
        config = Config.model_validate(json.loads(options.config.read_bytes()))
        setup_logging(
            "engine",
            options.id,
            config.path,
            config.monitor.log_level,
            run=config.name,
            max_bytes=config.monitor.log_max_bytes,
        )
        monitor = config.monitor
        start_trace(
            "engine", options.id, config.path, on=monitor.traced, sample=monitor.sample, exported_only=not monitor.trace
        )
        if receiver is None:
            from trinity_mq.sync.channels.receiver import receive_weights

            receiver = receive_weights
        run_on_fast_loop(_serve(config, options, receiver))
    except (FatalError, OSError, ValueError) as error:
        log.error("engine_start_failed", engine=options.id, reason=str(error))
        print(f"engine {options.id}: {error}", file=sys.stderr, flush=True)  # noqa: T201  # what its host shows
        refuse(options.ready_file, options.ready_fd)
        return EXIT_FATAL
    except EngineFailed as error:  # vLLM has printed the reason above; our host retries
        log.error("engine_failed", engine=options.id, reason=str(error))
        return 1
    return 0


async def _serve(config: Config, options: argparse.Namespace, receiver: Receiver) -> None:
    rollout = config.explorer.rollout_model
    folder = ensure_model_folder(config.model, config.path / "model", config.seed)
    if rollout.engine == "vllm":
        async with vllm_parts(config, folder, receiver) as vllm:
            await _serve_generator(config, options, folder, vllm.generator, vllm.receiver, vllm)
    else:
        generator = TextGenerator.build(config.model, folder, num_threads=cpu_threads(config, rollout.num_threads))
        await _serve_generator(config, options, folder, generator, receiver)


async def _serve_generator(
    config: Config,
    options: argparse.Namespace,
    folder: Path,
    generator: TextGenerator | VllmGenerator,
    receiver: Receiver,
    vllm: VllmParts | None = None,
) -> None:
    rollout = config.explorer.rollout_model
    gc.collect()
    gc.freeze()  # imported objects stay for good, and each full collection over them would stop batch steps for 0.2 s
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    name = config.model.model_path or f"{config.name}-tiny"
    fingerprint = generator.codec.fingerprint()
    settings = ServerSettings(
        engine_id=options.id,
        model_name=name,
        model_path=str(folder),
        token=token,
        fingerprint=fingerprint,
        host=rollout.host,
        max_response_tokens=config.model.max_response_tokens,
        max_batch_sequences=rollout.max_batch_sequences,
        pause_mode=config.synchronizer.effective_pause_mode,
        lease=rollout.lease,
    )
    server = EngineServer(generator, settings, receiver, vllm.batcher if vllm else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop, signal.Signals(number).name)

    def ready(url: str) -> None:
        fields = {"token": token, "name": name, "model_path": str(folder), "fingerprint": fingerprint}
        write_ready(
            options.ready_file, options.ready_fd, id=options.id, url=url, digest=engine_digest(config), **fields
        )
        log.info("engine_ready", engine=options.id, url=url, model=name, device=str(generator.device))

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(stop_with(vllm.child, server.stop), name="vllm") if vllm else None
        reason = await server.run(ready)
        if watching is not None:
            watching.cancel()
    done = server.batcher.counters
    log.info("engine_done", engine=options.id, reason=reason, sequences=done.sequences, tokens=done.tokens)


def run(receiver: Receiver | None = None) -> None:
    """Run :func:`main` and end the process, even if an aborted transfer has left threads in native code."""
    code = main(receiver=receiver)
    flush_trace()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()

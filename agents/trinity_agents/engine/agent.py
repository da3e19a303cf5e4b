"""Process of one engine. An engine of the policy loads structure and tokenizer from the model folder, gets weights from
the trainer, and serves HTTP. An engine of an auxiliary model gets no weights from the trainer.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.config import Config
from trinity_mq.engines.card import CardLock
from trinity_mq.engines.host.ready_file import TOKEN_VARIABLE, engine_digest, ready_descriptor, refuse, write_ready
from trinity_mq.engines.protocol import EngineJob, create_engine
from trinity_mq.models.errors import EngineFailed
from trinity_mq.runtime.errors import EXIT_FATAL, FatalError
from trinity_mq.runtime.event_loop import run_on_fast_loop
from trinity_mq.runtime.gpus import visible_devices
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.telemetry import flush_trace, setup_logging, start_trace

if TYPE_CHECKING:
    from trinity_mq.engines.server.admin_api import Receiver

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None, receiver: Receiver | None = None) -> int:
    """Run one engine until its lease expires, it is stopped or it cannot start; returns the exit code.

    Args:
        arguments: The command line.
        receiver: Receives weights; None: the receiver for all channels of the trainer.
    """
    parser = argparse.ArgumentParser(prog="python -m trinity_agents.engine.agent", description="One engine.")
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration as JSON")
    parser.add_argument("--id", required=True, help="the engine's id")
    parser.add_argument("--auxiliary", help="the name of the auxiliary model; none: the policy")
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
        log.info("process_starts", devices=visible_devices())
        monitor = config.monitor
        if options.auxiliary is None:
            start_trace(
                "engine",
                options.id,
                config.path,
                on=monitor.traced,
                sample=monitor.sample,
                exported_only=not monitor.trace,
            )
        add_plugins(config.plugin_dirs)
        run_on_fast_loop(_serve(config, options, receiver or _receive_weights))
    except (FatalError, OSError, ValueError) as error:
        log.error("engine_start_failed", engine=options.id, reason=str(error))
        print(f"engine {options.id}: {error}", file=sys.stderr, flush=True)  # noqa: T201  # what its host shows
        refuse(options.ready_file, options.ready_fd)
        return EXIT_FATAL
    except EngineFailed as error:  # vLLM has printed the reason above; our host retries
        log.error("engine_failed", engine=options.id, reason=str(error))
        return 1
    return 0


async def _receive_weights(spec: dict[str, Any]) -> Mapping[str, Any]:
    """Receive weights over any channel of the trainer."""
    from trinity_mq.sync.channels.receiver import receive_weights

    return await receive_weights(spec)


async def _serve(config: Config, options: argparse.Namespace, receiver: Receiver) -> None:
    models = {model.name: model for model in config.explorer.auxiliary_models}
    auxiliary = None if options.auxiliary is None else models[options.auxiliary]
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    card = CardLock(config.path) if auxiliary is None and config.synchronizer.colocated else None
    if card is not None and not card.try_take(shared=True):
        raise EngineFailed("the trainer uses the card of this engine, whose host is gone")
    job = EngineJob(config=config, engine_id=options.id, token=token, auxiliary=auxiliary, receiver=receiver, card=card)
    async with create_engine((auxiliary or config.explorer.rollout_model).engine).serve(job) as server:
        gc.collect()
        gc.freeze()  # imported objects stay for good; each full collection over them would stop batch steps for 0.2 s
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop, signal.Signals(number).name)

        def ready(url: str) -> None:
            state = server.snapshot()
            fields = {"token": token, **{name: state[name] for name in ("name", "model_path", "fingerprint")}}
            digest = engine_digest(config, auxiliary, visible_devices())
            write_ready(options.ready_file, options.ready_fd, id=options.id, url=url, digest=digest, **fields)
            log.info("engine_ready", engine=options.id, url=url, model=state["name"])

        reason = await server.run(ready)
    done = server.snapshot()
    log.info("engine_done", engine=options.id, reason=reason, sequences=done.get("sequences"), tokens=done["tokens"])


def run(receiver: Receiver | None = None) -> None:
    """Run :func:`main` and end the process, even if an aborted transfer has left threads in native code."""
    code = main(receiver=receiver)
    flush_trace()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()

"""Process of one auxiliary engine: serves a model with the weights of its folder, or forwards to an external server.

Its host starts it in the same way as the policy's engine (:mod:`trinity_agents.engine.agent`). It gets no weights from
the trainer.
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
from typing import TYPE_CHECKING

import structlog

from trinity_mq.config import AuxiliaryModelConfig, Config
from trinity_mq.config.threads import cpu_threads
from trinity_mq.engines.host.ready_file import TOKEN_VARIABLE, engine_digest, ready_descriptor, refuse, write_ready
from trinity_mq.models.errors import ModelError
from trinity_mq.runtime.errors import EXIT_FATAL, FatalError
from trinity_mq.runtime.event_loop import run_on_fast_loop
from trinity_mq.telemetry import setup_logging

if TYPE_CHECKING:
    from trinity_mq.engines.external import ExternalServer
    from trinity_mq.engines.server.server import EngineServer

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one auxiliary engine until its lease expires or it is stopped; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trinity_agents.engine.auxiliary", description="One auxiliary engine."
    )
    parser.add_argument("--config", type=Path, required=True, help="the run's configuration as JSON")
    parser.add_argument("--id", required=True, help="the engine's id")
    parser.add_argument("--auxiliary", required=True, help="the name of the model")
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
        model = {candidate.name: candidate for candidate in config.explorer.auxiliary_models}[options.auxiliary]
        serve = _external if model.engine == "external" else _hosted
        run_on_fast_loop(serve(config, model, options))
    except (FatalError, OSError, ValueError) as error:
        log.error("engine_start_failed", engine=options.id, reason=str(error))
        print(f"engine {options.id}: {error}", file=sys.stderr, flush=True)  # noqa: T201  # what its host shows
        refuse(options.ready_file, options.ready_fd)
        return EXIT_FATAL
    return 0


async def _hosted(config: Config, model: AuxiliaryModelConfig, options: argparse.Namespace) -> None:
    from trinity_mq.engines.server.server import EngineServer, ServerSettings
    from trinity_mq.engines.torch.generator import auxiliary_generator, refuse_transfer

    assert model.model is not None
    threads = cpu_threads(config, model.num_threads)
    generator, folder = auxiliary_generator(
        model, config.path / f"model-{model.name}", config.seed, num_threads=threads
    )
    gc.collect()
    gc.freeze()  # for the reason see trinity_agents.engine.agent
    rollout = config.explorer.rollout_model
    ready_fields = {"token": _token(), "fingerprint": generator.codec.fingerprint(), "model_path": str(folder)}
    settings = ServerSettings(
        engine_id=options.id,
        model_name=model.name,
        model_path=ready_fields["model_path"],
        token=ready_fields["token"],
        fingerprint=ready_fields["fingerprint"],
        host=rollout.host,
        max_response_tokens=model.model.max_response_tokens,
        max_batch_sequences=rollout.max_batch_sequences,
        lease=rollout.lease,
    )
    server = EngineServer(generator, settings, refuse_transfer)
    server.state.serve_fixed_weights()
    await _run(server, config, model, options, ready_fields)


async def _external(config: Config, model: AuxiliaryModelConfig, options: argparse.Namespace) -> None:
    from trinity_mq.engines.external import ExternalServer

    rollout = config.explorer.rollout_model
    ready_fields = {"token": _token(), "fingerprint": "", "model_path": ""}
    server = ExternalServer(
        model,
        engine_id=options.id,
        key=_key(model),
        token=ready_fields["token"],
        host=rollout.host,
        lease=rollout.lease,
    )
    await _run(server, config, model, options, ready_fields)


async def _run(
    server: EngineServer | ExternalServer,
    config: Config,
    model: AuxiliaryModelConfig,
    options: argparse.Namespace,
    ready_fields: Mapping[str, str],
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop, signal.Signals(number).name)
    digest = engine_digest(config, model)

    def ready(url: str) -> None:
        write_ready(
            options.ready_file, options.ready_fd, id=options.id, url=url, name=model.name, digest=digest, **ready_fields
        )
        log.info("engine_ready", engine=options.id, url=url, model=model.name)

    reason = await server.run(ready)
    log.info("engine_done", engine=options.id, reason=reason)


def _token() -> str:
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)


def _key(model: AuxiliaryModelConfig) -> str | None:
    """Return the server's API key.

    Raises:
        ModelError: The configured file or environment variable does not hold the key.
    """
    who = f"auxiliary model {model.name!r}"
    if (path := model.api_key_file) is not None:
        try:
            key = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ModelError(f"{who}: {path} (api_key_file) cannot be read where the explorer runs: {reason}") from None
        if not key:
            raise ModelError(f"{who}: {path} (api_key_file) is empty; wanted the key")
        return key
    if model.api_key_env is None:
        return None
    key = os.environ.get(model.api_key_env, "").strip()
    if not key:
        raise ModelError(
            f"{who}: the environment variable {model.api_key_env} (api_key_env) is not set where the explorer runs; "
            f"set it to the key of the server at {model.url}"
        )
    return key


if __name__ == "__main__":
    sys.exit(main())

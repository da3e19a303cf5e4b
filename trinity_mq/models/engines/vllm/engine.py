"""The parts of an engine that is vLLM: its server as our child, and what stands for generator, rounds, receiver."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from trinity_mq.config import Config
from trinity_mq.models.engines.generation.text import TextCodec
from trinity_mq.models.engines.server.admin_api import Receiver
from trinity_mq.models.engines.server.state import EngineState
from trinity_mq.models.engines.torch.generator import choose_device
from trinity_mq.models.engines.vllm import api
from trinity_mq.models.engines.vllm.child import VllmChild
from trinity_mq.models.engines.vllm.client import VllmClient, VllmControl
from trinity_mq.models.engines.vllm.flow import Flow
from trinity_mq.models.engines.vllm.generator import VllmGenerator, model_limits

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class VllmParts:
    """What :class:`~trinity_mq.models.engines.server.server.EngineServer` is made of."""

    generator: VllmGenerator
    rounds: Callable[[EngineState], Flow]
    receiver: Receiver
    child: VllmChild


@contextlib.asynccontextmanager
async def vllm_parts(config: Config, folder: Path) -> AsyncIterator[VllmParts]:
    """Have vLLM's server running for the block, its weights still random.

    Raises:
        ModelError: vLLM is not there, is of another version, or cannot have this model.
        EngineFailed: It did not start.
    """
    version = api.checked_version()
    rollout = config.explorer.rollout_model
    mode = config.synchronizer.effective_pause_mode
    cpu = choose_device(config.model.device) == "cpu"
    codec = TextCodec.load(folder, trust_remote_code=config.model.trust_remote_code)
    vocabulary, max_model_len = model_limits(config.model, folder)
    log.info("vllm_starts", version=version, model=str(folder))
    # a folder of ours alone: whoever reaches the socket commands the server; and its path must be short
    home = Path(tempfile.mkdtemp(prefix="tmq-vllm-"))
    socket = home / "http.sock"
    try:
        command = api.server_command(folder, socket, config.model, rollout, max_model_len, cpu=cpu)
        child = await VllmChild.spawn(command, api.server_environment(rollout))
        control = VllmControl(socket)
        try:
            async with VllmClient(socket) as client:
                await child.ready(client)
                generator = VllmGenerator(
                    codec,
                    control,
                    vocabulary=vocabulary,
                    max_model_len=max_model_len,
                    pause_mode=mode,
                    give_up=child.kill,
                )

                def rounds(state: EngineState) -> Flow:
                    return Flow(
                        client,
                        state,
                        codec,
                        vocabulary=vocabulary,
                        max_sequences=rollout.max_batch_sequences,
                        pause_mode=mode,
                    )

                yield VllmParts(generator, rounds, generator.receive, child)
        finally:
            control.close()
            await child.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def stop_with(child: VllmChild, stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the reason when vLLM ends by itself: our host starts both anew."""
    code = await child.exited()
    stop(f"vLLM ended (exit code {code})")

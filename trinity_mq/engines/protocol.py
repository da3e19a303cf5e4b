"""Interface between an inference engine and the process that serves it, and the look-up of engines by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.config import AuxiliaryModelConfig, Config, ModelConfig
from trinity_mq.config.engines import ENGINE_GROUP, ENGINES
from trinity_mq.config.threads import cpu_threads
from trinity_mq.engines.card import CardLock
from trinity_mq.engines.server.http_server import HttpServer
from trinity_mq.engines.state import EngineState
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.runtime.plugins import create

if TYPE_CHECKING:
    from trinity_mq.engines.server.admin_api import Receiver
    from trinity_mq.engines.server.server import EngineServer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """Input of one engine process: its id, the configuration, and the model to serve."""

    config: Config
    engine_id: str
    token: str
    """Bearer token of the admin routes."""
    auxiliary: AuxiliaryModelConfig | None = None
    """The model to serve. None: the policy."""
    receiver: Receiver
    """Receives the weights of the policy."""
    card: CardLock | None = None
    """Lock on the card that this engine shares with the trainer, already taken; None: the card is its own."""

    @property
    def model(self) -> ModelConfig:
        """Configuration of the served model."""
        if self.auxiliary is None:
            return self.config.model
        if self.auxiliary.model is None:
            raise ModelError(f"auxiliary model {self.auxiliary.name!r} has no section model")
        return self.auxiliary.model

    @property
    def num_threads(self) -> int:
        """Number of CPU threads of the engine on each of its devices."""
        return cpu_threads(self.config, (self.auxiliary or self.config.explorer.rollout_model).num_threads)

    @property
    def tensor_parallel_size(self) -> int:
        """Number of devices among which the engine splits the model."""
        return (self.auxiliary or self.config.explorer.rollout_model).tensor_parallel_size

    def folder(self) -> Path:
        """Return the folder of the served model. If the configuration asks for a small generated model, create the
        folder first.
        """
        name = "model" if self.auxiliary is None else f"model-{self.auxiliary.name}"
        return ensure_model_folder(self.model, self.config.path / name, self.config.seed)

    def server(
        self, generator: Any, folder: Path, receiver: Receiver, batcher: Callable[[EngineState], Any] | None = None
    ) -> EngineServer:
        """Return a server of ``generator`` with the OpenAI routes and the admin routes of an engine.

        Args:
            generator: Has the members of :class:`trinity_mq.engines.torch.generator.TextGenerator` except ``model``,
                ``build`` and ``cancel``, and without ``generate`` if ``batcher`` is set.
            folder: The model folder.
            receiver: Receives weights.
            batcher: Replaces the static batches, for a generator that batches by itself.
        """
        from trinity_mq.engines.server.server import EngineServer, ServerSettings

        config, rollout = self.config, self.config.explorer.rollout_model
        settings = ServerSettings(
            engine_id=self.engine_id,
            model_name=config.model.model_path or f"{config.name}-tiny",
            model_path=str(folder),
            token=self.token,
            fingerprint=generator.codec.fingerprint(),
            host=rollout.host,
            max_response_tokens=self.model.max_response_tokens,
            max_batch_sequences=rollout.max_batch_sequences,
            pause_mode=config.synchronizer.effective_pause_mode,
            lease=rollout.lease,
            card=self.card,
        )
        if self.auxiliary is not None:
            settings = replace(settings, model_name=self.auxiliary.name, pause_mode="wait")
        codec = generator.codec
        log.info(
            "engine_built",
            engine=self.engine_id,
            device=str(generator.device),
            family=codec.family.name,
            rendering=codec.prepare(),
        )
        return EngineServer(generator, settings, receiver, batcher)


class Engine(ABC):
    """An inference engine. Its module imports heavy packages inside :meth:`serve`, because other processes create it
    for :meth:`check`.
    """

    def check(self) -> None:
        """Look for the required software on this machine.

        Raises:
            ModelError: The software is not installed, or its version is not supported.
        """
        return

    @abstractmethod
    def serve(self, job: EngineJob) -> AbstractAsyncContextManager[HttpServer]:
        """Return a context manager that loads the model and runs the server inside its ``async with`` block.

        :meth:`EngineJob.server` creates the server from a generator.

        A server of the policy starts without weights, and takes them through the admin routes. A server of an auxiliary
        model serves the weights of the model folder as version 0.0.

        An engine that uses one device refuses a larger :attr:`EngineJob.tensor_parallel_size`.

        Raises:
            ModelError: No engine can run with this model. The host does not try again.
            EngineFailed: The engine did not start. The host tries again.
        """


def create_engine(name: str) -> Engine:
    """Return the engine of a row of the table, a dotted path or an entry point.

    Raises:
        UnknownNameError: The name does not exist, or does not refer to a subclass of :class:`Engine`.
    """
    engine: Engine = create("engine", name, {name: row.target for name, row in ENGINES.items()}, ENGINE_GROUP, Engine)
    return engine

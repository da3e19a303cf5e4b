"""An engine for one command: a child process with the run's model and weights, or an engine that is already served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from trinity_mq.config import AuxiliaryModelConfig, Config
from trinity_mq.engines.host.host import EngineHost
from trinity_mq.engines.host.process import tail
from trinity_mq.errors import CommandError
from trinity_mq.models import EngineError, InferenceModel
from trinity_mq.observability.experiences.token_texts import TokenTexts, tokenizer_folder
from trinity_mq.runtime.notify import Notifier

if TYPE_CHECKING:
    from trinity_mq.training.model.policy import Policy

ENGINE_ID = "debug"
LEASE = 20.0
"""Maximum seconds for which the engine outlives a killed command."""
ANSWER_SECONDS = 10.0
VERSION = (0, 0)
"""Version of weights that were not sent by a trainer."""


@dataclass
class DebugEngine:
    """A served model with the texts of its tokens."""

    model: InferenceModel
    texts: TokenTexts
    lost: Callable[[], Awaitable[Any]]
    """Waits until the engine has died, then raises CommandError. For engines that are not watched it waits forever."""
    unanswered: int = 0
    """Number of calls without a complete answer."""


@contextlib.asynccontextmanager
async def child_engine(
    config: Config, folder: Path, weights: Path | None, report: Callable[[str], None]
) -> AsyncIterator[DebugEngine]:
    """Run the configured engine as a child process, and send it weights.

    Args:
        config: Configuration of the run. Its run folder is not changed.
        folder: Folder for the engine's files.
        weights: A Hugging Face folder with weights for the configured model; None: the run's initial weights.
        report: Called with a line of text for a person.

    Raises:
        ModelError, LearnerError: The model cannot be loaded.
        CommandError: The engine does not start, or does not accept the weights.
    """
    config = _separate_config(config, folder)
    changed = Notifier()
    host = EngineHost(config, folder, ENGINE_ID, on_change=changed.notify)

    async def lost() -> None:
        await changed.until(lambda: not host.snapshot.alive)
        raise CommandError(f"the engine died; its last output:\n{tail(host.output)}")

    report("starting the engine")
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(asyncio.to_thread(_load, config, weights))
        async with _hosted(host):
            policy, texts = await loading
            report(f"sending it the weights of {weights or config.model.model_path or 'a new tiny model'}")
            await _send_weights(config, host, policy)
            yield DebugEngine(host.snapshot.model(), texts, lost)


@contextlib.asynccontextmanager
async def auxiliary_engine(
    config: Config, folder: Path, model: AuxiliaryModelConfig, report: Callable[[str], None]
) -> AsyncIterator[DebugEngine]:
    """Run the engine of an auxiliary model as a child process, as in a run. Raises the same errors as
    :func:`child_engine`.
    """
    report(f"starting auxiliary model {model.name!r}")
    host = EngineHost(_separate_config(config, folder), folder, f"{ENGINE_ID}-{model.name}", auxiliary=model)
    async with _hosted(host):
        path = host.snapshot.model_path
        yield DebugEngine(host.snapshot.model("auxiliary"), TokenTexts(Path(path) if path else None), _wait_forever)


@contextlib.asynccontextmanager
async def external_engine(config: Config, url: str) -> AsyncIterator[DebugEngine]:
    """Use an engine that another process serves, without changing it.

    Raises:
        CommandError: There is no engine at ``url``, or it does not hold weights.
    """
    base = url.rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession() as session:
        listed = await _get(session, f"{base}/v1/models")
        try:
            served_model = listed["data"][0]
            name, path = str(served_model["id"]), str(served_model.get("root") or "")
        except (TypeError, KeyError, IndexError):
            raise CommandError(f"{base}/v1/models names no model: {str(listed)[:200]}; is it an engine?") from None
        try:
            health = await _get(session, f"{base}/health")
        except CommandError:
            health = None  # servers of other programs may lack this route
    if isinstance(health, dict) and health.get("state") in {"empty", "dirty"}:
        raise CommandError(
            f"the engine at {base} holds no weights: it waits for its run's trainer. Start that, or leave --engine out"
        )
    folder = Path(path) if path and Path(path).is_dir() else tokenizer_folder(config.model, config.path)
    model = InferenceModel("given", base, name, model_path=path)
    yield DebugEngine(model, TokenTexts(folder), _wait_forever)


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as response:
            if response.status != 200:
                raise CommandError(f"{url} answers with HTTP status {response.status}, wanted 200")
            return await response.json(content_type=None)
    except TimeoutError:
        raise CommandError(f"{url}: no answer within {ANSWER_SECONDS:g} s") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise CommandError(
            f"{url}: {type(error).__name__}: {error}; give --engine the URL of an OpenAI-compatible server, such as "
            "http://127.0.0.1:8000"
        ) from error


async def _wait_forever() -> None:
    await asyncio.Event().wait()


def _separate_config(config: Config, folder: Path) -> Config:
    """Return the configuration for an engine that is separate from the run's engines."""
    rollout = config.explorer.rollout_model
    rollout = rollout.model_copy(update={"lease": min(rollout.lease, LEASE)})
    explorer = config.explorer.model_copy(update={"rollout_model": rollout})
    return config.model_copy(update={"run_dir": str(folder), "explorer": explorer})


@contextlib.asynccontextmanager
async def _hosted(host: EngineHost) -> AsyncIterator[None]:
    """Run an engine, and stop it on exit."""
    try:
        try:
            await host.start()
        except EngineError as error:
            raise CommandError(str(error)) from error
        async with asyncio.TaskGroup() as group:
            # keeps the lease alive, because the following work may take longer
            keeping = group.create_task(host.keep())
            try:
                yield
            finally:
                keeping.cancel()
    finally:
        await host.stop()


def _load(config: Config, weights: Path | None) -> tuple[Policy, TokenTexts]:
    """Return a policy on the CPU with the weights to send, and the texts of the model's tokens."""
    from transformers.utils.logging import disable_progress_bar

    from trinity_mq.models import ensure_model_folder
    from trinity_mq.training.model.policy import Policy

    disable_progress_bar()
    folder = ensure_model_folder(config.model, config.path / "model", config.seed)
    model = config.model.model_copy(update={"device": "cpu"})
    return Policy(model, weights or folder, config.seed), TokenTexts(folder)


async def _send_weights(config: Config, host: EngineHost, policy: Policy) -> None:
    """Send the weights to the engine as a trainer does. The engine is the only member of this sync."""
    from trinity_mq.sync.channels.base import ChannelError, manifest_bytes, transfer_seconds
    from trinity_mq.sync.channels.collective.broadcast import Sender

    sync, world = config.synchronizer, 1 + config.engine_ranks
    sender = Sender("127.0.0.1", sync.bucket_bytes, sync.sync_timeout)
    manifest = policy.manifest()
    seconds = transfer_seconds(sync.sync_timeout, manifest_bytes(manifest))
    try:
        spec = {
            **await sender.rendezvous(),
            "epoch": 0,
            "attempt": 0,
            "rank": 1,
            "world": world,
            "seconds": seconds,
            "manifest": manifest,
            "canary": {},
        }
        await host.pause()
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.broadcast(policy.weights(), manifest, 0, 0, world))
            group.create_task(host.receive(spec, seconds + 5.0))
        await host.commit(VERSION, 0)
    except ExceptionGroup as failed:
        if failed.split((ChannelError, EngineError))[1] is not None:
            raise
        reasons = "; ".join(str(error) for error in failed.exceptions)
        raise CommandError(f"the engine did not take the weights: {reasons}\n{tail(host.output)}") from failed

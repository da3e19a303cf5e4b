"""Admin routes for the weight sync and for a card that engine and trainer share. An engine's host sends the commands of
the sync gate to them, and a trainer on the same card sends ``sleep`` and ``wake``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from aiohttp import web
from pydantic import Field, NonNegativeInt

from trinity_mq.engines.api_errors import ApiError, bad_request, not_current
from trinity_mq.engines.card import CARD_LEASE, SleepLevel
from trinity_mq.engines.generation.batch_step import StaticBatcher
from trinity_mq.engines.generation.request import ScoreRequest
from trinity_mq.engines.server.http_server import EngineRequestBody, read_request
from trinity_mq.engines.server.sleeping import Sleeper
from trinity_mq.engines.state import PAUSE_LEASE, EngineState, StateError
from trinity_mq.engines.torch.weights import WeightsError
from trinity_mq.telemetry.trace import span

log = structlog.get_logger(__name__)

Receiver = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]
"""Takes the spec of a transfer and returns the tensors by name once all have arrived; does not touch the model. The
receiver of the engine vllm returns the spec instead of the tensors, or with the tensors of an adapter.
"""


class PauseBody(EngineRequestBody):
    """Body of ``/admin/pause``."""

    timeout: float = Field(default=60.0, gt=0)
    """Seconds that the running batch step has to end."""
    lease: float = Field(default=PAUSE_LEASE, gt=0)
    """Seconds after which the engine resumes by itself if no further command comes."""


class ReceiveBody(EngineRequestBody):
    """Body of ``/admin/receive``."""

    spec: dict[str, Any]
    timeout: float = Field(default=600.0, gt=0)
    """Seconds for all tensors to arrive."""


class CommitBody(EngineRequestBody):
    """Body of ``/admin/commit``."""

    version: tuple[NonNegativeInt, NonNegativeInt]
    progress: NonNegativeInt = 0


class SleepBody(EngineRequestBody):
    """Body of ``/admin/sleep``."""

    level: SleepLevel = 1
    timeout: float = Field(default=30.0, gt=0)
    """Seconds to wait for the running batch steps."""
    lease: float = Field(default=CARD_LEASE, gt=0)
    """Seconds after which the engine wakes by itself unless the request is repeated."""


class AdminApi:
    """Handlers of these routes, which lie under ``/admin``."""

    def __init__(
        self,
        batcher: StaticBatcher,
        state: EngineState,
        generator: Any,
        receiver: Receiver,
        answer: Callable[..., web.Response],
    ) -> None:
        """Create the routes. ``answer`` builds an answer from the engine's state and further fields."""
        self._batcher, self._state, self._generator = batcher, state, generator
        self._receiver, self._answer = receiver, answer
        self.sleeper: Sleeper | None = None
        """Puts the engine to sleep; None unless it shares its card with the trainer."""
        self._transfer: asyncio.Task[web.Response] | None = None

    async def pause(self, request: web.Request) -> web.Response:
        """Start no more batch steps, and return when the engine is ready to receive weights. Resume and answer 504 if
        that takes too long.
        """
        body = await read_request(request, PauseBody)
        self._state.pause(body.lease)
        try:
            async with asyncio.timeout(body.timeout):
                await self._batcher.idle()
        except TimeoutError:
            self._state.resume()
            raise ApiError(
                504,
                f"the running batch step did not end within {body.timeout:g} s; the engine resumes",
                code="pause_timeout",
            ) from None
        self._state.restart_pause_lease(body.lease)
        return self._answer()

    async def sleep(self, request: web.Request) -> web.Response:
        """Put the engine to sleep, so that the trainer can use the card; return when the engine sleeps."""
        body = await read_request(request, SleepBody)
        if self._state.receiving:
            raise ApiError(409, "a transfer is in progress; repeat the request", code="busy")
        if not await self._sleeper().sleep(body.level, body.lease, body.timeout):
            raise ApiError(
                504,
                f"the running batch step did not end within {body.timeout:g} s; the engine goes on to sleep",
                code="not_asleep",
            )
        return self._answer()

    async def wake(self, request: web.Request) -> web.Response:
        """Start to use the card again."""
        self._sleeper().wake()
        return self._answer()

    def _sleeper(self) -> Sleeper:
        if self.sleeper is None:
            raise ApiError(
                409, "this engine shares its card with nobody; set synchronizer.colocated", code="not_colocated"
            )
        return self.sleeper

    async def receive(self, request: web.Request) -> web.Response:
        """Receive new weights and apply them; they are served after a commit."""
        body = await read_request(request, ReceiveBody)
        if not self._state.paused:
            raise ApiError(409, "the engine is not paused; POST /admin/pause first", code="not_paused")
        if self._state.receiving:
            raise ApiError(409, "a transfer is in progress; POST /admin/resume aborts it", code="busy")
        self._state.receiving = True
        # a separate task, so that a resume can cancel it
        self._transfer = asyncio.create_task(self._receive_and_apply(body), name="receive")
        try:
            return await self._transfer
        except asyncio.CancelledError:
            self._transfer.cancel()
            await asyncio.wait({self._transfer})
            if self._client_disconnected():
                raise
            raise ApiError(
                409,
                "the transfer was aborted",
                code="receive_aborted",
                extra={"touched": self._state.phase == "dirty"},
            ) from None
        finally:
            try:
                await self._wake_cache()  # also after a transfer that failed
            except Exception as error:  # the sleeper stops the engine after such an error
                log.warning("cache_not_filled", error=f"{type(error).__name__}: {error}")
            finally:
                self._state.receiving = False
                self._transfer = None

    @staticmethod
    def _client_disconnected() -> bool:
        """Return whether this handler was cancelled (its client disconnected), not the transfer."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def _receive_and_apply(self, body: ReceiveBody) -> web.Response:
        loop = asyncio.get_running_loop()
        started = loop.time()
        touched = False
        spec_version = body.spec.get("version")
        version = None if spec_version is None else (int(spec_version[0]), int(spec_version[1]))
        batch = body.spec.get("batch")
        try:
            with span("receive weights", batch, version=version, wait=True):
                async with asyncio.timeout(body.timeout):
                    tensors = await self._receiver(body.spec)
                    if self.sleeper is not None:
                        await self.sleeper.wake_for_weights()
            arrived = loop.time()
            with span("apply weights", batch, version=version, threads=True):
                checked = await self._batcher.call(lambda: self._generator.check(tensors))
                self._state.touch(version)
                touched = True
                await self._batcher.call(lambda: self._generator.apply(checked))
                await self._wake_cache()
            with span("score canary", batch, version=version, threads=True):
                canary = await self._canary((body.spec.get("canary") or {}).get("tokens") or [])
        except Exception as error:
            log.warning("receive_failed", touched=touched, error=f"{type(error).__name__}: {error}")
            reason = "it timed out" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise ApiError(
                500, f"weights were not applied: {reason}", code="receive_failed", extra={"touched": touched}
            ) from error
        self._state.applied = True
        # the commit follows once the slowest engine has its weights
        self._state.restart_pause_lease(max(PAUSE_LEASE, 2 * body.timeout))
        return self._answer(canary=canary, seconds={"receive": arrived - started, "apply": loop.time() - arrived})

    async def _wake_cache(self) -> None:
        """Fill the memory of the cache again, if the engine shares its card and was woken for these weights."""
        if self.sleeper is not None:
            await self.sleeper.wake_cache()

    async def _canary(self, tokens: list[int]) -> dict[str, Any]:
        """Return the canary's logprobs under the new weights, nothing for a canary of fewer than two tokens."""
        if len(tokens) < 2:
            return {}
        [logprobs] = await self._batcher.call(lambda: self._generator.score([ScoreRequest(tokens)]))
        return {"logprobs": logprobs}

    async def commit(self, request: web.Request) -> web.Response:
        """Record the version of the applied weights, and serve them."""
        body = await read_request(request, CommitBody)
        try:
            self._state.commit(body.version, body.progress)
        except StateError as error:
            raise ApiError(409, str(error), code="nothing_to_commit") from error
        log.info("weights_committed", version=body.version, progress=body.progress)
        return self._answer()

    async def resume(self, request: web.Request) -> web.Response:
        """Cut off a running transfer and serve the present weights."""
        if self._transfer is not None:
            self._transfer.cancel()
            await asyncio.wait({self._transfer})
        self._state.resume()
        return self._answer()

    async def weight(self, request: web.Request) -> web.Response:
        """Return one weight of the committed version as safetensors."""
        name = request.query.get("name")
        if not name:
            raise bad_request("give ?name= of a weight", "name")
        if self._state.phase != "current":
            raise not_current("the engine holds no committed weights")
        try:
            data = await self._batcher.call(lambda: self._generator.weight(name))
        except WeightsError as error:
            raise ApiError(404, str(error), code="no_such_weight", param="name") from error
        return web.Response(body=data, content_type="application/octet-stream")

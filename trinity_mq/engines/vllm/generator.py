"""Weight updates and canary scores for the admin routes, carried out by vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from trinity_mq.config import ModelConfig
from trinity_mq.engines.api_errors import ApiError, bad_request
from trinity_mq.engines.card import SleepLevel
from trinity_mq.engines.generation.batch_step import PauseMode
from trinity_mq.engines.generation.request import ScoreRequest
from trinity_mq.engines.generation.text import TextCodec, TextError
from trinity_mq.engines.torch.weights import WeightsError
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import VllmClient, VllmSilent
from trinity_mq.families.forms import AnswerForm, FormError, grammar_of
from trinity_mq.messages import Version
from trinity_mq.models.errors import ModelError

log = structlog.get_logger(__name__)

OBJECT = '{"":}'
"""Characters of every JSON object with a member. Under a grammar whose characters the vocabulary lacks, vLLM fails."""
COMMAND_TIMEOUT = 120.0
WORKER_GRACE = 60.0
"""Seconds that a worker has to report the end of a transfer; longer than its last attempts to read a bucket."""


class VllmGenerator:
    """The members of :class:`~trinity_mq.engines.torch.generator.TextGenerator` that do not generate, for a model that
    vLLM's server runs.
    """

    device = "vllm"

    def __init__(
        self,
        codec: TextCodec,
        client: VllmClient,
        *,
        vocabulary: int,
        max_model_len: int,
        pause_mode: PauseMode,
        give_up: Callable[[], None],
        home: Path,
        workers: int = 1,
        recompute_cache: bool = False,
        sleeps: bool = False,
    ) -> None:
        """Create the generator.

        Args:
            codec: Tokenizer of the model.
            client: Client of vLLM's server.
            vocabulary: Size of the vocabulary.
            max_model_len: Maximum length of a sequence in tokens.
            pause_mode: Treatment of running requests when new weights come.
            give_up: Ends vLLM, whose model cannot be repaired after a partial weight update.
            home: Private folder, for files of the workers.
            workers: Number of vLLM's workers, which each receive weights.
            recompute_cache: Whether requests that continue with new weights compute their cache again.
            sleeps: Whether vLLM was started with its sleep mode.
        """
        self._sleeps = sleeps
        self.codec = codec
        self.vocabulary, self.max_model_len = vocabulary, max_model_len
        self._client, self._mode, self._give_up = client, pause_mode, give_up
        self._report, self._workers = home / "update", workers
        self._is_open = False
        """True from the start of an update in vLLM until its finish."""
        self._updating: asyncio.Task[None] | None = None
        # without running requests there is nothing to compute again, and the old cache is only waste
        self._clear_cache = "true" if recompute_cache or pause_mode != "keep" else "false"
        self._salt = ""
        self._asleep: set[str] = set()
        """Parts of vLLM's memory on the card that are freed: ``weights``, ``kv_cache``."""
        self._adapter: str | None = None
        """Name of the adapter that answers, if weights are sent as adapters."""

    def grammar_of(self, form: AnswerForm, prompt_end: str) -> str:
        """Return the grammar for answers of this form.

        Raises:
            ApiError: 400; the engine cannot guarantee the form.
        """
        try:
            if form.must_call or (form.schema or {}).get("type") == "object":
                self.codec.encode(OBJECT)
            return grammar_of(form, self.codec.family, self.codec.template, prompt_end)
        except FormError as error:
            raise bad_request(str(error), form.option, "unsupported_option") from error
        except TextError as error:
            message = f"{form.option} demands a JSON object, which this model cannot write: {error}"
            raise bad_request(message, form.option, "unsupported_option") from error

    async def receive(self, spec: dict[str, Any]) -> Mapping[str, Any]:
        """Make vLLM's workers receive the weights without touching the model; return the spec instead of the tensors.

        Raises:
            ApiError: The weights did not arrive.
        """
        if self._updating is not None:  # the update of an aborted attempt
            await asyncio.wait({self._updating})
        self._updating = asyncio.create_task(self._update(spec), name="update")
        self._updating.add_done_callback(_log_failure)
        # the update continues after an abort of the attempt, as vLLM's workers do
        await asyncio.shield(self._updating)
        return spec

    async def _update(self, spec: dict[str, Any]) -> None:
        """Make the workers receive weights. If vLLM does not answer, a worker hangs in the transfer: then end vLLM, so
        that the host restarts the engine.
        """
        seconds = silence_limit(spec)
        try:
            if not self._is_open:
                await self._client.post(api.START_UPDATE, timeout=seconds)
                self._is_open = True
            reports = [api.report_file(self._report, worker) for worker in range(self._workers)]
            await self._client.post(api.UPDATE, api.update_body(spec, self._report), timeout=seconds)
            problems = {file.read_text() for file in reports} - {""}
        except VllmSilent as error:
            log.warning("vllm_hangs", reason=str(error))
            self._give_up()
            raise
        if problems:
            raise ApiError(500, "; ".join(sorted(problems)), code="generation_failed")

    async def check(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the spec. vLLM reports unfit tensors when it loads them, and the canary checks the result."""
        return spec

    async def apply(self, spec: Mapping[str, Any]) -> None:
        """Load the received weights between two steps of vLLM. Running requests are treated by the pause mode.

        A cache that is not cleared serves running requests only: ``cache_salt`` names the weights of new requests.

        Raises:
            ApiError: The weights did not fit, or loading took too long. The engine ends, and its host restarts it.
        """
        self._name_canary(spec)
        label = api.label(version_of(spec))
        try:
            await self._command(api.PAUSE, mode=self._mode, clear_cache=self._clear_cache)
            try:
                # reading mapped files takes as long as their transfer
                seconds = max(COMMAND_TIMEOUT, float(spec.get("seconds", 0.0)))
                await self._client.post(api.FINISH_UPDATE, {"weight_version": label}, timeout=seconds)
                self._is_open = False
            finally:
                if not self._asleep:  # otherwise requests would run without a cache
                    await self._command(api.RESUME)
        except BaseException:
            self._give_up()
            raise

    async def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Return for each request the logprob of every token after the first at temperature 1, which is the temperature
        of canaries; raises ApiError.
        """
        scores = []
        for request in requests:
            body = api.canary_body(request.token_ids, self._salt, self._adapter)
            answer = await self._command(api.GENERATE, body)
            scores.append(api.read_scores(answer, request.token_ids))
        return scores

    async def sleep(self, level: SleepLevel) -> None:
        """Free the memory of weights and cache. Running requests are treated by the pause mode, and lose their cache.
        On a CPU vLLM cannot sleep; then it only pauses.
        """
        await self._command(api.PAUSE, mode=self._mode, clear_cache="true")
        if self._sleeps:
            await self._client.command(f"{api.SLEEP}?level={level}", {}, COMMAND_TIMEOUT)
        self._asleep = {"weights", "kv_cache"}

    async def wake_weights(self) -> None:
        """Give the weights their memory again. Weights that were discarded have arbitrary values until new weights are
        applied.
        """
        await self._wake("weights")

    async def wake_cache(self) -> None:
        """Give the cache its memory again, and continue running requests."""
        if "kv_cache" in self._asleep:
            await self._wake("kv_cache")
            await self._command(api.RESUME)

    async def _wake(self, part: str) -> None:
        if part in self._asleep:
            if self._sleeps:
                await self._client.command(f"{api.WAKE}?tags={part}", {}, COMMAND_TIMEOUT)
            self._asleep.discard(part)

    async def weight(self, name: str) -> bytes:
        """Refuse: vLLM stores weights fused and packed, not under the names of the checkpoint."""
        raise WeightsError(
            f"weight {name!r} cannot be read back from a vllm engine, which keeps weights fused and packed; read it "
            "from a checkpoint of the trainer, or use the transformers engine"
        )

    def _name_canary(self, spec: Mapping[str, Any]) -> None:
        """Give the canary of this attempt its own cache salt, so that no cached value answers it."""
        self._salt = f"canary-{api.label(version_of(spec))}-{spec['epoch']}-{spec['attempt']}"

    async def _command(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        return await self._client.post(path, body, timeout=COMMAND_TIMEOUT, **query)


def _log_failure(update: asyncio.Task[None]) -> None:
    """Log why an update failed. After an abort, nothing else reads the error."""
    if not update.cancelled() and (error := update.exception()) is not None:
        log.info("update_failed", reason=str(error))


def silence_limit(spec: Mapping[str, Any]) -> float:
    """Return the seconds after which vLLM hangs if it has not answered a transfer.

    The workers end a transfer by themselves: a transfer from files or memory ends at its deadline, a broadcast at most
    one step later. A trainer of an earlier release does not send the limit of a step; then the deadline is the limit.
    """
    seconds = float(spec["seconds"])
    step = float(spec.get("step_seconds", seconds)) if spec.get("method", "collective") == "collective" else 0.0
    return seconds + min(seconds, 2 * step + WORKER_GRACE) + 10.0


def version_of(spec: Mapping[str, Any]) -> Version | None:
    """Return the weight version of a transfer, or None for a transfer without a sync gate."""
    named = spec.get("version")
    return None if named is None else (named[0], named[1])


def model_limits(config: ModelConfig, folder: Path, devices: int = 1) -> tuple[int, int]:
    """Return the size of the vocabulary and the maximum sequence length in tokens.

    Raises:
        ModelError: The folder does not describe a model, or the model cannot be split among ``devices``.
    """
    from transformers import AutoConfig

    try:
        described = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code).get_text_config()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{folder} does not describe a model: {' '.join(str(error).split())}") from error
    heads = getattr(described, "num_attention_heads", None) or devices
    if heads % devices:
        raise ModelError(
            f"tensor_parallel_size is {devices}, and the model in {folder} has {heads} attention heads, which vLLM "
            f"cannot divide among {devices} devices: choose a divisor of {heads}"
        )
    longest = getattr(described, "max_position_embeddings", None) or config.max_model_len
    return int(described.vocab_size), min(config.max_model_len, longest)

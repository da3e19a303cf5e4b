"""Weight updates and canary scores for the admin routes, carried out by vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config import ModelConfig
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.batch_step import PauseMode
from trinity_mq.engines.generation.request import ScoreRequest
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.torch.weights import WeightsError
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import VllmClient
from trinity_mq.messages import Version
from trinity_mq.models.errors import ModelError

COMMAND_TIMEOUT = 120.0


class VllmGenerator:
    """The methods of :class:`~trinity_mq.engines.torch.generator.TextGenerator` that do not generate."""

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
        recompute_cache: bool = False,
    ) -> None:
        """Create the generator. ``give_up`` ends vLLM, whose model cannot be repaired after a partial weight update.
        With ``recompute_cache``, requests that continue with new weights compute their cache again.
        """
        self.codec = codec
        self.vocabulary, self.max_model_len = vocabulary, max_model_len
        self._client, self._mode, self._give_up = client, pause_mode, give_up
        # without running requests there is nothing to compute again, and the old cache is only waste
        self._clear_cache = "true" if recompute_cache or pause_mode != "keep" else "false"
        self._salt = ""
        self._adapter: str | None = None
        """Name of the adapter that answers, if weights are sent as adapters."""

    async def receive(self, spec: dict[str, Any]) -> Mapping[str, Any]:
        """Make vLLM's workers receive the weights without touching the model; return the spec instead of the tensors.

        Raises:
            ApiError: The weights did not arrive.
        """
        try:
            await self._command(api.START_UPDATE)
        except ApiError:
            # an interrupted update is still open: an invalid body makes vLLM drop it
            try:
                await self._command(api.UPDATE, {"update_info": {"given_up": True}})
            except ApiError:
                await self._command(api.START_UPDATE)
        seconds = 2 * float(spec["seconds"]) + 10.0
        await self._client.post(api.UPDATE, {"update_info": {"spec": spec}}, timeout=seconds)
        return spec

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
                await self._command(api.FINISH_UPDATE, {"weight_version": label})
            finally:
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


def version_of(spec: Mapping[str, Any]) -> Version | None:
    """Return the version of a transfer, or None for a transfer without a gate."""
    named = spec.get("version")
    return None if named is None else (named[0], named[1])


def model_limits(config: ModelConfig, folder: Path) -> tuple[int, int]:
    """Return the size of the vocabulary and the maximum sequence length in tokens.

    Raises:
        ModelError: The folder does not describe a model.
    """
    from transformers import AutoConfig

    try:
        described = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code).get_text_config()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{folder} does not describe a model: {' '.join(str(error).split())}") from error
    longest = getattr(described, "max_position_embeddings", None) or config.max_model_len
    return int(described.vocab_size), min(config.max_model_len, longest)

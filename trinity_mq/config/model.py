"""The model section: a model and its length limits, for the policy or for an auxiliary model."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section, expand_user
from trinity_mq.config.switches import ChatTemplateKwargs


class TinyModelConfig(Section):
    """A small Qwen3, or Qwen3-MoE, with random weights and a tokenizer of single characters. Nothing is downloaded. The
    field names are the names of a Hugging Face configuration.
    """

    characters: str = "0123456789+-=,"
    """The vocabulary, in addition to padding and end of sequence. Text with other characters is refused."""
    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(default=256, ge=8)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = Field(default=2, ge=1)
    """Number of transformer layers."""
    num_attention_heads: int = Field(default=2, ge=1)
    """Number of attention heads in a layer. Each head has its own keys and values."""
    head_dim: int = Field(default=32, ge=2)
    """Width of an attention head."""
    num_experts: int = Field(default=0, ge=0)
    """Number of experts in each layer, each of the width ``intermediate_size``. 0: no experts, a dense model."""
    num_experts_per_tok: int = Field(default=2, ge=1)
    """Number of experts that compute each token."""
    initializer_range: float = Field(default=0.05, gt=0)
    """Standard deviation of the random weights."""
    max_position_embeddings: int = Field(default=64, ge=8)
    """Maximum sequence length, in tokens."""
    chat_template: str = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    """Jinja template. It has no constant tokens, since a tiny model would spend its capacity on them."""

    @field_validator("characters")
    @classmethod
    def _check_unique(cls, value: str) -> str:
        repeated = sorted({character for character in value if value.count(character) > 1})
        if repeated or not value:
            problem = f"holds {''.join(repeated)!r} more than once" if repeated else "is empty"
            raise ValueError(f"the vocabulary {problem}; give each character once")
        return value

    @model_validator(mode="after")
    def _check_experts(self) -> TinyModelConfig:
        if 0 < self.num_experts < self.num_experts_per_tok:
            raise ValueError(
                f"num_experts is {self.num_experts}, wanted 0 or at least num_experts_per_tok = "
                f"{self.num_experts_per_tok}"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): the weights ``W`` are frozen, and ``W + scale x B A`` is trained through
    ``A`` and ``B``, with ``scale = alpha / r``. At the start the adapters change nothing. Learning rates are usually
    ten times as high as for training all weights.
    """

    r: int = Field(default=16, ge=1)
    """Rank: rows of ``A`` and columns of ``B``."""
    alpha: float = Field(default=32.0, gt=0)
    """Numerator of the scale; twice the rank is usual."""
    rslora: bool = False
    """Whether the scale is ``alpha / sqrt(r)`` (arXiv 2312.03732), which suits high ranks."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Endings of the names of the layers that get an adapter, such as ``[q_proj, v_proj]``. ``all-linear``: every
    linear layer except the output layer."""
    sync: Literal["merged", "adapter"] = "merged"
    """Weights that engines get after a train step. ``merged``: all weights with the adapter merged into them; works
    with every engine. ``adapter``: only the adapter, a few percent of the bytes; the engine must be vllm, and answers
    in progress continue with their first adapter."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Number of bits of the frozen weights (QLoRA, arXiv 2305.14314). Needs bitsandbytes, a GPU and ``sync: merged``.
    """

    @field_validator("target_modules")
    @classmethod
    def _check_target_modules(cls, value: str | list[str]) -> str | list[str]:
        if not value or any(not name for name in value):
            raise ValueError('names no layer; give ends of layer names, such as [q_proj, v_proj], or "all-linear"')
        return value

    @property
    def scale(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


class ModelConfig(Section):
    """The model: either ``model_path`` or ``tiny``."""

    model_path: str | None = None
    """A Hugging Face model folder or hub id."""
    tiny: TinyModelConfig | None = None
    """A small model created for the run."""
    max_model_len: int = Field(default=4096, ge=8)
    """Maximum length of prompt and response together, in tokens."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Maximum length of the prompt, in tokens."""
    enable_prompt_truncation: bool | None = None
    """Treatment of a prompt with more than ``max_prompt_tokens`` tokens. Null: its task fails. True: the model is not
    asked; each run has an experience with the cut prompt, which is not trained on (``prompt_truncated``), and reward
    functions judge a placeholder for its answer. False: ``max_prompt_tokens`` limits no prompt; a prompt that does not
    fit ``max_model_len`` fails its task."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Maximum length of the response, in tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the trained weights; float32 is recommended on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and engines. ``auto``: CUDA if available, otherwise the CPU."""
    lora: LoraConfig | None = None
    """Adapters to train instead of all weights. Null: all weights are trained."""
    router_replay: bool = False
    """Mixture-of-experts models: train each token through the experts that the engine used for it (arXiv 2510.11370).
    Without this, near ties in a router choose other experts in the trainer, and the logprobs of trainer and engine
    differ. Each token of a prompt or response then takes a further byte for each layer and chosen expert. Streamed
    answers and sessions of the gateway do not carry experts; the trainer's own routers choose for such tokens."""
    chat_template_kwargs: ChatTemplateKwargs = Field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking: false}`` or ``{reasoning_effort: low}``: defaults of
    everything that is rendered, by engines, for SFT and DPO, and by ``validate`` and ``debug``. ``rollout_args`` of a
    taskset and requests override them, name by name. A name that the template does not read is an error."""
    custom_chat_template: str | None = None
    """Chat template, as Jinja text, instead of the template of the model's folder. Engines, SFT, DPO and the exported
    model use it. Null: the template of the folder."""
    chat_template_path: str | None = None
    """File with a chat template, instead of ``custom_chat_template``. All machines of the run need the file."""
    family: str | None = None
    """The row of the table of model families that reads the model's answers and writes its messages, such as
    ``qwen3.5``; or your own: a name that an installed package adds, or a dotted path ``my_file.MINE``. Null: by the
    chat template. Only a fine-tuned model whose template names another family needs this."""
    trust_remote_code: bool = False
    """Allow code from the model's folder to run."""

    @model_validator(mode="after")
    def _one_template(self) -> ModelConfig:
        if self.custom_chat_template and self.chat_template_path:
            raise ValueError("custom_chat_template and chat_template_path are both given: remove one of them")
        return self

    @field_validator("model_path")
    @classmethod
    def _check_home(cls, value: str | None) -> str | None:
        expand_user(value or "")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.model_path is None) == (self.tiny is None):
            raise ValueError(
                "give exactly one of model_path (a folder or hub id) and tiny (a small model with random weights)"
            )
        if self.max_prompt_tokens + self.max_response_tokens > self.max_model_len:
            raise ValueError(
                f"max_prompt_tokens {self.max_prompt_tokens} + max_response_tokens {self.max_response_tokens} is over "
                f"max_model_len {self.max_model_len}"
            )
        return self

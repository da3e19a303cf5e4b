"""The model section: the policy that is trained, and its lengths."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section


class TinyModelConfig(Section):
    """A small Qwen3 with random weights and a tokenizer of single characters; nothing is downloaded. The names are
    those of a Hugging Face configuration.
    """

    characters: str = "0123456789+-=,"
    """The vocabulary, besides padding and end of sequence. Text with other characters is refused."""
    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(default=256, ge=8)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = Field(default=2, ge=1)
    """Transformer layers."""
    num_attention_heads: int = Field(default=2, ge=1)
    """Attention heads of a layer; each has keys and values of its own."""
    head_dim: int = Field(default=32, ge=2)
    """Width of an attention head."""
    initializer_range: float = Field(default=0.05, gt=0)
    """Standard deviation of the random weights."""
    max_position_embeddings: int = Field(default=64, ge=8)
    """Longest sequence, in tokens."""
    chat_template: str = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    """Jinja template; without constant tokens, on which a tiny model would spend its capacity."""

    @field_validator("characters")
    @classmethod
    def _each_once(cls, value: str) -> str:
        doubled = sorted({character for character in value if value.count(character) > 1})
        if doubled or not value:
            problem = f"holds {''.join(doubled)!r} more than once" if doubled else "is empty"
            raise ValueError(f"the vocabulary {problem}; give each character once")
        return value


class ModelConfig(Section):
    """Either ``model_path`` or ``tiny``."""

    model_path: str | None = None
    """A Hugging Face folder or hub id."""
    tiny: TinyModelConfig | None = None
    """A small model made for the run."""
    max_model_len: int = Field(default=4096, ge=8)
    """Prompt and response together, in tokens."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Longest prompt, in tokens."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Longest response, in tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights; float32 is recommended on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and engines. ``auto``: CUDA where there is one."""
    trust_remote_code: bool = False
    """Allow code in the model's folder to run."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.model_path is None) == (self.tiny is None):
            raise ValueError(
                "give either model_path (a folder or hub id) or tiny (a model made from numbers), not both and not "
                "neither"
            )
        if self.max_prompt_tokens + self.max_response_tokens > self.max_model_len:
            raise ValueError(
                f"max_prompt_tokens {self.max_prompt_tokens} + max_response_tokens {self.max_response_tokens} is over "
                f"max_model_len {self.max_model_len}"
            )
        return self

"""The model section: which policy is trained, and what it is sampled with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from trinity_mq.config.base import Section


class TinyModelConfig(Section):
    """A small Qwen3 made from these numbers, with random weights and a tokenizer of single characters; nothing is
    downloaded.
    """

    characters: str = "0123456789+-=,"
    """The vocabulary, besides padding and end of sequence. Text outside of it is refused."""
    hidden_size: int = Field(default=64, ge=8)
    intermediate_size: int = Field(default=256, ge=8)
    num_hidden_layers: int = Field(default=2, ge=1)
    num_attention_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=2)
    initializer_range: float = Field(default=0.05, gt=0)
    max_position_embeddings: int = Field(default=64, ge=8)
    chat_template: str = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    """Few constant tokens: a tiny model should not spend its capacity on them."""


class ModelConfig(Section):
    """Either ``model_path`` or ``tiny``."""

    model_path: str | None = None
    """A Hugging Face folder or hub id."""
    tiny: TinyModelConfig | None = None
    max_model_len: int = Field(default=4096, ge=8)
    """Prompt and response together, in tokens."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    max_response_tokens: int = Field(default=2048, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained weights; on a CPU keep float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False

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

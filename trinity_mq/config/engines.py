"""Engines beside that of the policy: models that workflows and operators may ask, such as judges and teachers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from trinity_mq.config.base import Section
from trinity_mq.config.model import ModelConfig


class AuxiliaryModelConfig(Section):
    """A model that is asked and never trained.

    ``transformers``: ``model``, in engines of ours that the explorer hosts. ``external``: what an OpenAI-compatible
    server at ``url`` serves.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    """What workflows, operators and ``rollout_args.model`` call it."""
    engine: Literal["transformers", "external"] = "transformers"
    engine_num: int = Field(default=1, ge=1)
    """transformers: engines that serve it."""
    model: ModelConfig | None = None
    """transformers: as the section ``model``."""
    num_threads: int = Field(default=1, ge=1)
    """transformers: CPU threads of each engine."""
    url: str | None = None
    """external: up to and including ``/v1``, such as ``https://api.example.com/v1``."""
    served_name: str | None = None
    """external: what the server calls the model. None: the only one it lists."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """external: environment variable of the explorer that holds the key; the key itself is written down nowhere."""
    api_key_file: str | None = None
    """external: instead, a file that holds the key, where the explorer runs; such as a secret of Docker or systemd."""
    token_ids: bool = False
    """external: the server gives token ids and logprobs on ``return_token_ids``, as vLLM does. Without them its answers
    are texts: good for judges and evaluations, not for what needs tokens."""
    health_interval: float = Field(default=10.0, gt=0)
    """external: seconds between looks at whether the server answers."""
    timeout: float = Field(default=600.0, gt=0)
    """external: seconds for one answer."""

    @model_validator(mode="after")
    def _one_kind(self) -> AuxiliaryModelConfig:
        who = f"auxiliary model {self.name!r} of engine {self.engine}"
        only_external = ("url", "served_name", "api_key_env", "api_key_file")
        if self.engine == "external":
            if self.url is None or not self.url.startswith(("http://", "https://")):
                raise ValueError(f"{who} needs url, such as https://api.example.com/v1; got {self.url!r}")
            if self.model is not None or self.engine_num != 1:
                raise ValueError(f"{who} is served elsewhere: remove model and engine_num")
            if self.api_key_env is not None and self.api_key_file is not None:
                raise ValueError(f"{who}: api_key_env and api_key_file are both given: remove one of them")
        elif self.model is None:
            raise ValueError(f"{who} needs model, with a model_path or tiny; or set engine: external and a url")
        elif given := [key for key in only_external if getattr(self, key) is not None]:
            raise ValueError(f"{who} is served here: remove {', '.join(given)}, or set engine: external")
        return self

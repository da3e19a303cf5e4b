"""A generator with the weights of its folder, for engines to which nobody sends any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.config import AuxiliaryModelConfig
from trinity_mq.models.engines.torch.generator import TextGenerator
from trinity_mq.models.engines.torch.weights import WeightsError, named_weights
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import ensure_model_folder


def fixed_generator(auxiliary: AuxiliaryModelConfig, folder: Path, seed: int) -> tuple[TextGenerator, Path]:
    """Return a generator of an auxiliary model and the model's folder.

    Args:
        auxiliary: Which model; one that is served here.
        folder: Where a tiny model is made.
        seed: Of a tiny model's weights.

    Raises:
        ModelError: The model, or its weights, cannot be had.
    """
    from transformers import AutoModelForCausalLM

    config = auxiliary.model
    if config is None:
        raise ModelError(f"auxiliary model {auxiliary.name!r} has no section model")
    found = ensure_model_folder(config, folder, seed)
    generator = TextGenerator.build(config, found, num_threads=auxiliary.num_threads)
    try:
        saved = AutoModelForCausalLM.from_pretrained(found, trust_remote_code=config.trust_remote_code)
        generator.apply(generator.check(named_weights(saved)))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"auxiliary model {auxiliary.name!r}: the weights in {found} cannot be read: {' '.join(str(error).split())}"
        ) from error
    return generator, found


async def takes_no_weights(spec: dict[str, Any]) -> Mapping[str, Any]:
    """Refuse a transfer: an auxiliary model is never trained."""
    raise WeightsError("an auxiliary engine takes no weights: it serves those of its folder")

"""A model whose weights are read after it was built is the model that transformers loads as a whole, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trinity_mq.training.model.policy import detect_head_operation
from trinity_mq.training.model.weight_files import WeightsNotDeferredError, build, stand_in

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 99,
}
Tensors = dict[str, Tensor]
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_head(change: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {HEAD: tensors[EMBEDDINGS] + change}


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace(EMBEDDINGS, HEAD): tensor for name, tensor in tensors.items()}


TIED = transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True)
QWEN = transformers.Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False)
GEMMA = transformers.Gemma3TextConfig(**SHAPE, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=30.0)
MIXTRAL = transformers.MixtralConfig(**SHAPE, num_local_experts=4)
CASES: dict[str, tuple[Any, Callable[[Tensors], Tensors], torch.dtype]] = {
    "all weights": (QWEN, dict, torch.float32),
    "narrow files": (QWEN, dict, torch.bfloat16),
    "some missing": (QWEN, without(HEAD, "model.layers.1.mlp.up_proj.weight"), torch.float32),
    "tied": (TIED, dict, torch.float32),
    "tied, the head in the file": (TIED, renamed, torch.float32),
    "tied, both in the file": (TIED, with_head(0.0), torch.float32),
    "not tied in the file": (TIED, with_head(1.0), torch.float32),
    "experts of several tensors": (MIXTRAL, dict, torch.bfloat16),
    "several kinds of layers": (GEMMA, dict, torch.float32),
}


def saved(folder: Path, case: str) -> Path:
    shape, change, dtype = CASES[case]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).to(dtype).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})
    return folder


def contents(model: nn.Module) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_that_is_loaded_as_a_whole(tmp_path: Path, case: str) -> None:
    folder = saved(tmp_path / "model", case)
    torch.manual_seed(7)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(7)
    late, files = build(folder, dtype=torch.float32)
    assert sum(tensor.numel() for tensor in late.parameters() if not tensor.is_meta) <= 32 * (100 + 48)
    files.fill(late, CPU)
    files.close()
    expected, found = contents(whole), contents(late)
    assert type(late) is type(whole)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    whole.save_pretrained(tmp_path / "whole")
    late.save_pretrained(tmp_path / "late")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "late" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("case", ["all weights", "experts of several tensors", "several kinds of layers"])
def test_a_small_one_of_its_kind_does_the_same_after_its_head(tmp_path: Path, case: str) -> None:
    model, files = build(saved(tmp_path, case), dtype=torch.float32)
    small = stand_in(model, CPU)
    files.fill(model, CPU)
    assert detect_head_operation(small) == detect_head_operation(model) is not None
    kinds = getattr(model.config, "layer_types", None) or [""]
    assert set(getattr(small.config, "layer_types", None) or [""]) == set(kinds)
    assert sum(tensor.numel() for tensor in small.parameters()) < sum(tensor.numel() for tensor in model.parameters())


def test_files_of_another_format_are_for_loading_as_a_whole(tmp_path: Path) -> None:
    saved(tmp_path, "all weights")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsNotDeferredError, match="not in safetensors files"):
        build(tmp_path, dtype=torch.float32)

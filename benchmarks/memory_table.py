"""Which model fits on which GPU, by the estimate: a Markdown table of the memory of a trainer process on each GPU.

    python benchmarks/memory_table.py [--models 0.5B 7B]

The shapes are those of Qwen2.5. No weights and no GPU are needed. The figures are estimates; the parts that are assumed
are in ``trinity_mq.training.memory.estimate.ASSUMED``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, TrainerConfig
from trinity_mq.config.model import LoraConfig
from trinity_mq.operations.memory import measure_models
from trinity_mq.training.memory.estimate import MeasureRequest, estimate

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
"""Width, feed-forward width, layers, heads, heads of keys and values, vocabulary, and whether embedding and head are
tied, of the Qwen2.5 models.
"""
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, `offload`": {"optimizer": {"offload": True}},
    "LoRA": {"lora": LoraConfig()},
}
RANKS = (1, 2, 4, 8)
CARDS = (24, 48, 80)
"""Sizes of GPUs in GB."""
USABLE = 0.9
"""Fraction of a GPU that the estimate may fill."""
TOKENS = 8192


def shape(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model."""
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


def config(folder: Path, ranks: int, way: dict[str, Any]) -> Config:
    """Return the configuration of a cell of the table."""
    return Config(
        model=ModelConfig(model_path=str(folder), dtype="bfloat16", lora=way.get("lora")),
        algorithm=AlgorithmConfig(optimizer=OptimizerConfig(**way.get("optimizer", {}))),
        trainer=TrainerConfig(nproc=ranks, max_tokens_per_micro_batch=TOKENS),
    )


def rows(names: Sequence[str]) -> list[str]:
    """Return the rows of the table: a model and a way to train it, with the GB on each GPU by number of GPUs."""
    with tempfile.TemporaryDirectory() as scratch:
        cells: list[tuple[str, str, Config]] = []
        for name in names:
            folder = Path(scratch, name)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(shape(name)))
            cells += [
                (name, label, config(folder, ranks, way))
                for label, way in WAYS.items()
                for ranks in (RANKS if "optimizer" not in way else RANKS[:1])  # offload is for one process
            ]
        requests = [MeasureRequest.of_trained(settings, "cuda") for _, _, settings in cells]
        distinct = {json.dumps(vars(request), sort_keys=True): request for request in requests}
        measured = dict(zip(distinct, measure_models(list(distinct.values())), strict=True))
    sizes: dict[tuple[str, str], list[float]] = {}
    for (name, label, settings), request in zip(cells, requests, strict=True):
        result = measured[json.dumps(vars(request), sort_keys=True)]
        value = estimate(settings, "cuda", {"model": result})
        if value.trainer_bytes is None:
            raise SystemExit(f"{name}: {'; '.join(value.unknown.values())}")
        sizes.setdefault((name, label), []).append(value.trainer_bytes / 1e9)
    return [row(name, label, values) for (name, label), values in sizes.items()]


def row(name: str, label: str, sizes: Sequence[float]) -> str:
    """Return a row: GB by number of GPUs, and the smallest number of GPUs of each size that suffices."""
    fits = [[ranks for ranks, size in zip(RANKS, sizes, strict=False) if size <= USABLE * card] for card in CARDS]
    values = [f"{size:.1f}" for size in sizes] + ["-"] * (len(RANKS) - len(sizes))
    return f"| {' | '.join([name, label, *values, *(str(min(ranks, default='-')) for ranks in fits)])} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Print which model fits on which GPU, by the estimate.")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    models = parser.parse_args().models
    ranks = " | ".join(f"{count} GPU{'s' if count > 1 else ''}" for count in RANKS)
    print(f"| model | training | {ranks} | {' | '.join(f'{card} GB: GPUs' for card in CARDS)} |")
    print("|" + "---|" * (2 + len(RANKS) + len(CARDS)))
    print("\n".join(rows(models)))


if __name__ == "__main__":
    main()

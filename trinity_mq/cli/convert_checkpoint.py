"""``trinity-mq convert-checkpoint``: writes the weights of a checkpoint of Trinity-RFT as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq convert-checkpoint``."""
    parser.add_argument(
        "checkpoint", metavar="FOLDER", help="checkpoint folder of a run, a folder global_step_N, or its folder actor"
    )
    parser.add_argument("--out", metavar="NEW_FOLDER", required=True, help="Hugging Face folder to write")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="Hugging Face folder of the first model, for its configuration and tokenizer; default: actor/huggingface",
    )


def convert(arguments: argparse.Namespace) -> int:
    """Convert the checkpoint and print the setting that begins a run with its weights."""
    from trinity_mq.trinity_rft.checkpoint import convert_checkpoint

    out = Path(arguments.out)
    model = None if arguments.model is None else Path(arguments.model)
    result = convert_checkpoint(Path(arguments.checkpoint), out, model)
    adapters = f", {result.adapters} adapters merged" if result.adapters else ""
    print(f"{result.source} -> {out}: {result.weights} weights, {result.parameters:,} parameters{adapters}")
    print(f"a run begins with them if it has the setting model.model_path={out}; its optimizer and steps begin anew")
    return 0

"""``trinity-mq algorithms``: lists the available algorithms, and shows the formula and settings of an algorithm."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

import yaml
from pydantic import ValidationError

from trinity_mq.cli.arguments import add_actions
from trinity_mq.config import AlgorithmConfig, ConfigError, load_config
from trinity_mq.config.algorithm.needs import components, needs, needs_reference
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import ALIASES, PRESETS
from trinity_mq.config.algorithm.resolve import preset_of
from trinity_mq.errors import CommandError

PIECES = ("anchor", "ratio", "surrogate", "correction", "kl", "regularisers", "reduction")
"""Pieces of the policy loss, in display order."""
NEEDS = {
    "ref": "a reference model, which the trainer holds",
    "old": "a forward pass before each train step",
    "teacher": "teacher_logprobs of the workflow",
    "critic": "a value function, which the trainer trains",
    "roles": "info.role of the experiences: who acted",
    "staleness": "versions of the sampled tokens, reported by the engines",
    "entropy": "a forward pass before each optimizer step",
    "entropy_baseline": "a sum over the vocabulary for each token of that pass",
    "runs": "at least two runs of each task",
    "answers": "expert answers: experiences with info.is_expert, or a taskset of answers",
    "pairs": "pairs of a chosen and a rejected answer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``trinity-mq algorithms``. Without an action it lists the algorithms."""
    parser.set_defaults(function=list_algorithms)
    add = add_actions(parser, required=False)
    action = add("show", "print the formula, pieces and settings of an algorithm", show)
    action.add_argument("name", metavar="NAME", help="such as gspo")
    action.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="such as surrogate.low=0.1")


def list_algorithms(arguments: argparse.Namespace) -> int:
    """Print the summary of each algorithm, its pieces and its requirements."""
    width = max(60, shutil.get_terminal_size((100, 24)).columns - 1)
    for name, preset in sorted(PRESETS.items()):
        config = AlgorithmConfig.model_validate({"algorithm_type": name})
        needs_text = "; needs " + ", ".join(needs_of(config)) if needs_of(config) else ""
        print(textwrap.fill(preset.summary, width, initial_indent=f"{name:27}", subsequent_indent=" " * 27))
        print(
            textwrap.fill(pieces_line(config) + needs_text, width, initial_indent=" " * 29, subsequent_indent=" " * 29)
        )
    print(f"\n{len(PRESETS)} algorithms. Formula and settings: trinity-mq algorithms show NAME")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print all details of one algorithm."""
    try:
        preset = preset_of(arguments.name)
    except ValueError as error:
        raise CommandError(str(error)) from None
    words = [f"algorithm.{word.removeprefix('algorithm.')}" for word in arguments.overrides]
    try:
        raw_config: dict[str, Any] = {"model": {"tiny": {}}, "algorithm": {"algorithm_type": arguments.name}}
        config = load_config(raw_config, words).algorithm
    except (ConfigError, ValidationError) as error:
        raise CommandError(str(error)) from error
    weights = config.weights
    print(f"{config.algorithm_type}: {preset.summary}\n")
    for title, text in (
        ("source", preset.source),
        ("loss of a token", preset.formula),
        ("differs", preset.differs),
        ("also called", ", ".join(alias for alias, name in ALIASES.items() if name == config.algorithm_type)),
    ):
        if text:
            print(textwrap.fill(f"{title}: {text}", 100, subsequent_indent="    "))
    for need in needs_of(config):
        print(f"needs: {NEEDS[need]}")
    used = {"imitation": weights.ce or config.ce_schedule, "distillation": weights.ref_kl, "pair": weights.pair}
    unused = {name for name, weight in used.items() if not weight}
    pieces = {"repeat_times", "estimator", "reward_kl", *LossConfig.model_fields} - unused
    include = dict.fromkeys(pieces, True) | {"optimizer": {"lr"}}
    shown = config.model_dump(mode="json", include=include, exclude_none=True)
    print("\nalgorithm:")
    print(textwrap.indent(yaml.safe_dump({"algorithm_type": config.algorithm_type, **shown}, sort_keys=False), "  "))
    return 0


def pieces_line(config: AlgorithmConfig) -> str:
    """Return in one line the estimator of an algorithm, and the pieces and weights that differ from the defaults."""
    plain, parts = LossConfig(), [_short(config.estimator)]
    for name in PIECES:
        value = getattr(config, name)
        if value and value != getattr(plain, name):
            pieces = value if isinstance(value, tuple) else (value,)
            parts.append(
                f"{name} " + " + ".join(piece if isinstance(piece, str) else _short(piece) for piece in pieces)
            )
    weights = {name: weight for name, weight in config.weights.model_dump().items() if weight}
    if weights != {"rl": 1.0}:
        parts.append("weights " + ", ".join(f"{name} {weight:g}" for name, weight in weights.items()))
    return "; ".join(parts)


def _short(piece: Any) -> str:
    """Return a piece as text: its kind and the fields that differ from their defaults."""
    fields = piece.model_dump(exclude_defaults=True)
    fields.pop("kind", None)
    field_texts = ", ".join(f"{name} {value}" for name, value in fields.items())
    return f"{piece.kind}({field_texts})" if field_texts else str(piece.kind)


def needs_of(config: AlgorithmConfig) -> list[str]:
    """Return the requirements of an algorithm in addition to tokens, logprobs and rewards, as keys of :data:`NEEDS`."""
    used = components(config)
    required = ["runs"] if config.estimator.compares_runs else []
    required += config.estimator.needs
    required += [need for component, need in (("ce", "answers"), ("pair", "pairs")) if component in used]
    required += ["ref"] if needs_reference(config) else []
    return list(dict.fromkeys([*required, *sorted(needs(config, dict.fromkeys(used, 1.0)))]))

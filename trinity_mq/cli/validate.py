"""``trinity-mq validate``: checks a configuration without starting a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trinity_mq.cli.arguments import add_target
from trinity_mq.config import Config, ConfigError, Stage
from trinity_mq.config.loading.problems import Problem
from trinity_mq.config.loading.stages import find_stage
from trinity_mq.operations.long_prompts import count_long_prompts
from trinity_mq.operations.rendering import describe_rendering
from trinity_mq.operations.validate import check_all, tasksets
from trinity_mq.targets.target import load_target_configuration, load_target_stages

DECIDING = frozenset({"buffer", "mode", "plugin_dirs", "source"})
"""Sections that decide which tasksets, workflows and functions exist."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq validate``."""
    add_target(parser)
    parser.add_argument("--stage", metavar="NAME", help="check this stage alone, of a file that describes several")


def validate(arguments: argparse.Namespace) -> int:
    """Check a configuration, every stage of a file, or the stage of ``--stage``. Print a line for each part. Return 0.

    Raises:
        ConfigError: Lists the problems.
    """
    stages = load_target_stages(arguments)
    if arguments.stage is not None and not stages:
        raise ConfigError(f"--stage {arguments.stage}: {arguments.target} holds no stages; leave it out")
    for stage in [find_stage(stages, arguments.stage)] if arguments.stage else stages:
        has_model = stage.begins_with is None or _is_trained(stage)
        lines = check_all(stage.config, needs_model=has_model)
        lines += _describe_model(stage.config) if has_model else []
        _print_valid(f"{arguments.target}: stage {stage.name}:", stage.config, lines)
    if not stages:
        config = _load(arguments)
        lines = [*check_all(config), *_describe_model(config)]
        _print_valid(f"{arguments.target}:", config, lines)
    return 0


def _describe_model(config: Config) -> list[str]:
    """Return lines on the renderer of conversations and on prompts that are too long for the model. Both need the
    model's tokenizer, except for a tiny model.
    """
    return [*describe_rendering(config), *count_long_prompts(config, tasksets(config))]


def _load(arguments: argparse.Namespace) -> Config:
    """Return the configuration of TARGET. If it has wrong keys, the settings without these keys are checked too, and
    the error lists all problems.
    """
    try:
        return load_target_configuration(arguments)
    except ConfigError as error:
        if error.remaining is None or any(_decides_checks(problem) for problem in error.problems):
            raise
        lines = str(error).split("\n")
        try:
            check_all(error.remaining)
        except ConfigError as further:
            lines += [
                line
                for line in str(further).split("\n")
                if not any(problem.may_cause((), line) for problem in error.problems)
            ]
        raise ConfigError("\n".join(lines)) from None


def _decides_checks(problem: Problem) -> bool:
    """Return whether the wrong key of a problem is in a section of :data:`DECIDING`, or is a top-level key that
    resembles such a section. The checks of the settings without this key would then check other tasksets or other user
    code than the user wants.
    """
    sections = [problem.location[0], *problem.similar] if len(problem.location) == 1 else problem.location[:1]
    return not DECIDING.isdisjoint(sections)


def _is_trained(stage: Stage) -> bool:
    return stage.config.model.model_path is not None and Path(stage.config.model.model_path).is_dir()


def _print_valid(subject: str, config: Config, lines: Sequence[str]) -> None:
    for line in lines:
        print(line)
    print(f"{subject} run {config.name!r} is valid; it would use {config.path}")

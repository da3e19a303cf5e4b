"""``trinity-mq validate``: checks a configuration without starting anything."""

from __future__ import annotations

import argparse
import inspect
import uuid

from trinity_mq.cli.arguments import add_target
from trinity_mq.cli.target import configuration
from trinity_mq.config import Config, ConfigError
from trinity_mq.data import open_taskset
from trinity_mq.messages import DecodeError
from trinity_mq.rewards import RewardError, UnknownNameError, create_reward
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.transport.blobs import StoreUnavailable, open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq validate``."""
    add_target(parser)


def validate(arguments: argparse.Namespace) -> int:
    """Check a configuration and print a line on each part."""
    config = configuration(arguments)
    for line in (
        *check_tasksets(config),
        *check_workflows(config),
        *check_operators(config),
        *check_blob_store(config),
    ):
        print(line)
    print(f"{arguments.target}: run {config.name!r} is valid; it would use {config.path}")
    return 0


def check_tasksets(config: Config) -> list[str]:
    """Open every taskset once, so that an unreadable one shows before processes start; return a line on each.

    Raises:
        TasksetError: One cannot be read.
        ConfigError: Its reward function is not known, or does not take its arguments.
        FatalError: A folder of ``plugin_dirs`` cannot be used.
    """
    add_plugins(config.plugin_dirs)
    found = []
    for taskset in (config.buffer.taskset, *config.buffer.eval_tasksets):
        try:
            if taskset.reward_fn:  # else the workflow brings its own
                create_reward(taskset.reward_fn, taskset.reward_fn_args)
        except (UnknownNameError, RewardError) as error:
            raise ConfigError(f"taskset {taskset.name!r}: {error}") from error
        if taskset.storage_type == "queue":
            found.append(f"taskset {taskset.name!r}: tasks submitted from outside")
        else:
            tasks = open_taskset(taskset, max_bytes=config.broker.max_task_bytes)
            found.append(f"taskset {taskset.name!r}: {len(tasks)} tasks from {taskset.path}")
    return found


def check_workflows(config: Config) -> list[str]:
    """Import the workflow of every taskset; return a line on each that is the user's own.

    Raises:
        ConfigError: It is not known, cannot be imported, or records history, which is switched off.
    """
    from trinity_mq.workflows import WORKFLOWS, load_workflow  # and torch with it

    own = []
    for taskset in (config.buffer.taskset, *config.buffer.eval_tasksets):
        try:
            kind = load_workflow(taskset.workflow)
        except UnknownNameError as error:
            raise ConfigError(f"taskset {taskset.name!r}: {error}") from error
        if kind.needs_history and not config.explorer.rollout_model.enable_history:
            raise ConfigError(
                f"taskset {taskset.name!r}: workflow {taskset.workflow!r} makes its experiences from recorded calls; "
                "set explorer.rollout_model.enable_history: true"
            )
        if taskset.workflow not in WORKFLOWS:
            own.append(f"taskset {taskset.name!r}: workflow {kind.__name__} from {inspect.getfile(kind)}")
    return own


def check_operators(config: Config) -> list[str]:
    """Make the operators of the chain; return a line on them if there are any.

    Raises:
        ConfigError: One is not known, or does not take its arguments.
    """
    from trinity_mq.operators import OperatorConfigError, create_operators  # and torch with it

    try:
        made = create_operators(config.operator.operators)
    except (UnknownNameError, OperatorConfigError) as error:
        raise ConfigError(f"operator.operators: {error}") from error
    names = ", ".join(operator.name for operator in config.operator.operators)
    return [f"operators, before the advantage: {names}"] if made else []


def check_blob_store(config: Config) -> list[str]:
    """Write, read and remove a small blob where a blob store is configured; return a line on it.

    Raises:
        ConfigError: One of that failed.
        FatalError: No library for it is installed.
    """
    store = open_store(config.broker, config.name)
    if store is None:
        return []
    try:
        reference = store.put(f"check/{uuid.uuid4().hex}", b"x")
        store.get(reference)
        store.delete("check")
    except (StoreUnavailable, DecodeError) as error:
        raise ConfigError(f"broker.blob_store: {error}") from error
    return [f"blob store {store.url}: can be written and read"]

"""``trinity-mq validate``: everything that can be wrong before anything is started."""

from __future__ import annotations

import argparse
import uuid

from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.data import open_taskset
from trinity_mq.messages import DecodeError
from trinity_mq.rewards import RewardError, UnknownNameError, create_reward
from trinity_mq.runtime.blobs import StoreUnavailable, open_store


def validate(arguments: argparse.Namespace) -> int:
    """Check a configuration and print what it says."""
    config = load_config(arguments.config, arguments.overrides)
    for line in (*check_tasksets(config), *check_blob_store(config)):
        print(line)
    print(f"{arguments.config}: run {config.name!r} is valid; it would use {config.path}")
    return 0


def check_tasksets(config: Config) -> list[str]:
    """Open every taskset once, so that an unreadable one shows before processes start; return a line on each.

    Raises:
        TasksetError: One cannot be read.
        ConfigError: Its reward function is not known, or does not take its arguments.
    """
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
            found.append(f"taskset {taskset.name!r}: {len(open_taskset(taskset))} tasks from {taskset.path}")
    return found


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

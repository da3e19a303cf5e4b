"""Rules of the table of names for limits that a run here needs and Trinity-RFT does not have."""

from __future__ import annotations

from trinity_mq.config.run import TRUNCATING, batch_bytes, slice_hold_seconds
from trinity_mq.trinity_rft.migration.transfer import (
    SettingsTransfer,
    default_of,
    number,
    training_tasksets,
    value_at,
    whole,
)

TIMEOUT = 1800
"""Trinity-RFT's default of ``max_timeout``, in seconds."""
MAX_READY_BYTES = 32 * 2**30
"""Maximum bytes of processed batches that ``migrate`` lets the broker keep. For a run that needs more, ``migrate``
makes checkpoints more frequent.
"""
GIB = 2**30
SIZES = ("buffer.batch_size", "algorithm.repeat_times", "model.max_prompt_tokens", "model.max_response_tokens")
"""Settings on which the size of a batch depends."""


def timeouts(move: SettingsTransfer) -> None:
    """Move the time limit of a run of a task, and raise the limits that must not be shorter."""
    if move.resolved("mode") == "train":
        return
    move.keep_or_default("explorer.max_timeout", TIMEOUT, "Trinity-RFT's default; here it is 360 s")
    tries = whole(move.current("explorer.max_retry_times"))
    run_timeout = number(move.settings["explorer"]["max_timeout"])
    if run_timeout is None or tries is None:
        return
    limit = run_timeout * (tries + 1)
    reason = f"as long as {tries + 1} tries of max_timeout; usually"
    for name in ("batch_timeout", "stall_timeout"):
        default = default_of(f"explorer.{name}")
        if limit > default:
            move.put(f"explorer.{name}", limit, f"{reason} {default:g}")
    default = default_of("broker.consumer_timeout")
    if (hold := slice_hold_seconds(limit)) >= default:
        move.put("broker.consumer_timeout", hold + 60, f"{reason} {default:g}")


def lookahead(move: SettingsTransfer) -> None:
    """Let the explorer run at least as far ahead as the batches of one train step, unless the sync style is fixed."""
    together = whole(value_at(move.settings, "trainer.batches_per_step")) or 1
    key = "synchronizer.pipeline_depth"
    depth = whole(move.current(key)) or 0
    if move.resolved("synchronizer.sync_style", "fixed") != "fixed" and together > depth + 1:
        move.take(key)
        move.put(key, together - 1, f"a train step takes {together} batches, which must be open at a time")


def retention(move: SettingsTransfer) -> None:
    """Let the broker keep the batches between two checkpoints, or write checkpoints more often."""
    interval, opened = (whole(move.current(key)) for key in ("trainer.save_interval", "explorer.max_open_batches"))
    sizes = [whole(move.current(key)) for key in SIZES]
    if interval is None or opened is None or None in sizes or move.has("broker.ready_max_bytes"):
        return
    tasks, runs, prompt, response = (size or 0 for size in sizes)
    batch = batch_bytes(tasks * runs, prompt, response)
    if batch <= 0 or interval < 1:
        return
    longest = max(1, MAX_READY_BYTES // batch - opened)
    if interval > longest:
        move.take("trainer.save_interval")
        shorter = next(length for length in range(longest, 0, -1) if interval % length == 0)
        move.put(
            "trainer.save_interval", shorter,
            f"was {interval}: the broker keeps every batch until a checkpoint, and these batches may be "
            f"{-(-interval * batch // GIB)} GiB",
        )  # fmt: skip
        interval = shorter
    needed = -(-(interval + opened) * batch // GIB) * GIB
    if needed > default_of("broker.ready_max_bytes"):
        move.put(
            "broker.ready_max_bytes", needed,
            f"the broker keeps {interval} batches until a checkpoint and {opened} open batches: at most "
            f"{needed // GIB} GiB on its disk, if every answer has its maximum length",
        )  # fmt: skip


def truncated_sampling(move: SettingsTransfer) -> None:
    """Allow training tasksets with sampling parameters of their own that change the sampled distribution."""
    if any(TRUNCATING & set(taskset.get("rollout_args", ())) for taskset in training_tasksets(move.settings)):
        allow_truncated_sampling(move)


def allow_truncated_sampling(move: SettingsTransfer) -> None:
    """Set the switch for sampling parameters that change the sampled distribution, unless it is set."""
    if not move.has("algorithm.allow_truncated_sampling"):
        move.put(
            "algorithm.allow_truncated_sampling", True,
            "training rollouts are sampled with top_p, top_k or a penalty: their logprobs are not the policy's. "
            "Trinity-RFT trains on them without a warning; better sample without them",
        )  # fmt: skip

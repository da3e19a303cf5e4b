"""The section ``algorithm``: the algorithm keeps its names, and the optimizer's defaults are written explicitly."""

from __future__ import annotations

from typing import Any

from trinity_mq.trinity_rft.migration.move import SettingsTransfer
from trinity_mq.trinity_rft.migration.values import number, resolve_environment, whole

KEPT = (
    "advantage_fn",
    "advantage_fn_args",
    "policy_loss_fn",
    "policy_loss_fn_args",
    "kl_penalty_fn",
    "kl_penalty_fn_args",
    "kl_loss_fn",
    "kl_loss_fn_args",
    "entropy_loss_fn_args",
    "loss_agg_mode",
)
"""Settings that have the same names here."""
EXPERTS = ("train_batch_size_expert", "train_batch_size_usual", "ppo_mini_batch_size", "ngpus_trainer")
"""Sizes in the arguments of losses that mix in expert answers. Here they follow from the data."""
DEFAULTS: dict[str, Any] = {"betas": [0.9, 0.999], "weight_decay": 0.01}
"""Defaults of Trinity-RFT's optimizer that differ from the defaults here."""


def algorithm(move: SettingsTransfer) -> None:
    """Move the section."""
    kind = move.take("algorithm.algorithm_type")
    if kind is None:
        move.put("algorithm.algorithm_type", "ppo", "Trinity-RFT's default; here it is grpo")
    else:
        move.put("algorithm.algorithm_type", kind)
    if resolve_environment(move.peek("mode")) == "train":
        move.leave_out("algorithm.repeat_times", "mode train rolls nothing out", matters=False)
    _entropy(move)
    _losses(move)
    _kl(move)
    _samples(move)
    for name, reason in {
        "bypass_old_logprobs": "old logprobs are the engine's, or the trainer's where the algorithm's own pieces ask "
        "for it (docs/learning.md)",
        "enable_router_replay": "expert choices are not replayed",
        "rollout_correction": "`algorithm.correction` corrects for differences between engine and trainer",
    }.items():
        move.leave_out(f"algorithm.{name}", reason)
    for name in KEPT:
        move.keep(f"algorithm.{name}")
    _optimizer(move)


def _entropy(move: SettingsTransfer) -> None:
    function = move.take("algorithm.entropy_loss_fn")
    if function == "none":
        move.take("algorithm.entropy_loss_fn_args")
        move.put("algorithm.entropy_coef", 0.0, "was algorithm.entropy_loss_fn: none")


def _losses(move: SettingsTransfer) -> None:
    for section in ("policy_loss_fn_args", "kl_loss_fn_args", "entropy_loss_fn_args"):
        for name in EXPERTS:
            move.leave_out(
                f"algorithm.{section}.{name}",
                "it follows from `buffer` and `buffer.trainer_input.expert_data_ratio`",
                matters=False,
            )


def _kl(move: SettingsTransfer) -> None:
    if resolve_environment(move.peek("algorithm.kl_loss_fn")) == "k1":
        move.leave_out(
            "algorithm.kl_loss_fn",
            "as a loss k1 has an expected gradient of 0 on sampled answers, and on recorded ones it lowers the "
            "likelihood of all; k2 and k3 hold the policy near its reference, and dpo does so itself",
        )
        move.take("algorithm.kl_loss_fn_args")
        move.put("algorithm.kl_loss_fn", "none", "was k1, which only adds noise; k2 holds the policy near a reference")


def _samples(move: SettingsTransfer) -> None:
    move.leave_out(
        "algorithm.sample_strategy", "a step has its rollout batches, and expert experiences in addition", matters=False
    )
    move.move("algorithm.sample_strategy_args.expert_data_ratio", "buffer.trainer_input.expert_data_ratio")
    move.move("algorithm.sample_strategy_args.max_staleness", "synchronizer.max_staleness")


def _optimizer(move: SettingsTransfer) -> None:
    there, here = "algorithm.optimizer.", "algorithm.optimizer."
    steps = whole(move.peek("trainer.total_steps")) or whole(move.peek("buffer.total_steps"))
    style = move.take(there + "warmup_style")
    scheduler = move.take(there + "lr_scheduler_type")
    if style is not None:
        move.put(here + "lr_scheduler_type", style, "was algorithm.optimizer.warmup_style")
    elif scheduler is not None:
        move.put(here + "lr_scheduler_type", scheduler)
    else:
        move.put(here + "lr_scheduler_type", "constant", "Trinity-RFT's default; here it is linear, which falls")
    ratio, warmup = number(move.take(there + "lr_warmup_steps_ratio")) or 0.0, move.take(there + "lr_warmup_steps")
    if warmup is not None and (whole(warmup) or 0) >= 0:
        move.put(here + "lr_warmup_steps", warmup)
    elif ratio and steps:
        move.put(here + "lr_warmup_steps", int(ratio * steps), f"was lr_warmup_steps_ratio {ratio:g}, of {steps} steps")
    else:
        comment = "Trinity-RFT's default; here it is 10"
        if ratio:
            comment = (
                f"was lr_warmup_steps_ratio {ratio:g}; give that share of the run's train steps, which follow from "
            )
            comment += "the size of the data"
        move.put(here + "lr_warmup_steps", 0, comment)
    min_ratio = move.take(there + "min_lr_ratio")
    if move.settings["algorithm"]["optimizer"]["lr_scheduler_type"] == "constant":
        pass  # a constant learning rate has no decay
    elif min_ratio is None:
        move.put(here + "min_lr_ratio", 0.01, "Trinity-RFT's default; here it is 0.1")
    else:
        move.put(here + "min_lr_ratio", min_ratio)
    for name, value in DEFAULTS.items():
        if move.peek(there + name) is None:
            move.put(here + name, value, "Trinity-RFT's default, which is another here")
        else:
            move.keep(there + name)
    move.move("trainer.grad_clip", here + "clip_grad")
    rate = move.take("trainer.trainer_config.actor_rollout_ref.actor.optim.lr")
    if rate is not None and move.peek(there + "lr") is None:
        move.put(here + "lr", rate, "was trainer.trainer_config.actor_rollout_ref.actor.optim.lr")
    move.move("trainer.optimizer_offload", here + "offload")

"""Rules of the table of names for the algorithm: its losses and its optimizer."""

from __future__ import annotations

from trinity_mq.trinity_rft.migration.transfer import SettingsTransfer, number, whole

EXPERTS = ("train_batch_size_expert", "train_batch_size_usual", "ppo_mini_batch_size", "ngpus_trainer")
"""Sizes in the arguments of losses that mix in expert answers. Here they follow from the data."""


def losses(move: SettingsTransfer) -> None:
    """Move the algorithm, and the losses that have another meaning here."""
    move.keep_or_default("algorithm.algorithm_type", "ppo", "Trinity-RFT's default; here it is grpo")
    if move.resolved("mode") == "train":
        move.leave_out("algorithm.repeat_times", "mode train rolls nothing out", matters=False)
    if move.take("algorithm.entropy_loss_fn") == "none":
        move.take("algorithm.entropy_loss_fn_args")
        move.put("algorithm.entropy_coef", 0.0, "was algorithm.entropy_loss_fn: none")
    for section in ("policy_loss_fn_args", "kl_loss_fn_args", "entropy_loss_fn_args"):
        for name in EXPERTS:
            move.leave_out(
                f"algorithm.{section}.{name}",
                "it follows from `buffer` and `buffer.trainer_input.expert_data_ratio`",
                matters=False,
            )
    if move.resolved("algorithm.kl_loss_fn") == "k1":
        move.leave_out(
            "algorithm.kl_loss_fn",
            "as a loss k1 has an expected gradient of 0 on sampled answers, and on recorded ones it lowers the "
            "likelihood of all; k2 and k3 hold the policy near its reference, and dpo does so itself",
        )
        move.take("algorithm.kl_loss_fn_args")
        move.put("algorithm.kl_loss_fn", "none", "was k1, which only adds noise; k2 holds the policy near a reference")


def optimizer(move: SettingsTransfer) -> None:
    """Move the optimizer and the schedule of its learning rate."""
    section = "algorithm.optimizer."
    style, scheduler = move.take(section + "warmup_style"), move.take(section + "lr_scheduler_type")
    if style is not None:
        move.put(section + "lr_scheduler_type", style, "was algorithm.optimizer.warmup_style")
    elif scheduler is not None:
        move.put(section + "lr_scheduler_type", scheduler)
    else:
        comment = "Trinity-RFT's default; here it is linear, which falls"
        move.put(section + "lr_scheduler_type", "constant", comment)
    steps = whole(move.peek("trainer.total_steps")) or whole(move.peek("buffer.total_steps"))
    ratio = number(move.take(section + "lr_warmup_steps_ratio")) or 0.0
    warmup = move.take(section + "lr_warmup_steps")
    if warmup is not None and (whole(warmup) or 0) >= 0:
        move.put(section + "lr_warmup_steps", warmup)
    elif ratio and steps:
        comment = f"was lr_warmup_steps_ratio {ratio:g}, of {steps} steps"
        move.put(section + "lr_warmup_steps", int(ratio * steps), comment)
    else:
        share = (
            f"was lr_warmup_steps_ratio {ratio:g}; give that share of the run's train steps, which follow from the "
            "size of the data"
        )
        move.put(section + "lr_warmup_steps", 0, share if ratio else "Trinity-RFT's default; here it is 10")
    if move.settings["algorithm"]["optimizer"]["lr_scheduler_type"] == "constant":
        move.take(section + "min_lr_ratio")  # a constant learning rate has no decay
    else:
        move.keep_or_default(section + "min_lr_ratio", 0.01, "Trinity-RFT's default; here it is 0.1")
    move.keep_or_default(section + "betas", [0.9, 0.999], "Trinity-RFT's default, which is another here")
    move.keep_or_default(section + "weight_decay", 0.01, "Trinity-RFT's default, which is another here")

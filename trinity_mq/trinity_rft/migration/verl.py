"""Rules of the table of names for veRL's own configuration of the trainer, ``trainer.trainer_config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_mq.config.loading.load import read_file
from trinity_mq.trinity_rft.migration.transfer import SettingsTransfer, resolve_environment, whole

CONFIG = "trainer.trainer_config."
ACTOR = f"{CONFIG}actor_rollout_ref.actor."
SAME = {
    f"{ACTOR}optim.lr_warmup_steps_ratio": "algorithm.optimizer.lr_warmup_steps_ratio",
    f"{ACTOR}optim.lr_warmup_steps": "algorithm.optimizer.lr_warmup_steps",
    f"{ACTOR}optim.warmup_style": "algorithm.optimizer.warmup_style",
    f"{ACTOR}optim.min_lr_ratio": "algorithm.optimizer.min_lr_ratio",
    f"{ACTOR}optim.betas": "algorithm.optimizer.betas",
    f"{ACTOR}optim.weight_decay": "algorithm.optimizer.weight_decay",
    f"{ACTOR}grad_clip": "trainer.grad_clip",
    f"{ACTOR}ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
    f"{CONFIG}trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
}
"""Keys of veRL, and the key of Trinity-RFT with the same meaning. A value of Trinity-RFT's key takes precedence."""
OF_MACHINES = (
    "micro_batch_size", "use_dynamic_bsz", "offload", "sequence_parallel", "balance_batch", "max_token_len",
    "tiled_mlp", "hybrid_engine", "use_remove_padding", "fused_kernel",
    "entropy_from_logits_with_chunking", "entropy_checkpointing", "fsdp_config", "external_lib", "wrap_policy",
)  # fmt: skip
"""Parts of keys that affect how a step is computed, not its result."""
OF_FILES = (
    "checkpoint.", "max_critic_ckpt_to_keep", "resume_mode", "hdfs", "previous_ckpt", "local_ckpt", "val_before_train",
    "total_training_steps", "experiment_name", "project_name", "default_local_dir",
)  # fmt: skip
"""Parts of keys about checkpoints and names, for which a run here has one place and one form."""
CONSTANT = {f"{CONFIG}critic.optim.lr_warmup_steps_ratio": 0, f"{CONFIG}critic.optim.lr_scheduler_type": "constant"}
"""Keys with which the critic has a constant learning rate, as it has here."""
ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
"""Sections that have a strategy."""


def with_trainer_config(path: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the file that ``trainer.trainer_config_path`` names, if it is there, as
    ``trainer.trainer_config``. It is searched in the working directory and next to ``path``.

    Raises:
        ConfigError: The file cannot be read.
    """
    trainer = source.get("trainer")
    if not isinstance(trainer, Mapping) or trainer.get("trainer_config"):
        return source
    name = str(resolve_environment(trainer.get("trainer_config_path")) or "")
    for candidate in (Path(name), path.parent / Path(name).name) if name else ():
        if candidate.is_file():
            rest = {key: value for key, value in trainer.items() if key != "trainer_config_path"}
            return {**source, "trainer": {**rest, "trainer_config": _without_own_references(read_file(candidate))}}
    return source


def _without_own_references(section: Any) -> Any:
    """Return veRL's configuration without the values that refer to others of its values, which repeat them."""
    if isinstance(section, Mapping):
        return {
            key: _without_own_references(value)
            for key, value in section.items()
            if not (isinstance(value, str) and value.startswith("${") and "env:" not in value)
        }
    return section


def verl(move: SettingsTransfer) -> None:
    """Give veRL's keys the names of Trinity-RFT, and leave out the keys that change no result."""
    _megatron(move)
    for key, name in SAME.items():
        value = move.take(key)
        if value is not None and move.peek(name) is None:
            move.fill(name, value)
    checkpointing = move.take(f"{CONFIG}actor_rollout_ref.model.enable_gradient_checkpointing")
    if checkpointing is not None:
        move.put("trainer.gradient_checkpointing", checkpointing, "was enable_gradient_checkpointing")
    if (epochs := whole(move.take(f"{ACTOR}ppo_epochs", 1))) != 1:
        move.put("algorithm.epochs", epochs, "was ppo_epochs")
    for key, value in CONSTANT.items():
        if move.resolved(key) == value:
            move.take(key)
    for key, _ in list(move.rest()):
        if not key.startswith(CONFIG):
            continue
        if any(part in key for part in OF_MACHINES):
            move.leave_out(key, "a step is filled up to `trainer.max_tokens_per_micro_batch`", matters=False)
        elif any(part in key for part in OF_FILES):
            move.leave_out(key, "checkpoints are whole, in the run's folder", matters=False)


def _megatron(move: SettingsTransfer) -> None:
    """Refuse a trainer that splits a model in another way than the trainer here."""
    strategies = ["trainer.trainer_strategy", *(f"{CONFIG}{role}.strategy" for role in ROLES)]
    used = [key for key in strategies if move.resolved(key) == "megatron"]
    if used:
        move.refuse(
            used[0], "megatron",
            "the trainer has no Megatron (tensor, pipeline and expert parallelism); it splits a model with FSDP2, "
            "`trainer.nproc`",
        )  # fmt: skip
    for key, _ in list(move.rest()):
        if key.startswith("trainer.megatron.") or (key.startswith(CONFIG) and ".megatron." in key):
            move.leave_out(key, "it has no effect unless the trainer's strategy is megatron", matters=False)
    for key in strategies:
        if resolve_environment(move.peek(key)) in ("fsdp", "fsdp2", "megatron"):
            move.leave_out(key, "several processes share a step with `trainer.nproc` (FSDP2)", matters=False)

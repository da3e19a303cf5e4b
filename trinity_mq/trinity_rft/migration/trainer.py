"""The sections ``trainer``, ``synchronizer`` and ``monitor``."""

from __future__ import annotations

from trinity_mq.config.algorithm.translate import CRITIC_KEYS
from trinity_mq.trinity_rft.migration.move import LeftOut, SettingsTransfer
from trinity_mq.trinity_rft.migration.values import number, resolve_environment, whole

UNUSED = {
    "trainer.name": "agents name themselves",
    "trainer.trainer_type": "there is one trainer, on PyTorch",
    "trainer.trainer_strategy": "several processes share a step with `trainer.nproc` (FSDP2)",
    "trainer.use_dynamic_bsz": "micro-batches are always filled up to `trainer.max_tokens_per_micro_batch`",
    "trainer.use_remove_padding": "it is `trainer.packing`, which decides by model and device",
    "trainer.balance_batch": "sequences are always spread evenly",
    "trainer.enable_preview": "`trinity-mq inspect` shows what was sampled",
    "trainer.save_strategy": "checkpoints are written one at a time",
    "trainer.trust_remote_code": "it is `model.trust_remote_code`",
    "trainer.fix_actor_microbatch_loss_scale": "the loss does not depend on the micro-batches",
    "trainer.param_offload": "FSDP2 shards parameters with `trainer.nproc`",
    "trainer.grad_offload": "FSDP2 shards gradients with `trainer.nproc`",
    "trainer.offload_policy": "FSDP2 shards with `trainer.nproc`",
    "synchronizer.sync_timeout": "here it is the time of one phase, 60 s; a sync that fails is tried again",
    "synchronizer.group_name": "a run has one group",
    "synchronizer.wait_for_checkpoint": "the explorer waits for the weights it is due",
    "synchronizer.explorer_world_size": "the gate counts the engines that are there",
    "synchronizer.ray_namespace": "there is no Ray",
    "monitor.cache_dir": "metrics are in the run's folder",
    "monitor.enable_ray_timeline": "`monitor.trace` writes what each process does",
}


OF_MACHINES = ("micro_batch_size", "use_dynamic_bsz", "offload", "sequence_parallel", "balance_batch", "max_token_len")
"""Parts of key names in veRL's own configuration that affect how a step is distributed, not its result."""


def trainer(move: SettingsTransfer) -> None:
    """Move the sections."""
    for name in ("max_token_len_per_gpu", "ppo_max_token_len_per_gpu"):
        move.move(f"trainer.{name}", "trainer.max_tokens_per_micro_batch")
    size = whole(move.peek("trainer.ulysses_sequence_parallel_size", 1))
    move.leave_out("trainer.ulysses_sequence_parallel_size", "a sequence is computed by one process", matters=size != 1)
    _checkpoints(move)
    for key in CRITIC_KEYS:
        move.keep(f"trainer.{key}")
    for key, reason in UNUSED.items():
        move.leave_out(key, reason, matters=False)
    for key in [key for key, _ in move.rest() if key.startswith("trainer.trainer_config.")]:
        if any(part in key for part in OF_MACHINES):
            move.leave_out(key, "a step is filled up to `trainer.max_tokens_per_micro_batch`", matters=False)
    _synchronizer(move)
    _monitor(move)


def _checkpoints(move: SettingsTransfer) -> None:
    if whole(move.peek("trainer.save_interval")) == 0:
        move.leave_out("trainer.save_interval", "checkpoints are always written, every 50 batches", matters=False)
    exported = resolve_environment(move.take("trainer.save_hf_checkpoint"))
    if exported is not None:
        move.put("trainer.export", "every" if exported == "always" else "last", "was trainer.save_hf_checkpoint")
    elif resolve_environment(move.peek("mode")) != "explore":
        move.put("trainer.export", "last", "Trinity-RFT's default; here it is every")
    if whole(move.peek("trainer.max_checkpoints_to_keep", 0)) == 0:
        move.take("trainer.max_checkpoints_to_keep")
        if interval := whole(move.peek("trainer.save_interval")):
            move.put("trainer.keep_every", interval, "every checkpoint stays, as in Trinity-RFT")


def _monitor(move: SettingsTransfer) -> None:
    kind = move.take("monitor.monitor_type")
    if resolve_environment(kind) in {"wandb", "mlflow", "swanlab"}:
        place = {"kind": kind, "project": move.peek("project"), "group": move.peek("group")}
        tracker = {key: value for key, value in place.items() if value}
        move.put("monitor.trackers", [tracker], f"was monitor.monitor_type {kind}: pip install 'trinity-mq[{kind}]'")
    elif resolve_environment(kind) not in {None, "tensorboard"}:
        move.lost(LeftOut("monitor.monitor_type", kind, "services are wandb, mlflow and swanlab", matters=True))
    for key in [key for key, _ in move.rest() if key.startswith("monitor.monitor_args.")]:
        move.leave_out(key, "keys and servers are the service's own environment variables", matters=False)
    level = resolve_environment(move.take("log.level"))
    if level is not None:
        move.put("monitor.log_level", str(level).lower(), "was log.level")


def _synchronizer(move: SettingsTransfer) -> None:
    style = resolve_environment(move.peek("synchronizer.sync_style")) or "fixed"
    of_explorer = move.take("synchronizer.explorer_sync_interval")
    of_trainer = move.take("synchronizer.trainer_sync_interval")
    chosen = of_explorer if style == "dynamic_by_explorer" else of_trainer
    if chosen is not None:
        move.take("synchronizer.sync_interval")
        name = "explorer" if style == "dynamic_by_explorer" else "trainer"
        move.put("synchronizer.sync_interval", chosen, f"was synchronizer.{name}_sync_interval")
    if resolve_environment(move.peek("mode")) == "train":
        for name in ("sync_method", "sync_style", "sync_interval", "sync_offset"):
            move.leave_out(f"synchronizer.{name}", "mode train sends no weights anywhere", matters=False)
    elif move.peek("synchronizer.sync_method") is None:
        move.put("synchronizer.sync_method", "nccl", "Trinity-RFT's default; without GPUs: collective")
    if (offset := move.peek("synchronizer.sync_offset")) is not None and style != "fixed" and number(offset) == 0:
        move.take("synchronizer.sync_offset")

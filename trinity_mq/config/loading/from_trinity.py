"""Keys of Trinity-RFT's configuration that have another place or name here, for the errors about unknown keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "project": "a run has a name alone, `name`; put the project into it",
        "group": "a run has a name alone, `name`; put the group into it",
        "checkpoint_root_dir": "the run's folder is `run_dir`, runs/<name> by default, with its checkpoints in it",
        "checkpoint_job_dir": "the run's folder is `run_dir`, runs/<name> by default, with its checkpoints in it",
        "continue_from_checkpoint": "a run that was started before goes on; `trinity-mq run --fresh` trains anew",
        "cluster": "there is no cluster to describe: `trinity-mq run` starts all agents on this machine, `trinity-mq "
        "runner CONFIG` and the others one agent anywhere that reaches the broker",
        "data_processor": "the operators are `operator.operators`, a list of {name, args}",
        "service": "there is no service to start; an operator may ask any",
        "log": "the level is `monitor.log_level`, and logs are in the run's folder",
        "ray_namespace": "there is no Ray: the run's `name` keeps runs on a broker apart",
        "buffer.explorer_input": "its `taskset`, `tasksets` and `eval_tasksets` stand in `buffer` itself; "
        "default_workflow_type is a taskset's `workflow`, default_reward_fn_type its `reward_fn`",
        "buffer.train_batch_size": "a train step has what `buffer.batch_size` tasks with `algorithm.repeat_times` runs "
        "each give; `trainer.batches_per_step` joins batches, `algorithm.mini_batches` divides one",
        "buffer.trainer_input.experience_buffer.replay_buffer": "groups are replayed by `buffer.trainer_input.replay`",
        "explorer.runner_per_model": "the number of runners is `runner.num_runners`, with `runner.concurrency` slices "
        "each",
        "explorer.concurrent_mode": "it is `runner.concurrent_mode`",
        "explorer.max_inflight_batches": "it is `explorer.max_open_batches`; `synchronizer.pipeline_depth` says how "
        "far to run ahead",
        "explorer.env_vars": "the environment of runners is `runner.env`",
        "explorer.rollout_model.engine_type": "it is `explorer.rollout_model.engine`: transformers or vllm",
        "explorer.rollout_model.tensor_parallel_size": "an engine uses one device; take more engines with "
        "`explorer.rollout_model.engine_num`",
        "explorer.rollout_model.gpu_memory_utilization": "it is `explorer.rollout_model.vllm.gpu_memory_utilization`",
        "explorer.rollout_model.enforce_eager": "it is `explorer.rollout_model.vllm.enforce_eager`",
        "explorer.rollout_model.enable_openai_api": "every engine serves the OpenAI API",
        "explorer.rollout_model.seed": "it follows from the run's `seed`",
        "explorer.rollout_model.dtype": "it is `model.dtype`",
        "trainer.trainer_type": "there is one trainer, on PyTorch; leave it out",
        "trainer.trainer_strategy": "several processes share a step with `trainer.nproc` (FSDP2); leave it out",
        "trainer.total_steps": "it is `buffer.total_steps`",
        "trainer.grad_clip": "it is `algorithm.optimizer.clip_grad`",
        "trainer.save_hf_checkpoint": "it is `trainer.export`: every or last",
        "trainer.use_dynamic_bsz": "micro-batches are always filled up to `trainer.max_tokens_per_micro_batch`",
        "trainer.max_token_len_per_gpu": "it is `trainer.max_tokens_per_micro_batch`",
        "monitor.monitor_type": "metrics go to metrics.jsonl always, to TensorBoard with `monitor.tensorboard`, to "
        "wandb, mlflow and swanlab with `monitor.trackers`",
        "monitor.monitor_args": "keys and servers of services are their own environment variables; their settings "
        "are in `monitor.trackers`",
        "synchronizer.sync_method_type": "it is `synchronizer.sync_method`",
        "synchronizer.ray_namespace": "there is no Ray; leave it out",
        "model.custom_chat_template": "put it into the model's folder as chat_template.jinja",
        "model.chat_template_path": "put it into the model's folder as chat_template.jinja",
        "model.temperature": "it is `explorer.rollout_model.temperature`",
        "model.top_p": "it is `explorer.rollout_model.top_p`",
        "model.top_k": "it is a sampling parameter of tasks: `buffer.taskset.rollout_args.top_k`",
        "model.lora_configs": "it is `model.lora`",
        "model.critic_model_path": "the critic begins as the policy; leave it out",
        "algorithm.sample_strategy_args": "the share of experts is `buffer.trainer_input.expert_data_ratio`, the bound "
        "on age `synchronizer.max_staleness`",
    }
)
"""Advice for settings of Trinity-RFT that have another place here, by dotted key without list positions."""

OF_TASKSETS: Mapping[str, str] = MappingProxyType(
    {
        "default_workflow_type": "it is `workflow`",
        "default_reward_fn_type": "it is `reward_fn`",
        "workflow_key": "all tasks of a taskset run its `workflow`",
        "reward_fn_key": "all tasks of a taskset have its `reward_fn`",
        "task_selector": "it is `data_selector`",
        "ray_namespace": "there is no Ray; leave it out",
        "is_eval": "evaluation tasksets stand in `buffer.eval_tasksets`",
        "enable_progress_bar": "progress shows by itself; leave it out",
        "total_epochs": "it is `buffer.total_epochs`",
        "total_steps": "it is `buffer.total_steps`",
    }
)
"""Advice for settings of a taskset in Trinity-RFT."""


def trinity_key_advice(location: Sequence[int | str]) -> str | None:
    """Return the advice for a key of Trinity-RFT, None for any other key.

    Args:
        location: The key as the user wrote it, with list positions.
    """
    parts = [part for part in location if isinstance(part, str)]
    advice = KEYS.get(".".join(parts))
    if advice is None and len(parts) > 1 and "taskset" in parts[-2]:
        advice = OF_TASKSETS.get(parts[-1])
    return advice

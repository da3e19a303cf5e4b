"""The sections ``buffer`` and ``data_processor``: here tasksets are part of ``buffer``, the chain is part of
``operator``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config.buffer.selectors import SIMPLE
from trinity_mq.config.loading.from_trinity import OF_TASKSETS
from trinity_mq.trinity_rft.migration.model import sampling
from trinity_mq.trinity_rft.migration.move import LeftOut, SettingsTransfer
from trinity_mq.trinity_rft.migration.values import number, resolve_environment, whole

FILES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
"""Endings of file names that ``storage_type: file`` reads."""
SCHEMAS = {"sft": "sft", "sft_is": "sft", "sft_phi": "sft", "dpo": "dpo", "cpt": "cpt"}
"""Schema of the records of a training data source, by the algorithm that trains on them."""
UNUSED = {
    "enable_progress_bar": "progress shows by itself",
    "max_retry_times": "reading a file is not tried again",
    "max_retry_interval": "reading a file is not tried again",
    "capacity": "the broker holds untrained experiences, within `broker.ready_max_bytes`",
    "max_read_timeout": "`explorer.stall_timeout` bounds the wait",
    "index": "it follows from the place in the list",
    "is_eval": "it follows from the list that it is in",
    "ray_namespace": "there is no Ray",
    "wrap_in_ray": "there is no Ray",
    "tokenizer_path": "it is the model's",
    "batch_size": "it is `buffer.batch_size`",
}


def buffer(move: SettingsTransfer) -> None:
    """Move the sections."""
    mode = resolve_environment(move.peek("mode")) or "both"
    shared = sampling(move) if mode != "train" else {}
    _tasksets(move, shared)
    _trainer_input(move)
    move.move("trainer.total_steps", "buffer.total_steps")
    if "total_steps" in move.settings.get("buffer", {}):
        move.leave_out("buffer.total_steps", "trainer.total_steps decides", matters=False)
    _sizes(move, mode)
    for name, reason in UNUSED.items():
        move.leave_out(f"buffer.{name}", reason, matters=False)
    move.leave_out("buffer.cache_dir", "a run keeps all files in its folder", matters=False)
    _operators(move)


def _sizes(move: SettingsTransfer, mode: str) -> None:
    trained, batch = move.take("buffer.train_batch_size"), move.take("buffer.batch_size")
    if mode == "train":
        size = batch if trained is None else trained
        move.put("buffer.batch_size", 1 if size is None else size, "records of a train step; was train_batch_size")
        return
    tasks = 1 if batch is None else batch
    move.put("buffer.batch_size", tasks, *(["Trinity-RFT's default; here it is 32"] if batch is None else []))
    runs, experiences = whole(move.peek("algorithm.repeat_times")), whole(trained)
    if trained is None or experiences is None:
        return
    rolled_out = (whole(tasks) or 0) * (runs or 0)
    if not rolled_out:
        move.lost(LeftOut("buffer.train_batch_size", trained, "a train step has a whole batch", matters=True))
    elif experiences > rolled_out and experiences % rolled_out == 0:
        batches = experiences // rolled_out
        move.put("trainer.batches_per_step", batches, f"was buffer.train_batch_size {experiences}")
        interval = whole(move.take("synchronizer.sync_interval", 1)) or 1
        move.put("synchronizer.sync_interval", interval * batches, "in batches here, of which a step has several")
    elif experiences < rolled_out and rolled_out % experiences == 0:
        move.put("algorithm.mini_batches", rolled_out // experiences, f"was buffer.train_batch_size {experiences}")
    elif experiences != rolled_out:
        reason = f"a train step has the {rolled_out} experiences of a batch, whole batches or equal parts of one"
        move.lost(LeftOut("buffer.train_batch_size", trained, reason, matters=True))


def _tasksets(move: SettingsTransfer, shared: Mapping[str, Any]) -> None:
    there = "buffer.explorer_input."
    workflow = move.take(there + "default_workflow_type")
    eval_workflow = move.take(there + "default_eval_workflow_type") or workflow
    reward = move.take(there + "default_reward_fn_type")
    if taskset := move.take_mapping(there + "taskset"):
        item = move.item(taskset, ("buffer", "taskset"), there + "taskset")
        move.put("buffer.taskset", item.settings)
        _taskset(item, workflow, reward, shared, training=True)
    for name in ("tasksets", "eval_tasksets"):
        training = name == "tasksets"
        tasksets = []
        for number_, entry in enumerate(move.take_mappings(there + name)):
            item = move.item(entry, ("buffer", name, number_), f"{there}{name}.{number_}")
            tasksets.append(item.settings)
            _taskset(
                item, workflow if training else eval_workflow, reward, shared if training else {}, training=training
            )
        if tasksets:
            move.put(f"buffer.{name}", tasksets)


def _taskset(item: SettingsTransfer, workflow: Any, reward: Any, shared: Mapping[str, Any], *, training: bool) -> None:
    item.keep("name")
    _storage(item)
    for name in ("subset_name", "split"):
        item.keep(name)
    if training:
        _selector(item)
        item.leave_out("repeat_times", "it is `algorithm.repeat_times`", matters=False)
    else:
        item.leave_out("data_selector", "every task of an evaluation is run once, in order", matters=False)
        item.leave_out("task_selector", "every task of an evaluation is run once, in order", matters=False)
        item.keep("repeat_times")
    for name, value in (("prompt_key", "prompt"), ("response_key", "response")):
        if item.peek(f"format.{name}") is None:
            item.put(f"format.{name}", value, "Trinity-RFT's default")
        else:
            item.keep(f"format.{name}")
    item.keep("format.system_prompt")
    for name in ("chosen_key", "rejected_key", "messages_key", "tools_key", "prompt_type"):
        item.leave_out(f"format.{name}", "a task has a prompt and an answer", matters=False)
    for old, new, default in (
        ("default_workflow_type", "workflow", workflow),
        ("default_reward_fn_type", "reward_fn", reward),
    ):
        value = item.take(old)
        if (chosen := default if value is None else value) is not None:
            item.put(new, chosen)
    item.keep("workflow_args")
    item.keep("reward_fn_args")
    _rollout_args(item, shared)
    for name, reason in UNUSED.items():
        item.leave_out(name, reason, matters=False)
    for name in ("workflow_key", "reward_fn_key"):
        if not item.peek(f"format.{name}"):
            item.take(f"format.{name}")
        item.leave_out(f"format.{name}", OF_TASKSETS[name])
    item.give_up("no counterpart here")


def _storage(item: SettingsTransfer) -> None:
    kind, path = item.take("storage_type"), item.take("path")
    if kind == "sql":
        item.put("storage_type", "sql")
        item.put("query", item.settings.get("name") or "tasks", "the table; Trinity-RFT names it after the storage")
    elif Path(str(resolve_environment(path) or "")).suffix.lower() in FILES:
        item.put("storage_type", "file")
    else:
        item.put("storage_type", "huggingface", "a folder of a dataset or its name; `file` reads a single file")
    if path is not None:
        item.put("path", path)


def _selector(item: SettingsTransfer) -> None:
    old = item.take_mapping("task_selector")
    selector = item.take_mapping("data_selector") or old
    kind = selector.get("selector_type") or "sequential"
    if not selector:
        item.put("selector", "sequential", "Trinity-RFT's default; here it is shuffle")
    elif kind in SIMPLE and set(selector) <= {"selector_type"}:
        item.put("selector", kind)
    else:
        item.put("data_selector", {key: value for key, value in selector.items() if value not in ([], {}, None)})


def _rollout_args(item: SettingsTransfer, shared: Mapping[str, Any]) -> None:
    rollout_args = item.take_mapping("rollout_args")
    arguments = {
        key: value
        for key, value in rollout_args.items()
        if value is not None and key not in {"n", "logprobs"} and (key, number(value)) != ("top_k", -1.0)
    }
    if (runs := whole(rollout_args.get("n", 1))) != 1:
        item.lost(LeftOut("rollout_args.n", runs, "runs of a task are `repeat_times`", matters=True))
    if arguments := {**shared, **arguments}:
        item.put("rollout_args", arguments)


def _trainer_input(move: SettingsTransfer) -> None:
    there = "buffer.trainer_input."
    kind = str(resolve_environment(move.settings["algorithm"]["algorithm_type"]))
    mode = resolve_environment(move.peek("mode")) or "both"
    place: tuple[str, ...] = ("buffer", "trainer_input", "experience_buffer")
    if data := move.take_mapping(there + "experience_buffer"):
        item = move.item(data, place, there + "experience_buffer")
        if mode == "train":
            move.put(".".join(place), item.settings)
            _records(item, SCHEMAS.get(kind, "experience"))
        else:
            _stream(item)
            _replay(move, item)
    experts = move.item(move.take_mapping(there + "auxiliary_buffers"), (), there + "auxiliary_buffers")
    for name in experts.names():
        place = ("buffer", "trainer_input", "auxiliary_buffers", name)
        item = move.item(experts.take_mapping(name), place, f"{there}auxiliary_buffers.{name}")
        move.put(".".join(place), item.settings)
        _records(item, "sft")


def _stream(item: SettingsTransfer) -> None:
    for name in ("name", "storage_type", "path", "schema_type", "split", "subset_name"):
        item.leave_out(name, "rollouts reach the trainer through the broker, which keeps them", matters=False)
    for name, reason in UNUSED.items():
        item.leave_out(name, reason, matters=False)


def _replay(move: SettingsTransfer, item: SettingsTransfer) -> None:
    """Move a priority queue. In Trinity-RFT it returns used experiences if no newer experiences are available."""
    replay_buffer = item.take_mapping("replay_buffer")
    if resolve_environment(replay_buffer.get("enable")):
        here, arguments = "buffer.trainer_input.replay.", replay_buffer.get("priority_fn_args") or {}
        move.put(
            here + "share", 0.5,
            "was replay_buffer.enable: half of a step; Trinity-RFT's depends on how fast rollouts come",
        )  # fmt: skip
        for name, new in (("decay", "decay"), ("sigma", "sigma"), ("use_count_limit", "max_uses")):
            value = arguments.get(name)
            if value is not None and (new != "max_uses" or (whole(value) or 0) > 0):
                move.put(here + new, value, f"was replay_buffer.priority_fn_args.{name}")
    item.give_up("rollouts reach the trainer through the broker")


def _records(item: SettingsTransfer, schema: str) -> None:
    item.keep("name")
    schema_type = item.take("schema_type") or schema
    _storage(item)
    if schema_type == "experience" and item.settings["storage_type"] != "sql":
        item.put(
            "storage_type", "file",
            "a folder of .tmqx files; `trinity-mq convert-experiences` makes one of Trinity-RFT's recordings",
        )  # fmt: skip
    item.put("schema_type", schema_type, *([] if schema_type != schema else ["follows from the algorithm"]))
    for name in ("subset_name", "split"):
        item.keep(name)
    selector = item.take_mapping("data_selector")
    item.put("selector", "shuffle" if selector.get("selector_type") in {"shuffle", "random"} else "sequential")
    if schema_type != "experience":
        _record_format(item)
    item.take("replay_buffer")
    for name, reason in UNUSED.items():
        item.leave_out(name, reason, matters=False)
    item.give_up("no counterpart here")


def _record_format(item: SettingsTransfer) -> None:
    kind = resolve_environment(item.take("format.prompt_type")) or "messages"
    item.put("format.prompt_type", kind)
    required_keys: Sequence[tuple[str, str]] = (
        (("messages_key", "message"),)
        if kind == "messages"
        else (("prompt_key", "prompt"),)
        if item.settings["schema_type"] != "sft"
        else (("prompt_key", "prompt"), ("response_key", "response"))
    )
    for name, default in required_keys:
        if item.peek(f"format.{name}") is None:
            item.put(f"format.{name}", default, "Trinity-RFT's default")
    for name in (
        "prompt_key", "response_key", "messages_key", "system_prompt", "system_prompt_key", "tools_key", "chosen_key",
        "rejected_key", "enable_concatenated_multi_turn",
    ):  # fmt: skip
        item.keep(f"format.{name}")
    item.leave_out("format.chat_template", "it is the model's: chat_template.jinja in its folder")


def _operators(move: SettingsTransfer) -> None:
    there = "data_processor.experience_pipeline."
    operators = [
        {key: value for key, value in operator.items() if value is not None}
        for operator in move.take_mappings(there + "operators")
    ]
    if operators:
        move.put("operator.operators", operators, "was data_processor.experience_pipeline.operators")
    for name in ("save_input", "input_save_path"):
        move.leave_out(there + name, "`trinity-mq inspect` reads what a run sampled", matters=False)
    for key in [key for key, _ in move.rest() if key.startswith("data_processor.task_pipeline.")]:
        move.leave_out(key, "tasks are prepared before the run: write them to a file")

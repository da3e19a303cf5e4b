"""Rules of the table of names for the data: tasksets and the chain of operators have other sections here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config.buffer.selectors import SIMPLE
from trinity_mq.config.trinity_names import TASKSET, trinity_key_advice, trinity_names
from trinity_mq.trinity_rft.migration.algorithm import replay
from trinity_mq.trinity_rft.migration.rules import sampling
from trinity_mq.trinity_rft.migration.transfer import LeftOut, SettingsTransfer, number, resolve_environment, whole

FILES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
"""Endings of file names that ``storage_type: file`` reads."""
SCHEMAS = {"sft": "sft", "sft_is": "sft", "sft_phi": "sft", "dpo": "dpo", "cpt": "cpt"}
"""Schema of the records of a training data source, by the algorithm that trains on them."""


def batch_sizes(move: SettingsTransfer) -> None:
    """Move the sizes of a batch and of a train step."""
    trained, batch = move.take("buffer.train_batch_size"), move.take("buffer.batch_size")
    if move.has("buffer.total_steps"):
        move.leave_out("buffer.total_steps", "trainer.total_steps decides", matters=False)
    _leave_out_unused(move, "buffer.")
    if move.resolved("mode") == "train":
        size = batch if trained is None else trained
        move.put("buffer.batch_size", 1 if size is None else size, "records of a train step; was train_batch_size")
        return
    tasks = 1 if batch is None else batch
    move.put("buffer.batch_size", tasks, *(["Trinity-RFT's default; here it is 32"] if batch is None else []))
    runs, experiences = whole(move.peek("algorithm.repeat_times")), whole(trained)
    if experiences is None:
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


def tasksets(move: SettingsTransfer) -> None:
    """Move the tasksets, with the sampling parameters of the model."""
    shared = sampling(move) if move.resolved("mode") != "train" else {}
    there = "buffer.explorer_input."
    workflow = move.take(there + "default_workflow_type")
    eval_workflow = move.take(there + "default_eval_workflow_type") or workflow
    reward = move.take(there + "default_reward_fn_type")
    if taskset := move.take_mapping(there + "taskset"):
        item = move.item(taskset, ("buffer", "taskset"), there + "taskset")
        move.put("buffer.taskset", item.settings)
        _taskset(item, workflow, reward, shared, training=True)
    for name, default_workflow, arguments in (
        ("tasksets", workflow, shared),
        ("eval_tasksets", eval_workflow, {}),
    ):
        migrated = []
        for number_, entry in enumerate(move.take_mappings(there + name)):
            item = move.item(entry, ("buffer", name, number_), f"{there}{name}.{number_}")
            migrated.append(item.settings)
            _taskset(item, default_workflow, reward, arguments, training=name == "tasksets")
        if migrated:
            move.put(f"buffer.{name}", migrated)


def _taskset(item: SettingsTransfer, workflow: Any, reward: Any, shared: Mapping[str, Any], *, training: bool) -> None:
    item.keep("name")
    _storage(item)
    item.keep("subset_name", "split")
    if training:
        _selector(item)
        item.leave_out("repeat_times", "it is `algorithm.repeat_times`", matters=False)
    else:
        for name in ("data_selector", "task_selector"):
            item.leave_out(name, "every task of an evaluation is run once, in order", matters=False)
        item.keep("repeat_times")
    item.keep_or_default("format.prompt_key", "prompt")
    item.keep_or_default("format.response_key", "response")
    item.keep("format.system_prompt")
    for name in ("chosen_key", "rejected_key", "messages_key", "tools_key", "prompt_type"):
        item.leave_out(f"format.{name}", "a task has a prompt and an answer", matters=False)
    for old, new, default in (
        ("default_workflow_type", "workflow", workflow),
        ("default_reward_fn_type", "reward_fn", reward),
    ):
        if (chosen := item.take(old, default)) is not None:
            item.put(new, chosen)
    item.keep("workflow_args", "reward_fn_args")
    _rollout_args(item, shared)
    for name in ("workflow_key", "reward_fn_key"):
        if not item.peek(f"format.{name}"):
            item.take(f"format.{name}")
        item.leave_out(f"format.{name}", trinity_key_advice(["taskset", name]) or "")
    _give_up(item, "no counterpart here")


def _leave_out_unused(move: SettingsTransfer, section: str = "") -> None:
    """Leave out the settings of a data source that a run here does not need."""
    for row in trinity_names():
        if row.old.startswith(TASKSET) and row.comment:
            move.leave_out(section + row.old.removeprefix(TASKSET), row.comment, matters=False)


def _give_up(item: SettingsTransfer, reason: str) -> None:
    """Leave out the remaining settings of a data source."""
    _leave_out_unused(item)
    item.give_up(reason)


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


def trainer_input(move: SettingsTransfer) -> None:
    """Move the data that the trainer reads, and the replay of experiences."""
    there = "buffer.trainer_input."
    kind = str(resolve_environment(move.settings["algorithm"]["algorithm_type"]))
    place: tuple[str, ...] = ("buffer", "trainer_input", "experience_buffer")
    if data := move.take_mapping(there + "experience_buffer"):
        item = move.item(data, place, there + "experience_buffer")
        if move.resolved("mode") == "train":
            move.put(".".join(place), item.settings)
            _records(item, SCHEMAS.get(kind, "experience"))
        else:
            for name in ("name", "storage_type", "path", "schema_type", "split", "subset_name"):
                item.leave_out(name, "rollouts reach the trainer through the broker, which keeps them", matters=False)
            replay(move, item.take_mapping("replay_buffer"))
            _give_up(item, "rollouts reach the trainer through the broker")
    experts = move.item(move.take_mapping(there + "auxiliary_buffers"), (), there + "auxiliary_buffers")
    for name in experts.names():
        place = ("buffer", "trainer_input", "auxiliary_buffers", name)
        item = move.item(experts.take_mapping(name), place, f"{there}auxiliary_buffers.{name}")
        move.put(".".join(place), item.settings)
        _records(item, "sft")


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
    item.keep("subset_name", "split")
    selector = item.take_mapping("data_selector")
    item.put("selector", "shuffle" if selector.get("selector_type") in {"shuffle", "random"} else "sequential")
    if schema_type != "experience":
        _record_format(item)
    item.take("replay_buffer")
    _give_up(item, "no counterpart here")


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
        item.keep_or_default(f"format.{name}", default)
    for name in (
        "prompt_key", "response_key", "messages_key", "system_prompt", "system_prompt_key", "tools_key", "chosen_key",
        "rejected_key", "enable_concatenated_multi_turn",
    ):  # fmt: skip
        item.keep(f"format.{name}")
    item.leave_out("format.chat_template", "it is the model's: chat_template.jinja in its folder")


def operators(move: SettingsTransfer) -> None:
    """Move the chain of operators."""
    old = "data_processor.experience_pipeline.operators"
    chain = [
        {key: value for key, value in operator.items() if value is not None} for operator in move.take_mappings(old)
    ]
    if chain:
        move.put("operator.operators", chain, f"was {old}")

"""Rules of the table of names for the data: tasksets and the chain of operators, whose sections differ here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trinity_mq.config.buffer.selectors import SIMPLE
from trinity_mq.config.trinity_names import TASKSET, table_rows, trinity_names
from trinity_mq.trinity_rft.migration.algorithm import algorithm_type, replay
from trinity_mq.trinity_rft.migration.rules import UNSET_TEMPLATES, sampling
from trinity_mq.trinity_rft.migration.transfer import (
    LeftOut,
    SettingsTransfer,
    number,
    resolve_environment,
    training_tasksets,
    value_at,
    whole,
)

FILES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
"""Endings of file names that ``storage_type: file`` reads."""
SCHEMAS = {"sft": "sft", "sft_is": "sft", "sft_phi": "sft", "dpo": "dpo", "cpt": "cpt"}
"""Schema of the records of a training data source, by the algorithm that trains on them."""
MIXING = frozenset({"mix", "mix_chord"})
"""Algorithms whose train steps have expert answers in addition to rollouts."""
EXPERT_RATIO = 0.5
"""Trinity-RFT's default share of expert answers in a train step."""
STEP_WISE = frozenset({"multi_step_grpo", "gigpo"})
"""Algorithms of workflows whose runs have an experience for each step."""
ONE_ANSWER = frozenset(
    {
        "None",
        "on_policy_distill_workflow",
        "rubric_judge_workflow",
        "rubric_judge_openai_workflow",
        "tool_call_workflow",
    }
    | {
        f"{prefix}{name}_workflow"
        for prefix in ("", "async_")
        for name in ("simple", "math", "math_boxed", "math_eval", "math_rm", "math_ruler", "on_policy_distill_math")
    }
)
"""Workflows of Trinity-RFT whose runs have one experience each. ``None``: its default workflow."""
OLD_KEYS = {"workflow": "default_workflow_type", "reward": "default_reward_fn_type"}
"""Trinity-RFT's key for the name of a workflow or reward, by kind; the same in a taskset and in :data:`DEFAULTS`."""
NEW_KEYS = {"workflow": "workflow", "reward": "reward_fn"}
"""Our key of a taskset for the name of a workflow or reward, by kind."""
DEFAULTS = "buffer.explorer_input."
"""Prefix of the keys of Trinity-RFT's section with the defaults of all tasksets."""
TASK_PIPELINE = "data_processor.task_pipeline"
PACKS = "cod."
"""Prefix of the keys of Trinity-RFT's section for Connect the Dots, whose runs solve packs of tasks."""
PACK_METHOD = "iterative_hint_e2e"
"""The only supported method of Connect the Dots: after each task the model writes hints for the next task."""
PACK_WORKFLOWS = ("cod_grid_navigation_workflow",)
"""Supported workflows that solve packs of tasks."""
PACK_ARGUMENTS = {f"len_{name}_penalty": f"hint_len_{name}_penalty" for name in ("min", "zero", "max")}
"""Our names of workflow arguments that concern hints, by Trinity-RFT's name; other names are equal."""
DESCRIPTIONS = [
    f"data_processor.{pipeline}_pipeline.{key}"
    for pipeline in ("task", "experience")
    for key in ("dj_process_desc", "dj_config_path")
]
"""Keys up to Trinity-RFT 0.2 that describe the processing of data by Data-Juicer."""
DATA_JUICER = "data_juicer"
"""Operator that sends a batch to a Data-Juicer server."""
PADDING = "multi_step_padding"
"""Operator that gives the runs of tasks, which may have several steps, the same number of experiences."""


@dataclass(frozen=True, slots=True)
class RegisteredName:
    """A registered name of Trinity-RFT, a row of the table."""

    kind: str
    """``workflow`` or ``reward``."""
    name: str
    new_name: str
    """Name here. Empty: the same."""
    refused: str
    """``yes`` if nothing here replaces it, otherwise empty."""
    text: str
    """Reason for a new name or a refusal; otherwise the requirements of the workflow or reward on this machine."""


@cache
def registered_names() -> Mapping[tuple[str, str], RegisteredName]:
    """Return the rows of the table by kind and name."""
    rows = table_rows("trinity_mq.trinity_rft", "registered_names.csv", RegisteredName)
    return {(row.kind, row.name): row for row in rows}


def batch_sizes(move: SettingsTransfer) -> None:
    """Move the sizes of a batch and of a train step."""
    trained, batch = move.take("buffer.train_batch_size"), move.take("buffer.batch_size")
    if move.has("buffer.total_steps"):
        move.leave_out("buffer.total_steps", "trainer.total_steps decides", matters=False)
    _leave_out_unused(move, "buffer.")
    mode, experiences = move.resolved("mode"), whole(trained) or 0
    if mode == "train":
        size = trained if experiences or batch is None else batch
        move.put(
            "buffer.batch_size", size or 1, "records of a train step; was train_batch_size",
            origin="buffer.train_batch_size",
        )  # fmt: skip
        return
    tasks = 1 if batch is None else batch
    comments = ["Trinity-RFT's default; here it is 32"] if batch is None else []
    if (size := whole(move.peek(f"{PACKS}task_pack_size"))) and (records := whole(tasks)):
        tasks = max(1, records // size)
        comments = [f"was {records} records in packs of {size}; a record begins a pack here, so an epoch is longer"]
    move.put("buffer.batch_size", tasks, *comments)
    runs = whole(value_at(move.settings, "algorithm.repeat_times") or move.peek("algorithm.repeat_times"))
    rolled_out = (whole(tasks) or 0) * (runs or 0)
    if experiences > 0 and rolled_out and mode not in ("bench", "explore"):
        _step_size(move, experiences, rolled_out)


def _step_size(move: SettingsTransfer, experiences: int, rolled_out: int) -> None:
    """Move the number of experiences of a train step.

    Args:
        move: The transfer.
        experiences: ``train_batch_size``.
        rolled_out: Number of runs of a batch.
    """
    comment = f"was buffer.train_batch_size {experiences}"
    shown = experiences
    if algorithm_type(move) in MIXING:
        ratio = number(value_at(move.settings, "buffer.trainer_input.expert_data_ratio"))
        share = ratio if ratio is not None and 0 <= ratio <= 1 else EXPERT_RATIO
        experiences -= math.ceil(experiences * share)
    if experiences == rolled_out:
        return
    if not _answers_once(move):
        reason = f"a step has all experiences of a batch of {rolled_out} runs, which may be several for each run"
        move.lost("buffer.train_batch_size", shown, reason, matters=False)
    elif experiences > rolled_out and experiences % rolled_out == 0:
        batches = experiences // rolled_out
        move.put("trainer.batches_per_step", batches, comment, origin="buffer.train_batch_size")
        interval = whole(move.take("synchronizer.sync_interval", 1)) or 1
        move.put("synchronizer.sync_interval", interval * batches, "in batches here, of which a step has several")
    elif 0 < experiences < rolled_out and rolled_out % experiences == 0:
        move.put("algorithm.mini_batches", rolled_out // experiences, comment, origin="buffer.train_batch_size")
    else:
        reason = f"a train step has the {rolled_out} experiences of a batch, whole batches or equal parts of one"
        move.lost("buffer.train_batch_size", shown, reason)


def _answers_once(move: SettingsTransfer) -> bool:
    """Return whether each run of the training tasks has one experience, as far as the names tell."""
    if algorithm_type(move) in STEP_WISE:
        return False
    return all(str(taskset.get("workflow")) in ONE_ANSWER for taskset in training_tasksets(move.settings))


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


def packs(move: SettingsTransfer) -> None:
    """Move the settings of Connect the Dots into the workflow arguments of the tasksets."""
    section = move.take_mapping("cod")
    if not section:
        return
    old = move.item(section, (), "cod")
    strategy = old.take("packing_strategy", "cod")
    if resolve_environment(strategy) != "cod":
        old.refuse("packing_strategy", strategy, "packs of one task that is repeated (ralph) are missing")
    arguments = move.item(old.take_mapping("cod_workflow_args"), (), f"{PACKS}cod_workflow_args")
    methods = arguments.take("activated_cod_methods", [PACK_METHOD])
    if methods != [PACK_METHOD]:
        arguments.refuse("activated_cod_methods", methods, f"the method of packs is {PACK_METHOD}")
    for name in ("cod_log_interval", "log_dir", "exp_name", "reuse_workflow_instance", "pad_tasks_to_full_pack"):
        arguments.leave_out(name, "every record is a whole pack, and a run keeps its experiences", matters=False)
    if resolve_environment(arguments.take("inject_pack_seed", False)) is not True:
        reason = "the tasks of a pack always share a map here"
        arguments.lost("inject_pack_seed", False, reason)
    arguments.leave_out("stable_pack_seed", "the map follows from the record", matters=False)
    kept = {
        PACK_ARGUMENTS.get(name, name): value
        for name in ("hint_example", "max_response_tokens_restraint", "hint_penalty_coef", *PACK_ARGUMENTS)
        if (value := arguments.take(name)) is not None
    }
    arguments.give_up()
    for key, tasksets in (
        ("task_pack_size", training_tasksets(move.settings)),
        ("eval_task_pack_size", value_at(move.settings, "buffer.eval_tasksets") or ()),
    ):
        size = old.take(key)
        for taskset in tasksets:
            _pack(move, taskset, {**({} if size is None else {"pack_size": size}), **kept})
    old.give_up()


def _pack(move: SettingsTransfer, taskset: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    """Give a taskset the arguments of its packs, or refuse its workflow. A taskset whose workflow was refused before
    stays as it is.
    """
    workflow = taskset.get("workflow")
    if workflow in PACK_WORKFLOWS:
        if isinstance(kept := taskset.get("workflow_args") or {}, Mapping):
            taskset["workflow_args"] = {**kept, **arguments}
    elif workflow is not None:
        world = f"packs of {workflow} are missing: packs of tasks here are those of {', '.join(PACK_WORKFLOWS)}"
        move.refuse("cod", workflow, world)


def _taskset(item: SettingsTransfer, workflow: Any, reward: Any, shared: Mapping[str, Any], *, training: bool) -> None:
    item.keep("name")
    _storage(item)
    if item.settings["storage_type"] != "sql" and not item.has("path"):
        item.put("path", "${oc.env:TRINITY_TASKSET_PATH}", "missing; scripts of Trinity-RFT fill it in")
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
    item.keep(
        "format.system_prompt", "format.system_prompt_key", "format.reply_prefix", "format.enable_thinking"
    )  # fmt: skip
    _refuse_images(item)
    item.leave_out("format.chat_template", "tasks have the chat template of the model", matters=False)
    for name in ("chosen_key", "rejected_key", "messages_key", "tools_key", "prompt_type"):
        item.leave_out(f"format.{name}", "a task has a prompt and an answer", matters=False)
    _put_name(item, "workflow", workflow)
    _put_name(item, "reward", reward)
    judge = item.peek("workflow_args.reward_fn_type")
    row = registered_names().get(("reward", str(judge)))
    if row is not None and row.refused:
        item.refuse("workflow_args.reward_fn_type", judge, row.text)
    item.keep("workflow_args", "reward_fn_args")
    _rollout_args(item, shared)
    for name, allowed in (("workflow_key", "allowed_workflows"), ("reward_fn_key", "allowed_reward_fns")):
        if key := item.peek(f"format.{name}"):
            reason = (
                f"records may name only what `{allowed}` of the taskset lists: write the names of your records there"
            )
            item.leave_out(f"format.{name}", reason)
            item.put(f"format.{name}", key)
        item.take(f"format.{name}")
    _give_up(item)


def _put_name(item: SettingsTransfer, kind: str, default: str | None) -> None:
    """Set the workflow or the reward of a taskset by its name here, with a note of its needs, or refuse it.

    Args:
        item: The transfer of the taskset.
        kind: ``workflow`` or ``reward``.
        default: The name if the taskset has none. None: no name is set.
    """
    old = OLD_KEYS[kind]
    taskset_name = item.take(old)
    value, key = (default, f"{DEFAULTS}{old}") if taskset_name is None else (taskset_name, item.old_key(old))
    if value is None:
        return
    row = registered_names().get((kind, str(resolve_environment(value))))
    if row is None:
        item.put(NEW_KEYS[kind], value)
    elif row.refused:
        item.record(LeftOut(key, value, row.text, matters=True, is_purpose=True))
    elif row.new_name:
        item.put(NEW_KEYS[kind], row.new_name, f"was {value}: {row.text}")
    else:
        item.put(NEW_KEYS[kind], value, row.text)
        item.note(key, value, row.text)


def _leave_out_unused(move: SettingsTransfer, section: str = "") -> None:
    """Leave out the settings of a data source that a run here does not need."""
    for row in trinity_names():
        if row.old.startswith(TASKSET) and row.comment:
            move.leave_out(section + row.old.removeprefix(TASKSET), row.comment, matters=False)


def _give_up(item: SettingsTransfer) -> None:
    """Leave out the remaining settings of a data source."""
    _leave_out_unused(item)
    item.give_up()


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
    elif isinstance(kind, str) and kind in SIMPLE and set(selector) == {"selector_type"}:
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
        item.lost("rollout_args.n", runs, "runs of a task are `repeat_times`")
    if arguments := {**shared, **arguments}:
        item.put("rollout_args", arguments)


def trainer_input(move: SettingsTransfer) -> None:
    """Move the settings of the data that the trainer reads: in mode train its records, in other modes the replay of
    experiences, and in all modes expert answers.
    """
    there = "buffer.trainer_input."
    kind = algorithm_type(move)
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
            _give_up(item)
    buffers = dict(move.take_mapping(there + "auxiliary_buffers"))
    if kind in MIXING and (warmup := move.take_mapping(there + "sft_warmup_dataset")):
        buffers.setdefault("sft_dataset", warmup)  # its name until Trinity-RFT 0.3
    experts = move.item(buffers, (), there + "auxiliary_buffers")
    migrated = {}
    for name in experts.names():
        place = ("buffer", "trainer_input", "auxiliary_buffers", name)
        item = move.item(experts.take_mapping(name), place, f"{there}auxiliary_buffers.{name}")
        migrated[name] = item.settings
        item.leave_out("total_epochs", "experts are read again from the beginning after the last", matters=False)
        _records(item, "sft")
    if migrated:
        move.put("buffer.trainer_input.auxiliary_buffers", migrated)


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
    item.put("selector", "shuffle" if selector.get("selector_type") in ("shuffle", "random") else "sequential")
    if schema_type != "experience":
        _record_format(item)
    item.take("replay_buffer")
    _give_up(item)


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
    if (template := resolve_environment(item.take("format.chat_template"))) not in UNSET_TEMPLATES:
        item.put("format.chat_template", template)
    item.keep("format.enable_thinking")
    _refuse_images(item)


def _refuse_images(item: SettingsTransfer) -> None:
    for name in ("image_key", "video_key"):
        if (value := item.peek(f"format.{name}")) is not None:
            item.refuse(f"format.{name}", value, "images and videos: engines and trainer read text only")


def operators(move: SettingsTransfer) -> None:
    """Move the chain of operators without :data:`PADDING`, and refuse Data-Juicer, which prepares tasks and experiences
    in Trinity-RFT.
    """
    old = "data_processor.experience_pipeline.operators"
    prepared = move.take_mappings(f"{TASK_PIPELINE}.operators")
    described = [key for key in DESCRIPTIONS if move.peek(key)]
    for key in described:
        move.refuse(key, move.peek(key), "tasks and experiences are not prepared by Data-Juicer")
    if prepared and not described:
        names = ", ".join(str(_name(operator)) for operator in prepared)
        move.refuse(
            f"{TASK_PIPELINE}.operators", names,
            "tasks are not prepared by Data-Juicer; run it yourself, and name the file that it writes as the taskset",
        )  # fmt: skip
    chain = [
        {key: value for key, value in operator.items() if value is not None} for operator in move.take_mappings(old)
    ]
    if any(_name(operator) == DATA_JUICER for operator in chain):
        move.refuse(
            old, DATA_JUICER, "experiences are not sent to a Data-Juicer server; write an operator that asks it"
        )
    if any(_name(operator) == PADDING for operator in chain):
        chain = [operator for operator in chain if _name(operator) != PADDING]
        move.lost(old, PADDING, "a batch counts tasks: runs may differ in steps", matters=False)
    if chain:
        move.put("operator.operators", chain, f"was {old}", origin=old)
    for section in (TASK_PIPELINE, "service.data_juicer"):
        for key in [key for key, _ in move.rest() if key.startswith(f"{section}.")]:
            move.leave_out(key, "no Data-Juicer takes part", matters=False)


def _name(operator: Any) -> Any:
    return operator.get("name") if isinstance(operator, Mapping) else operator

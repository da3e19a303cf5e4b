"""Rules of the table of names for settings that depend on one another: names, the model, agents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_mq.config.agents import ExplorerConfig
from trinity_mq.trinity_rft.migration.transfer import (
    LeftOut,
    SettingsTransfer,
    number,
    resolve_environment,
    whole,
)

ENGINE = "explorer.rollout_model."
"""Section of the rollout engine."""
THINKING = "model.chat_template_kwargs.enable_thinking"
MODES = {"both": "both", "colocate": "both", "train": "train", "explore": "explore", "bench": "bench"}
"""Modes of Trinity-RFT, and the corresponding modes here."""
LENGTHS = ("max_model_len", "max_prompt_tokens", "max_response_tokens")
"""Length limits: the total, the prompt and the response."""
TIMEOUT = 1800
"""Trinity-RFT's default of ``max_timeout``, in seconds."""
SWITCHES = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "enable_auto_tool_choice": False}
"""Switches of vLLM's server that have no setting here, with their defaults."""
OPTIONS = ("tool_call_parser", "reasoning_parser")
"""Options of vLLM's server that have no setting here."""
API_JUDGE = "rubric_judge_openai_workflow"
"""Workflow whose judge is a service; here such a judge is an ordinary auxiliary model."""
OF_MACHINES = ("micro_batch_size", "use_dynamic_bsz", "offload", "sequence_parallel", "balance_batch", "max_token_len")
"""Parts of key names in veRL's own configuration that affect how a step is distributed, not its result."""


def names(move: SettingsTransfer) -> None:
    """Move the name and the folder of the run."""
    old_name = move.take("name") or "rft"
    name = slug(str(resolve_environment(old_name) or "run"))
    move.put("name", name, *([f"was {old_name}"] if name != old_name else []))
    root, exact = move.take("checkpoint_root_dir"), move.take("checkpoint_job_dir")
    if exact or root:
        folders = (root, move.peek("project"), move.peek("group"), old_name)
        place = exact or "/".join(str(part).rstrip("/") for part in folders if part)
        move.put("run_dir", place, "where Trinity-RFT has its checkpoints; without it: runs/<name>")


def slug(text: str) -> str:
    """Return a valid run name made from ``text``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "run"


def mode(move: SettingsTransfer) -> None:
    """Move the mode."""
    old_mode = move.take("mode")
    new_mode = MODES.get(str(resolve_environment(old_mode))) if old_mode is not None else None
    if new_mode is not None:
        comments = [f"was {old_mode}: trainer and engines may share a GPU"] if new_mode != old_mode else []
        move.put("mode", new_mode, *comments)
    elif old_mode is not None:
        reason = f"modes are {', '.join(sorted(set(MODES.values())))}"
        move.lost(LeftOut("mode", old_mode, reason, matters=True))


def model(move: SettingsTransfer) -> None:
    """Move the length limits, and drop the kinds of models that are not enabled."""
    _lengths(move, "model.")
    top_p = move.settings.get("explorer", {}).get("rollout_model", {}).get("top_p")
    if (number(top_p) or 1.0) < 1:
        _allow_truncated_sampling(move)
    for kind in ("tinker", "external_model"):
        if not move.peek(f"model.{kind}.enable"):
            move.take(f"model.{kind}")


def thinking(move: SettingsTransfer) -> None:
    """Move the switch of thinking. Trinity-RFT switches it off by default; here the chat template decides."""
    value = move.take(ENGINE + "enable_thinking")
    if move.resolved("mode") == "train":
        return
    path = move.peek("model.model_path") or move.settings.get("model", {}).get("model_path")
    model_name = str(resolve_environment(path)).lower()
    if value is not None:
        move.put(THINKING, value, "was explorer.rollout_model.enable_thinking")
    elif "qwen3" in model_name and "thinking" not in model_name:
        move.put(THINKING, False, "Trinity-RFT's default; here the chat template decides, and Qwen3's thinks")


def sampling(move: SettingsTransfer) -> dict[str, Any]:
    """Return the sampling parameters of the model that belong to each taskset here."""
    parameters = {}
    for name in ("top_k", "repetition_penalty"):
        engine_value, model_value = move.take(ENGINE + name), move.take(f"model.{name}")
        if (value := model_value if engine_value is None else engine_value) is not None:
            parameters[name] = value
            _allow_truncated_sampling(move)
    return parameters


def _allow_truncated_sampling(move: SettingsTransfer) -> None:
    if not move.has("algorithm.allow_truncated_sampling"):
        move.put(
            "algorithm.allow_truncated_sampling", True,
            "training rollouts are sampled with top_p, top_k or a penalty: their logprobs are not the policy's. "
            "Trinity-RFT trains on them without a warning; better sample without them",
        )  # fmt: skip


def _lengths(move: SettingsTransfer, there: str) -> None:
    """Move the length limits, and fill in the limits that Trinity-RFT would fill in."""
    limits = {name: value for name in LENGTHS if (value := move.take(there + name)) is not None}
    numbers = {name: whole_value for name, value in limits.items() if (whole_value := whole(value)) is not None}
    comments: dict[str, str] = {}
    if len(numbers) == len(limits) and limits:  # otherwise a limit is a variable that is not set on this machine
        filled, comments = _filled_limits(numbers)
        limits |= {name: value for name, value in filled.items() if value != numbers.get(name)}
    for name in LENGTHS:
        if name in limits:
            move.put(f"model.{name}", limits[name], *([comments[name]] if name in comments else []))


def _filled_limits(limits: Mapping[str, int]) -> tuple[dict[str, int], dict[str, str]]:
    """Return all three limits, computed from the given ones, and comments on the computed limits."""
    total, prompt, response = (limits.get(name) for name in LENGTHS)
    comments = {}
    if total is None:
        if prompt is None or response is None:
            return dict(limits), {}
        total, comments["max_model_len"] = prompt + response, "prompt and response together"
    elif prompt is None and response is None:
        prompt = total // 2
        comments |= dict.fromkeys(LENGTHS[1:], "half of max_model_len, as Trinity-RFT fills it in")
    if prompt is None:
        prompt = total - (response or 0)
        comments.setdefault("max_prompt_tokens", "what max_response_tokens leaves of max_model_len")
    if response is None:
        response = total - prompt
        comments["max_response_tokens"] = "what max_prompt_tokens leaves of max_model_len"
    if prompt + response > total:
        comments["max_prompt_tokens"] = f"was {prompt}, which is over max_model_len with max_response_tokens"
        prompt = total - response
    return dict(zip(LENGTHS, (total, prompt, response), strict=True)), comments


def lora(move: SettingsTransfer) -> None:
    """Move the first adapter; a run here trains one adapter."""
    adapters = move.take_mappings("model.lora_configs")
    if not adapters:
        return
    first, *other_adapters = adapters
    item = move.item(first, ("model", "lora"), "model.lora_configs.0")
    move.put("model.lora", item.settings)
    for old, new in (("lora_rank", "r"), ("lora_alpha", "alpha")):
        value = item.take(old)
        comment = f"was model.lora_configs[0].{old}" if value is not None else "Trinity-RFT's default"
        item.put(new, 32 if value is None else value, comment)
    item.keep("target_modules")
    for name in ("name", "base_model_name", "lora_dtype", "is_dummy"):
        item.leave_out(name, "it follows from the model", matters=False)
    item.leave_out("path", "a run begins with fresh adapters; merge yours into the model first")
    item.give_up("no counterpart here")
    for number_, adapter in enumerate(other_adapters, 1):
        move.lost(LeftOut(f"model.lora_configs.{number_}", adapter, "a run trains one adapter", matters=True))


def explorer(move: SettingsTransfer) -> None:
    """Move the runners and the kind of the engine. Drop the section in mode train."""
    if move.resolved("mode") == "train":
        move.take("explorer")
        return
    if resolve_environment(move.take("explorer.bench_on_latest_checkpoint")) and move.resolved("mode") == "bench":
        move.put("bench.checkpoints", "latest", "was explorer.bench_on_latest_checkpoint")
    engines = whole(move.peek(ENGINE + "engine_num", 1)) or 1
    for old, factor in (("explorer.runner_num", 1), ("explorer.runner_per_model", engines)):
        if (runners := whole(move.take(old))) is not None:
            move.put(
                "runner.concurrency", max(1, -(-runners * factor // 2)),
                f"was {old} {runners}: tasks at a time, in each of the two processes of runner.num_runners",
            )  # fmt: skip
    move.move("explorer.concurrent_mode", "runner.concurrent_mode")
    if not move.has("runner.concurrent_mode"):
        move.put("runner.concurrent_mode", "sequential", "Trinity-RFT's default; `asynchronous` is faster")
    if variables := move.take_mapping("explorer.env_vars"):
        move.put("runner.env", {str(key): _text(value) for key, value in variables.items()}, "was explorer.env_vars")
    kind = resolve_environment(move.take(ENGINE + "engine_type")) or "vllm"
    if str(kind).startswith("vllm"):
        move.put(ENGINE + "engine", "vllm", "`transformers` needs no GPU and no vLLM")
        move.keep(ENGINE + "tensor_parallel_size")
    else:
        move.lost(LeftOut(ENGINE + "engine_type", kind, "engines are transformers and vllm", matters=True))
        move.put(ENGINE + "engine", "transformers")
        move.leave_out(ENGINE + "tensor_parallel_size", "only the engine vllm splits a model")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def engine_options(move: SettingsTransfer) -> None:
    """Move the options of vLLM's server."""
    options = []
    for name, default in SWITCHES.items():
        value = resolve_environment(move.take(ENGINE + name))
        if isinstance(value, bool) and value != default:
            options.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
    extra = move.take_mapping(ENGINE + "extra_engine_args")
    named = {name: move.take(ENGINE + name) for name in OPTIONS} | dict(extra)
    options += [f"--{name.replace('_', '-')}={_text(value)}" for name, value in named.items() if value is not None]
    if options:
        move.put(f"{ENGINE}vllm.extra_args", options, "options of vLLM's server that have no setting here")


def timeouts(move: SettingsTransfer) -> None:
    """Move the time limit of a run of a task, and raise the limits of a batch that must not be shorter."""
    if move.resolved("mode") == "train":
        return
    move.keep_or_default("explorer.max_timeout", TIMEOUT, "Trinity-RFT's default; here it is 360 s")
    tries = whole(move.peek("explorer.max_retry_times", ExplorerConfig.model_fields["max_retry_times"].default))
    run_timeout = number(move.settings["explorer"]["max_timeout"])
    if run_timeout is None or tries is None:
        return
    limit = run_timeout * (tries + 1)
    for name in ("batch_timeout", "stall_timeout"):
        default = ExplorerConfig.model_fields[name].default
        if limit > default:
            move.put(f"explorer.{name}", limit, f"as long as {tries + 1} tries of max_timeout; usually {default:g}")


def auxiliary_models(move: SettingsTransfer) -> None:
    """Move the auxiliary models, and add the judges that a workflow of Trinity-RFT asks as a service."""
    models = []
    for number_, model_settings in enumerate(move.take_mappings("explorer.auxiliary_models")):
        place = ("explorer", "auxiliary_models", number_)
        item = move.item(model_settings, place, f"explorer.auxiliary_models.{number_}")
        models.append(item.settings)
        item.keep_or_default("name", f"model-{number_}", "")
        external = item.take_mapping("external_model_config")
        if external.get("enable"):
            url = f"${{oc.env:{external.get('base_url_env', 'OPENAI_BASE_URL')}}}"
            key = external.get("api_key_env", "OPENAI_API_KEY")
            item.settings |= {"engine": "external", "url": url, "api_key_env": key}
            if external.get("model_name"):
                item.put("served_name", external["model_name"])
        else:
            _auxiliary_engine(item)
            item.put("model.model_path", item.take("model_path"))
            if (value := item.take("enable_thinking")) is not None:
                item.put(THINKING, value)
            item.keep("engine_num")
            _lengths(item, "")
        item.give_up("no counterpart here")
    if move.resolved("mode") != "train":
        models += _api_judges(move)
    if models:
        move.put("explorer.auxiliary_models", models)


def _auxiliary_engine(item: SettingsTransfer) -> None:
    kind = str(resolve_environment(item.take("engine_type")) or "vllm")
    options = ("gpu_memory_utilization", "enforce_eager")
    if kind.startswith("vllm"):
        item.put("engine", "vllm", "`transformers` needs no GPU and no vLLM")
        item.keep("tensor_parallel_size")
        for name in options:
            item.move(name, f"vllm.{name}")
        return
    item.put("engine", "transformers", f"was {kind}; engines are transformers and vllm")
    for name in ("tensor_parallel_size", *options):
        item.leave_out(name, "only the engine vllm has this", matters=False)


def _api_judges(move: SettingsTransfer) -> Iterator[dict[str, Any]]:
    """Yield the external judge models of the tasksets, and rewrite the tasksets' workflows to use these models."""
    buffer, judges = move.settings.get("buffer", {}), set[str]()
    for taskset in (buffer.get("taskset") or {}, *buffer.get("tasksets", ()), *buffer.get("eval_tasksets", ())):
        if taskset.get("workflow") != API_JUDGE:
            continue
        workflow_args = dict(taskset.get("workflow_args") or {})
        served = str(workflow_args.pop("judge_model_name", "judge"))
        url = workflow_args.pop("judge_api_base_url_env", "OPENAI_BASE_URL")
        key = workflow_args.pop("judge_api_key_env", "") or "OPENAI_API_KEY"
        name = re.sub(r"[^a-z0-9]+", "-", served.lower()).strip("-")[:40] or "judge"
        taskset |= {"workflow": "rubric_judge_workflow", "workflow_args": {**workflow_args, "judge": name}}
        if name not in judges:
            judges.add(name)
            address = {"url": f"${{oc.env:{url}}}", "api_key_env": key}
            yield {"name": name, "engine": "external", **address, "served_name": served}


def checkpoints(move: SettingsTransfer) -> None:
    """Move the settings of checkpoints, whose defaults differ, and the settings of veRL."""
    if whole(move.peek("trainer.save_interval")) == 0:
        move.leave_out("trainer.save_interval", "checkpoints are always written, every 50 batches", matters=False)
    exported = resolve_environment(move.take("trainer.save_hf_checkpoint"))
    if exported is not None:
        move.put("trainer.export", "every" if exported == "always" else "last", "was trainer.save_hf_checkpoint")
    elif move.resolved("mode") != "explore":
        move.put("trainer.export", "last", "Trinity-RFT's default; here it is every")
    if whole(move.peek("trainer.max_checkpoints_to_keep", 0)) == 0:
        move.take("trainer.max_checkpoints_to_keep")
        if interval := whole(move.peek("trainer.save_interval")):
            move.put("trainer.keep_every", interval, "every checkpoint stays, as in Trinity-RFT")
    for key in [key for key, _ in move.rest() if key.startswith("trainer.trainer_config.")]:
        if any(part in key for part in OF_MACHINES):
            move.leave_out(key, "a step is filled up to `trainer.max_tokens_per_micro_batch`", matters=False)


def synchronizer(move: SettingsTransfer) -> None:
    """Move the weight sync: Trinity-RFT has an interval for each of its styles."""
    style = move.resolved("synchronizer.sync_style", "fixed")
    of_explorer, of_trainer = (move.take(f"synchronizer.{agent}_sync_interval") for agent in ("explorer", "trainer"))
    agent, interval = ("explorer", of_explorer) if style == "dynamic_by_explorer" else ("trainer", of_trainer)
    if interval is not None:
        move.take("synchronizer.sync_interval")
        move.put("synchronizer.sync_interval", interval, f"was synchronizer.{agent}_sync_interval")
    if move.resolved("mode") == "train":
        for name in ("sync_method", "sync_style", "sync_interval", "sync_offset"):
            move.leave_out(f"synchronizer.{name}", "mode train sends no weights anywhere", matters=False)
    elif move.peek("synchronizer.sync_method") is None:
        move.put("synchronizer.sync_method", "nccl", "Trinity-RFT's default; without GPUs: collective")
    if (offset := move.peek("synchronizer.sync_offset")) is not None and style != "fixed" and number(offset) == 0:
        move.take("synchronizer.sync_offset")


def monitor(move: SettingsTransfer) -> None:
    """Move the service that receives the metrics, and the level of the logs."""
    old_kind = move.take("monitor.monitor_type")
    kind = resolve_environment(old_kind)
    if kind in {"wandb", "mlflow", "swanlab"}:
        place = {"kind": old_kind, "project": move.peek("project"), "group": move.peek("group")}
        tracker = {key: value for key, value in place.items() if value}
        comment = f"was monitor.monitor_type {old_kind}: pip install 'trinity-mq[{old_kind}]'"
        move.put("monitor.trackers", [tracker], comment)
    elif kind not in {None, "tensorboard"}:
        reason = "services are wandb, mlflow and swanlab"
        move.lost(LeftOut("monitor.monitor_type", old_kind, reason, matters=True))
    level = resolve_environment(move.take("log.level"))
    if level is not None:
        move.put("monitor.log_level", str(level).lower(), "was log.level")

"""Rules of the table of names for settings that depend on one another: names, the model, agents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trinity_mq.trinity_rft.migration.limits import allow_truncated_sampling
from trinity_mq.trinity_rft.migration.transfer import (
    SettingsTransfer,
    number,
    resolve_environment,
    value_at,
    whole,
)

ENGINE = "explorer.rollout_model."
"""Section of the rollout engine."""
THINKING = "model.chat_template_kwargs.enable_thinking"
CHAT_TEMPLATE, TEMPLATE_PATH = "model.custom_chat_template", "model.chat_template_path"
UNSET_TEMPLATES = (None, "", "None")
"""Values that mean that no chat template is set: Trinity-RFT's documentation writes the word None."""
REFUSED_SECTIONS = {
    "data": "configurations of Trinity-RFT before 0.2 are not read; write the section buffer",
}
"""Missing capability by the top-level section that needs it."""
MODES = {name: name for name in ("both", "train", "explore", "bench", "serve")} | {"colocate": "both"}
"""Modes of Trinity-RFT, and the corresponding modes here."""
LENGTHS = ("max_model_len", "max_prompt_tokens", "max_response_tokens")
"""Length limits: the total, the prompt and the response."""
SWITCHES = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "enable_auto_tool_choice": False}
"""Switches of vLLM's server that have no setting here, with their defaults."""
TINY_TOKENS = 4096
"""Context of the small model that stands in for the policy of an evaluation of another service, in tokens."""
LAYERS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Names of the layers that Tinker switches as attention and as feed-forward layers, in models of the Llama form."""
OPTIONS = ("tool_call_parser", "reasoning_parser")
"""Options of vLLM's server that have no setting here."""


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


def slug(text: str, default: str = "run") -> str:
    """Return a valid name of a run or a model made from ``text``; ``default`` if it has no ASCII letters or digits."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or default


def mode(move: SettingsTransfer) -> None:
    """Move the mode, and refuse sections that nothing here replaces."""
    for section, capability in REFUSED_SECTIONS.items():
        if isinstance(settings := move.peek(section), Mapping):
            move.refuse(section, ", ".join(map(str, settings)), capability)
    old_mode = move.take("mode")
    new_mode = MODES.get(str(resolve_environment(old_mode))) if old_mode is not None else None
    if new_mode is not None:
        comments = [f"was {old_mode}: trainer and engines may share a GPU"] if new_mode != old_mode else []
        move.put("mode", new_mode, *comments)
    elif old_mode is not None:
        reason = f"modes are {', '.join(sorted(set(MODES.values())))}"
        move.lost("mode", old_mode, reason)


def model(move: SettingsTransfer) -> None:
    """Move the length limits, and the adapter of Tinker or the model of another service if it is enabled."""
    _lengths(move, "model.")
    if (number(value_at(move.settings, f"{ENGINE}top_p")) or 1.0) < 1:
        allow_truncated_sampling(move)
    _tinker(move)
    _external_policy(move)


def _tinker(move: SettingsTransfer) -> None:
    """Move the adapter that the service Tinker trains; here the same adapter is trained on the machine's own GPUs."""
    tinker = move.take_mapping("model.tinker")
    if not resolve_environment(tinker.get("enable")):
        return
    item = move.item(tinker, ("model", "lora"), "model.tinker")
    move.put("model.lora", item.settings)
    item.take("enable")
    item.put("r", item.take("rank", 16), "was model.tinker: the adapter is trained here, without the service")
    item.put("alpha", 32)
    trained = {part: resolve_environment(item.take(f"train_{part}", True)) for part in ("attn", "mlp", "unembed")}
    names = [name for part, layers in LAYERS.items() if trained[part] for name in layers]
    item.put("target_modules", "all-linear" if trained["attn"] and trained["mlp"] else names)
    if trained["unembed"]:
        item.lost("train_unembed", True, "the output layer gets no adapter")
    item.leave_out("base_url", "no service takes part", matters=False)
    item.leave_out("seed", "it follows from the run's `seed`", matters=False)
    item.give_up()


def _external_policy(move: SettingsTransfer) -> None:
    """Move a model of another service, which can only be evaluated (mode bench). In other modes refuse it."""
    model = {**move.take_mapping(ENGINE + "external_model_config"), **move.take_mapping("model.external_model")}
    if not resolve_environment(model.get("enable")) and move.resolved(ENGINE + "engine_type") != "external":
        return
    move.take(ENGINE + "engine_type")
    if move.resolved("mode") != "bench":
        move.refuse(
            "model.external_model.enable", True,
            "a model of another service cannot be trained or give rollouts to train on; it can be evaluated (mode "
            "bench) and be an auxiliary model",
        )  # fmt: skip
        return
    served = str(model.get("model_name") or move.peek("model.model_path"))
    name = slug(served, "model")
    address = {"url": f"${{oc.env:{model.get('base_url_env') or 'OPENAI_BASE_URL'}}}"}
    address["api_key_env"] = str(model.get("api_key_env") or "OPENAI_API_KEY")
    move.put(
        "explorer.auxiliary_models", [{"name": name, "engine": "external", **address, "served_name": served}],
        "was model.external_model", origin="model.external_model",
    )  # fmt: skip
    move.take("model.model_path")
    move.settings.get("model", {}).pop("model_path", None)
    total = whole(value_at(move.settings, "model.max_model_len")) or TINY_TOKENS
    move.put(
        "model.tiny", {"characters": "".join(map(chr, range(32, 127))) + "\n", "max_position_embeddings": total},
        f"only {name} is evaluated: a run has a policy of its own too, and this small one answers nothing",
    )  # fmt: skip
    move.put("bench.checkpoints", [0], "the answers of another service follow from no checkpoint")
    move.put(ENGINE + "engine", "transformers")


def external_evaluation(move: SettingsTransfer) -> None:
    """Let the model of another service answer the evaluations if it is the evaluated model."""
    if move.resolved("mode") == "bench" and move.has("model.tiny"):
        name = value_at(move.settings, "explorer.auxiliary_models.0.name")
        for taskset in value_at(move.settings, "buffer.eval_tasksets") or ():
            taskset["rollout_args"] = {**(taskset.get("rollout_args") or {}), "model": name}


def thinking(move: SettingsTransfer) -> None:
    """Move the switch of thinking. Without it the chat template decides, in Trinity-RFT too."""
    for old in (ENGINE + "enable_thinking", "model.enable_thinking"):
        value = move.take(old)
        is_used = old == "model.enable_thinking" or move.resolved("mode") != "train"
        if value is not None and is_used and not move.has(THINKING):
            move.put(THINKING, value, f"was {old}", origin=old)


def template(move: SettingsTransfer) -> None:
    """Move the chat template of the engine, else the text or the file of the model."""
    for old, new in (
        (ENGINE + "chat_template", CHAT_TEMPLATE),
        (CHAT_TEMPLATE, CHAT_TEMPLATE),
        (TEMPLATE_PATH, TEMPLATE_PATH),
    ):
        value = resolve_environment(move.take(old))
        if value not in UNSET_TEMPLATES and not move.has(CHAT_TEMPLATE):
            move.put(new, value, *([] if old == new else [f"was {old}"]), origin=old)


def truncation(move: SettingsTransfer) -> None:
    """Move the treatment of prompts that are too long: in Trinity-RFT they give masked experiences by default."""
    value = move.take_first(ENGINE + "enable_prompt_truncation", "model.enable_prompt_truncation")
    if move.resolved("mode") == "train":
        return
    if value is None:
        move.put("model.enable_prompt_truncation", True, "Trinity-RFT's default; here the task of such a prompt fails")
    else:
        move.put("model.enable_prompt_truncation", value)


def sampling(move: SettingsTransfer) -> dict[str, Any]:
    """Remove the sampling parameters of the model that belong to each taskset here, and return them by name."""
    parameters = {}
    for name in ("top_k", "repetition_penalty"):
        if (value := move.take_first(ENGINE + name, f"model.{name}")) is not None:
            parameters[name] = value
            allow_truncated_sampling(move)
    return parameters


def _lengths(move: SettingsTransfer, there: str) -> None:
    """Move the length limits, and fill in the limits that Trinity-RFT would fill in."""
    limits = {name: value for name in LENGTHS if (value := move.take(there + name)) is not None}
    numbers = {name: whole_value for name, value in limits.items() if (whole_value := whole(value)) is not None}
    comments: dict[str, str] = {}
    if len(numbers) == len(limits) and limits:  # otherwise a limit is a variable that is not set on this machine
        possible = _possible_limits(move, there, numbers)
        filled, comments = _filled_limits(possible)
        limits |= {name: value for name, value in filled.items() if value != possible.get(name)}
    for name in LENGTHS:
        if name in limits:
            move.put(f"model.{name}", limits[name], *([comments[name]] if name in comments else []))


def _possible_limits(move: SettingsTransfer, there: str, limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits without a limit that takes the whole total, which is recorded as lost. A prompt limit that only
    the response limit contradicts stays, since :func:`_filled_limits` lowers it.
    """
    total, possible = limits.get("max_model_len"), dict(limits)
    for name, other in (("max_response_tokens", "prompt"), ("max_prompt_tokens", "response")):
        is_lowered = name == "max_prompt_tokens" and "max_response_tokens" in possible
        if total is not None and possible.get(name, 0) >= total and not is_lowered:
            reason = f"wanted less than max_model_len {total}, which is for the {other} too: set limits that fit"
            move.lost(f"{there}{name}", possible.pop(name), reason)
    return possible


def _filled_limits(limits: Mapping[str, int]) -> tuple[dict[str, int], dict[str, str]]:
    """Return all three limits, computed from the given limits, and comments on the computed limits. Without the total
    and another limit, return the given limits and no comments.
    """
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
    item.give_up()
    for number_, adapter in enumerate(other_adapters, 1):
        move.lost(f"model.lora_configs.{number_}", adapter, "a run trains one adapter")


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
    kind = str(resolve_environment(move.take(ENGINE + "engine_type")) or "vllm")
    if move.has(ENGINE + "engine"):  # set for the model of another service, which is not computed here
        move.take(ENGINE + "tensor_parallel_size")
    elif kind.startswith("vllm") or kind == "tinker":
        move.put(ENGINE + "engine", "vllm", "`transformers` needs no GPU and no vLLM")
        move.keep(ENGINE + "tensor_parallel_size")
    else:
        move.lost(ENGINE + "engine_type", kind, "engines are transformers and vllm")
        move.put(ENGINE + "engine", "transformers")
        move.leave_out(ENGINE + "tensor_parallel_size", "only the engine vllm splits a model")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def engine_options(move: SettingsTransfer) -> None:
    """Move the options of vLLM's server."""
    _server_options(move, ENGINE)


def _server_options(move: SettingsTransfer, section: str) -> None:
    """Move the options of the vLLM servers of a model, whose settings are in ``section``."""
    options = []
    for name, default in SWITCHES.items():
        value = resolve_environment(move.take(section + name))
        if isinstance(value, bool) and value != default:
            options.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
    extra = move.take_mapping(section + "extra_engine_args")
    named = {name: move.take(section + name) for name in OPTIONS} | dict(extra)
    options += [f"--{name.replace('_', '-')}={_text(value)}" for name, value in named.items() if value is not None]
    if options:
        move.put(f"{section}vllm.extra_args", options, "options of vLLM's server that have no setting here")


def auxiliary_models(move: SettingsTransfer) -> None:
    """Move the auxiliary models."""
    models = list(value_at(move.settings, "explorer.auxiliary_models") or [])
    for number_, model_settings in enumerate(move.take_mappings("explorer.auxiliary_models")):
        place = ("explorer", "auxiliary_models", len(models))
        item = move.item(model_settings, place, f"explorer.auxiliary_models.{number_}")
        models.append(item.settings)
        name = item.take("name")
        valid = slug(str(resolve_environment(name) or name or f"model-{number_}"), "model")
        item.put("name", valid, *([] if name in (None, valid) else [f"was {name}"]), origin="name")
        external = item.take_mapping("external_model_config")
        if resolve_environment(external.get("enable")):
            url = f"${{oc.env:{external.get('base_url_env', 'OPENAI_BASE_URL')}}}"
            key = external.get("api_key_env", "OPENAI_API_KEY")
            item.settings |= {"engine": "external", "url": url, "api_key_env": key}
            if external.get("model_name"):
                item.put("served_name", external["model_name"])
            for engine_option in item.names():
                item.leave_out(engine_option, "the model is served elsewhere", matters=False)
        else:
            _auxiliary_engine(item)
            item.put("model.model_path", item.take("model_path"))
            if (value := item.take("enable_thinking")) is not None:
                item.put(THINKING, value)
            if (own_template := resolve_environment(item.take("chat_template"))) not in UNSET_TEMPLATES:
                item.put(CHAT_TEMPLATE, own_template)
            item.keep("engine_num")
            item.move("dtype", "model.dtype")
            item.leave_out("seed", "it follows from the run's `seed`", matters=False)
            _lengths(item, "")
        item.give_up()
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
        _server_options(item, "")
        return
    item.put("engine", "transformers", f"was {kind}; engines are transformers and vllm")
    for name in ("tensor_parallel_size", *options, *SWITCHES, *OPTIONS):
        item.leave_out(name, "only the engine vllm has this", matters=False)


def data_type(move: SettingsTransfer) -> None:
    """Move the data type of the engine.

    A trainer of Trinity-RFT computes in bfloat16 from float32 weights, as a trainer with ``model.dtype: bfloat16`` does
    here.
    """
    value = resolve_environment(move.peek(ENGINE + "dtype"))
    if move.has("model.tiny"):
        move.take(ENGINE + "dtype")
    elif value in ("float32", "float", "bfloat16"):
        move.take(ENGINE + "dtype")
        comment = f"was {ENGINE}dtype; trainer and engines compute in it, float32 is faster on a CPU"
        move.put("model.dtype", "bfloat16" if value == "bfloat16" else "float32", comment, origin=ENGINE + "dtype")
    else:
        reason = "engines sample in `model.dtype`, float32 or bfloat16, in which the trainer computes too"
        move.leave_out(ENGINE + "dtype", reason, matters=value != "auto")


def gateway(move: SettingsTransfer) -> None:
    """Move the address of mode serve."""
    if move.resolved("mode") != "serve":
        return
    move.put("gateway.port", move.take("explorer.proxy_port", 8010), "was explorer.proxy_port")
    address = move.take("explorer.listen_address", "0.0.0.0")
    move.put(
        "gateway.host", "127.0.0.1",
        f"was explorer.listen_address {address}; others can reach the gateway if gateway.key_file and TLS are set",
    )  # fmt: skip
    for name in ("service_status_check_interval", "min_running_model_num"):
        move.leave_out(f"explorer.{name}", "engines report by heartbeats, and a gateway waits for one", matters=False)
    move.leave_out("explorer.db_url", "sessions and their calls are in a stream of the broker", matters=False)


def checkpoints(move: SettingsTransfer) -> None:
    """Move the settings of checkpoints, whose defaults differ."""
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
    elif move.has("model.tiny"):
        move.leave_out("synchronizer.sync_method", "no weights of the evaluated model are sent", matters=False)
    elif move.peek("synchronizer.sync_method") is None:
        move.put("synchronizer.sync_method", "nccl", "Trinity-RFT's default; without GPUs: collective")
    if (offset := move.peek("synchronizer.sync_offset")) is not None and style != "fixed" and number(offset) == 0:
        move.take("synchronizer.sync_offset")


def monitor(move: SettingsTransfer) -> None:
    """Move the service that receives the metrics, and the level of the logs."""
    old_kind = move.take("monitor.monitor_type")
    kind = resolve_environment(old_kind)
    if kind in ("wandb", "mlflow", "swanlab"):
        place = {"kind": old_kind, "project": move.peek("project"), "group": move.peek("group")}
        tracker = {key: value for key, value in place.items() if value}
        comment = f"was monitor.monitor_type {old_kind}: pip install 'trinity-mq[{old_kind}]'"
        move.put("monitor.trackers", [tracker], comment)
    elif kind not in (None, "tensorboard"):
        reason = "services are wandb, mlflow and swanlab"
        move.lost("monitor.monitor_type", old_kind, reason)
    level = resolve_environment(move.take("log.level"))
    if level is not None:
        move.put("monitor.log_level", str(level).lower(), "was log.level")

"""The section ``explorer``: here runners have their own section, and engine settings have other names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trinity_mq.config.agents import ExplorerConfig
from trinity_mq.trinity_rft.migration.model import lengths
from trinity_mq.trinity_rft.migration.move import LeftOut, SettingsTransfer
from trinity_mq.trinity_rft.migration.values import number, resolve_environment, whole

TIMEOUT = 1800
"""Trinity-RFT's default of ``max_timeout``, in seconds."""
ENGINE = "explorer.rollout_model."
SIZES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes")
"""Settings of an engine on several devices."""
SWITCHES = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "enable_auto_tool_choice": False}
"""Switches of vLLM's server that have no setting here, with their defaults."""
OPTIONS = ("tool_call_parser", "reasoning_parser")
"""Options of vLLM's server that have no setting here."""
API_JUDGE = "rubric_judge_openai_workflow"
"""Workflow whose judge is a service; here such a judge is an ordinary auxiliary model."""
UNUSED = {
    "explorer.name": "agents name themselves",
    "explorer.runner_prepare_concurrency": "runners start at once",
    "explorer.runner_prepare_max_retries": "a runner that ends is started again, `supervisor.max_restarts` times",
    "explorer.runner_state_report_interval": "runners report by heartbeats",
    ENGINE + "enable_openai_api": "every engine serves the OpenAI API",
    ENGINE + "seed": "it follows from the run's `seed`",
    ENGINE + "base_port": "engines take free ports",
    ENGINE + "api_key": "engines listen on `host` alone",
    ENGINE + "gpu_per_engine": "an engine uses one device",
    ENGINE + "weight_sync_buffer_size": "it is `synchronizer.bucket_bytes`",
    ENGINE + "enable_log_requests": "requests are not logged; `trinity-mq inspect` shows what was sampled",
    ENGINE + "model_path": "it is `model.model_path`",
    ENGINE + "trust_remote_code": "it is `model.trust_remote_code`",
    ENGINE + "max_model_len": "it is `model.max_model_len`",
    ENGINE + "max_prompt_tokens": "it is `model.max_prompt_tokens`",
    ENGINE + "max_response_tokens": "it is `model.max_response_tokens`",
}


def explorer(move: SettingsTransfer) -> None:
    """Move the section."""
    for key, reason in UNUSED.items():
        move.leave_out(key, reason, matters=False)
    if resolve_environment(move.peek("mode")) == "train":
        move.take("explorer")
        return
    if (
        resolve_environment(move.take("explorer.bench_on_latest_checkpoint"))
        and resolve_environment(move.peek("mode")) == "bench"
    ):
        move.put("bench.checkpoints", "latest", "was explorer.bench_on_latest_checkpoint")
    _runners(move)
    _engine(move)
    _auxiliary(move)
    move.move("explorer.max_inflight_batches", "explorer.max_open_batches")
    move.keep("explorer.max_timeout")
    if "max_timeout" not in move.settings["explorer"]:
        move.put("explorer.max_timeout", TIMEOUT, "Trinity-RFT's default; here it is 360 s")
    tries = whole(move.peek("explorer.max_retry_times", ExplorerConfig.model_fields["max_retry_times"].default))
    run_timeout = number(move.settings["explorer"]["max_timeout"])
    if run_timeout is not None and tries is not None:
        limit = run_timeout * (tries + 1)
        for name in ("batch_timeout", "stall_timeout"):
            default = ExplorerConfig.model_fields[name].default
            if limit > default:
                move.put(f"explorer.{name}", limit, f"as long as {tries + 1} tries of max_timeout; usually {default:g}")


def _runners(move: SettingsTransfer) -> None:
    engines = whole(move.peek(ENGINE + "engine_num", 1)) or 1
    for old, factor in (("explorer.runner_num", 1), ("explorer.runner_per_model", engines)):
        value = whole(move.take(old))
        if value is None:
            continue
        runs = value * factor
        move.put(
            "runner.concurrency", max(1, -(-runs // 2)),
            f"was {old} {value}: tasks at a time, in each of the two processes of runner.num_runners",
        )  # fmt: skip
    move.move("explorer.concurrent_mode", "runner.concurrent_mode")
    if "concurrent_mode" not in move.settings.get("runner", {}):
        move.put("runner.concurrent_mode", "sequential", "Trinity-RFT's default; `asynchronous` is faster")
    if variables := move.take_mapping("explorer.env_vars"):
        move.put("runner.env", {str(key): _text(value) for key, value in variables.items()}, "was explorer.env_vars")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _engine(move: SettingsTransfer) -> None:
    kind = resolve_environment(move.take(ENGINE + "engine_type")) or "vllm"
    if str(kind).startswith("vllm"):
        move.put(ENGINE + "engine", "vllm", "`transformers` needs no GPU and no vLLM")
    else:
        move.lost(LeftOut(ENGINE + "engine_type", kind, "engines are transformers and vllm", matters=True))
        move.put(ENGINE + "engine", "transformers")
    for name in SIZES:
        matters = whole(move.peek(ENGINE + name, 1)) != 1
        move.leave_out(ENGINE + name, "an engine uses one device; take more engines: `engine_num`", matters=matters)
    move.leave_out(ENGINE + "dtype", "engines sample in `model.dtype`, which is that of the trained weights too")
    for name in ("gpu_memory_utilization", "enforce_eager"):
        move.move(ENGINE + name, f"{ENGINE}vllm.{name}")
    options = []
    for name, default in SWITCHES.items():
        value = resolve_environment(move.take(ENGINE + name))
        if isinstance(value, bool) and value != default:
            options.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
    extra = move.take_mapping(ENGINE + "extra_engine_args")
    named = {name: move.take(ENGINE + name) for name in OPTIONS}
    options += [
        f"--{name.replace('_', '-')}={_text(value)}" for name, value in {**named, **extra}.items() if value is not None
    ]
    if options:
        move.put(f"{ENGINE}vllm.extra_args", options, "options of vLLM's server that have no setting here")
    for name in ("ignore_eos", "enable_multimodal", "enable_expert_parallel"):
        if not move.peek(ENGINE + name):
            move.take(ENGINE + name)


def _auxiliary(move: SettingsTransfer) -> None:
    models = []
    for number_, model_settings in enumerate(move.take_mappings("explorer.auxiliary_models")):
        item = move.item(
            model_settings, ("explorer", "auxiliary_models", number_), f"explorer.auxiliary_models.{number_}"
        )
        models.append(item.settings)
        name = item.take("name")
        item.put("name", name if name is not None else f"model-{number_}")
        external = item.take_mapping("external_model_config")
        if external.get("enable"):
            item.put("engine", "external")
            item.put("url", f"${{oc.env:{external.get('base_url_env', 'OPENAI_BASE_URL')}}}")
            item.put("api_key_env", external.get("api_key_env", "OPENAI_API_KEY"))
            if external.get("model_name"):
                item.put("served_name", external["model_name"])
        else:
            item.put("engine", "transformers", "auxiliary models here are served by torch, or `external` by a server")
            path = item.take("model_path")
            item.put("model.model_path", path)
            item.keep("engine_num")
            lengths(item, "")
        for key in ("engine_type", "tensor_parallel_size", "gpu_memory_utilization", "enforce_eager"):
            item.leave_out(key, "auxiliary models are not served by vLLM here", matters=False)
        item.give_up("no counterpart here")
    models += _api_judges(move)
    if models:
        move.put("explorer.auxiliary_models", models)


def _api_judges(move: SettingsTransfer) -> Iterator[dict[str, Any]]:
    """Yield the external judge models of the tasksets, and rewrite the tasksets' workflows to use these models."""
    buffer, names = move.settings.get("buffer", {}), set[str]()
    for taskset in (buffer.get("taskset") or {}, *buffer.get("tasksets", ()), *buffer.get("eval_tasksets", ())):
        if taskset.get("workflow") != API_JUDGE:
            continue
        workflow_args = dict(taskset.get("workflow_args") or {})
        served = str(workflow_args.pop("judge_model_name", "judge"))
        url, key = (
            workflow_args.pop("judge_api_base_url_env", "OPENAI_BASE_URL"),
            workflow_args.pop("judge_api_key_env", ""),
        )
        name = re.sub(r"[^a-z0-9]+", "-", served.lower()).strip("-")[:40] or "judge"
        taskset |= {"workflow": "rubric_judge_workflow", "workflow_args": {**workflow_args, "judge": name}}
        if name not in names:
            names.add(name)
            yield {
                "name": name,
                "engine": "external",
                "url": f"${{oc.env:{url}}}",
                "api_key_env": key or "OPENAI_API_KEY",
                "served_name": served,
            }

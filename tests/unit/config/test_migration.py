"""Configurations of Trinity-RFT rewritten as ours: valid, with the same meaning, and nothing lost without a word."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.trinity_configs import DPO, GSM8K, GSM8K_STAGES
from trinity_mq.config import Config, ConfigError, load_config, load_stages
from trinity_mq.trinity_rft.migration import Migration, as_yaml, migrate

LEAST: dict[str, Any] = {"model": {"model_path": "m"}, "algorithm": {"algorithm_type": "grpo"}}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def sections(dotted: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of dotted keys."""
    result: dict[str, Any] = {}
    for key, value in dotted.items():
        for part in reversed(key.split(".")):
            value = {part: value}  # noqa: PLW2901
        result = merged(result, value)
    return result


def at(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = settings[int(part)] if isinstance(settings, list) else settings.get(part)
        if settings is None:
            return None
    return settings


def checked(source: dict[str, Any]) -> tuple[Migration, Config]:
    """Return what is made of a configuration, read again from what is written."""
    found = migrate(source)
    text = as_yaml(found.settings, found.comments)
    return found, load_config(yaml.safe_load(text))


def important(found: Migration) -> set[str]:
    return {one.key for one in found.left_out if one.matters}


def test_gsm8k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_TASKSET_PATH", raising=False)
    monkeypatch.setenv("TRINITY_MODEL_PATH", "my/model")
    found, config = checked(GSM8K)
    assert config.name == "qwen2-5-1-5b-gsm8k"
    assert str(config.path) == "checkpoints/Trinity-RFT-gsm8k/qwen2.5-1.5B-gsm8k"
    assert (config.mode, config.algorithm.algorithm_type, config.algorithm.repeat_times) == ("both", "grpo", 8)
    optimizer = config.algorithm.optimizer
    assert (optimizer.lr, optimizer.lr_scheduler_type, optimizer.lr_warmup_steps) == (1e-5, "constant", 0)
    assert (optimizer.betas, optimizer.weight_decay, optimizer.clip_grad) == ((0.9, 0.999), 0.01, 1.0)
    assert config.model.model_path == "my/model"
    assert (config.model.max_prompt_tokens, config.model.max_response_tokens) == (256, 1024)
    taskset, (held_out,) = config.buffer.taskset, config.buffer.eval_tasksets
    assert (taskset.storage_type, taskset.path, taskset.subset_name) == ("huggingface", "openai/gsm8k", "main")
    assert (taskset.workflow, held_out.workflow) == ("math_workflow", "math_workflow")
    assert (taskset.selector, held_out.split, config.buffer.batch_size) == ("sequential", "test", 96)
    engine = config.explorer.rollout_model
    assert (engine.engine, engine.engine_num, engine.vllm.enforce_eager) == ("vllm", 2, True)
    assert engine.vllm.extra_args == ("--no-enable-prefix-caching",)
    assert config.runner.num_runners * config.runner.concurrency == 8 * 2
    assert (config.explorer.eval_interval, config.explorer.max_timeout) == (50, 1800)
    assert (config.synchronizer.sync_method, config.synchronizer.backend) == ("collective", "nccl")
    assert (config.trainer.max_tokens_per_micro_batch, config.trainer.save_interval) == (16384, 100)
    assert important(found) == {"explorer.rollout_model.dtype"}
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "/data/train.jsonl")
    taskset = checked(GSM8K)[1].buffer.taskset
    assert (taskset.storage_type, taskset.path) == ("file", "/data/train.jsonl"), "a file of a known kind is a file"


def test_gsm8k_with_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SFT_DATASET_PATH", "/data/sft.jsonl")
    found = migrate(GSM8K_STAGES)
    first, second = load_stages(yaml.safe_load(as_yaml(found.settings, found.comments)))
    assert (first.name, first.config.mode, first.config.algorithm.algorithm_type) == ("sft-warmup", "train", "sft")
    assert (first.config.buffer.batch_size, first.config.buffer.total_steps) == (128, 10)
    data = first.config.buffer.trainer_input.experience_buffer
    assert (data.schema_type, data.path, data.format.messages_key) == ("sft", "/data/sft.jsonl", "messages")
    assert (second.name, second.config.mode, second.begins_with) == ("rft", "both", "sft-warmup")
    assert second.config.buffer.total_steps is None, "a stage of Trinity-RFT takes nothing of another's sections"
    alone = load_config(migrate(GSM8K).settings)
    for section in ("algorithm", "buffer", "explorer"):
        assert getattr(second.config, section) == getattr(alone, section)


def test_dpo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "/data/pairs.jsonl")
    found, config = checked(DPO)
    data = config.buffer.trainer_input.experience_buffer
    assert (config.mode, data.schema_type, data.storage_type, data.format.prompt_key) == (
        "train", "dpo", "file", "prompt",
    )  # fmt: skip
    assert (config.buffer.batch_size, config.buffer.total_steps) == (64, 200)
    optimizer = config.algorithm.optimizer
    assert (optimizer.lr, optimizer.lr_scheduler_type, optimizer.lr_warmup_steps) == (5e-7, "cosine", 6)
    assert (optimizer.min_lr_ratio, optimizer.betas) == (0.1, (0.9, 0.95))
    assert config.algorithm.kl is None
    assert config.trainer.keep_every == 30, "Trinity-RFT keeps every checkpoint"
    assert important(found) == {"algorithm.kl_loss_fn"}, "k1 as a loss"


BUFFER, ROLLOUT = "buffer.explorer_input", "explorer.rollout_model"
REPLAY, EXPERTS = "buffer.trainer_input.experience_buffer.replay_buffer", "buffer.trainer_input.auxiliary_buffers.sft"
MODEL_PATH = {"model.model_path": "${oc.env:M,x}/y"}
RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mode": "colocate"}, {"mode": "both"}),
    (MODEL_PATH, MODEL_PATH),
    ({"buffer.total_steps": "${trainer.n}", "trainer.n": 7}, {"buffer.total_steps": 7}),
    ({"mode": "serve"}, {"mode": None}),
    (
        {
            "mode": "bench",
            "explorer.bench_on_latest_checkpoint": True,
            f"{BUFFER}.eval_tasksets": [{"name": "e", "path": "p"}],
        },
        {"mode": "bench", "bench.checkpoints": "latest"},
    ),
    ({"name": "${project}-${algorithm.algorithm_type}", "project": "My_Project"}, {"name": "my-project-grpo"}),
    ({"checkpoint_job_dir": "/c/x"}, {"run_dir": "/c/x"}),
    ({"algorithm.algorithm_type": None}, {"algorithm.algorithm_type": "ppo"}),
    (
        {"algorithm.entropy_loss_fn": "none", "algorithm.entropy_loss_fn_args": {"entropy_coef": 0.1}},
        {"algorithm.entropy_coef": 0.0, "algorithm.entropy_loss_fn_args": None},
    ),
    (
        {"algorithm.policy_loss_fn_args": {"clip_range_high": 0.28}},
        {"algorithm.policy_loss_fn_args": {"clip_range_high": 0.28}},
    ),
    ({"algorithm.optimizer.lr_warmup_steps": -1}, {"algorithm.optimizer.lr_warmup_steps": 0}),
    (
        {"algorithm.optimizer.lr_warmup_steps_ratio": 0.1, "buffer.total_steps": 50},
        {"algorithm.optimizer.lr_warmup_steps": 5, "buffer.total_steps": 50},
    ),
    ({"algorithm.sample_strategy_args": {"max_staleness": 3}}, {"synchronizer.max_staleness": 3}),
    (
        {"model": {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.0}, BUFFER: {}},
        {f"{ROLLOUT}.temperature": 0.7, "algorithm.allow_truncated_sampling": True},
    ),
    ({"model.max_model_len": 1001}, {"model.max_prompt_tokens": 500, "model.max_response_tokens": 501}),
    ({"model": {"max_prompt_tokens": 30, "max_response_tokens": 40}}, {"model.max_model_len": 70}),
    (
        {"model": {"max_prompt_tokens": 900, "max_response_tokens": 400, "max_model_len": 1000}},
        {"model.max_prompt_tokens": 600},
    ),
    (
        {"model.lora_configs": [{"name": "a", "lora_rank": 8, "lora_alpha": 16}]},
        {"model.lora.r": 8, "model.lora.alpha": 16},
    ),
    (
        {"algorithm.repeat_times": 8, "buffer": {"batch_size": 4, "train_batch_size": 64}},
        {"trainer.batches_per_step": 2},
    ),
    (
        {"algorithm.repeat_times": 8, "buffer": {"batch_size": 4, "train_batch_size": 16}},
        {"algorithm.mini_batches": 2, "trainer.batches_per_step": None},
    ),
    ({"explorer.runner_num": 5}, {"runner.concurrency": 3}),
    ({"explorer.concurrent_mode": "multi-threading"}, {"runner.concurrent_mode": "multi-threading"}),
    ({"explorer.env_vars": {"A": True, "B": 1}}, {"runner.env": {"A": "true", "B": "1"}}),
    (
        {"explorer.max_timeout": 3600, "explorer.max_retry_times": 3},
        {"explorer.batch_timeout": 14400, "explorer.stall_timeout": 14400},
    ),
    (
        {f"{ROLLOUT}.enable_auto_tool_choice": True, f"{ROLLOUT}.tool_call_parser": "hermes"},
        {f"{ROLLOUT}.vllm.extra_args": ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]},
    ),
    (
        {"explorer.auxiliary_models": [{"model_path": "judge", "max_model_len": 100, "engine_num": 2}]},
        {
            "explorer.auxiliary_models.0.model.model_path": "judge",
            "explorer.auxiliary_models.0.engine_num": 2,
            "explorer.auxiliary_models.0.model.max_prompt_tokens": 50,
        },
    ),
    (
        {
            f"{BUFFER}.default_workflow_type": "rubric_judge_openai_workflow",
            f"{BUFFER}.taskset.path": "t",
            f"{BUFFER}.taskset.workflow_args": {"judge_model_name": "GPT 5", "rubric": ["right"]},
        },
        {
            "buffer.taskset.workflow": "rubric_judge_workflow",
            "buffer.taskset.workflow_args": {"rubric": ["right"], "judge": "gpt-5"},
            "explorer.auxiliary_models.0.url": "${oc.env:OPENAI_BASE_URL}",
            "explorer.auxiliary_models.0.served_name": "GPT 5",
        },
    ),
    ({"trainer.save_hf_checkpoint": "always"}, {"trainer.export": "every"}),
    ({"trainer.critic_warmup": 5}, {"trainer.critic_warmup": 5}),
    ({"trainer.optimizer_offload": True}, {"algorithm.optimizer.offload": True}),
    (
        {"synchronizer": {"sync_style": "dynamic_by_explorer", "explorer_sync_interval": 4, "sync_interval": 2}},
        {"synchronizer.sync_interval": 4},
    ),
    (
        {
            f"{REPLAY}.enable": True,
            f"{REPLAY}.priority_fn": "decay_limit_randomization",
            f"{REPLAY}.priority_fn_args": {"decay": 1.5, "use_count_limit": 2, "sigma": 0.1},
        },
        {
            f"buffer.trainer_input.replay.{name}": value
            for name, value in {"share": 0.5, "decay": 1.5, "max_uses": 2, "sigma": 0.1}.items()
        },
    ),
    (
        {"monitor.monitor_type": "wandb", "monitor.monitor_args": {"base_url": "u"}, "project": "p"},
        {"monitor.trackers.0.kind": "wandb", "monitor.trackers.0.project": "p"},
    ),
    ({"log.level": "WARNING"}, {"monitor.log_level": "warning"}),
    (
        {"data_processor.experience_pipeline.operators": [{"name": "reward_filter", "args": {"threshold": 0.1}}]},
        {"operator.operators": [{"name": "reward_filter", "args": {"threshold": 0.1}}]},
    ),
    (
        {f"{BUFFER}.taskset": {"path": "t", "data_selector": {"selector_type": "shuffle"}}},
        {"buffer.taskset.selector": "shuffle", "buffer.taskset.storage_type": "huggingface"},
    ),
    (
        {f"{BUFFER}.taskset": {"path": "sqlite:///t.db", "storage_type": "sql", "name": "q"}},
        {"buffer.taskset.query": "q", "buffer.taskset.format.prompt_key": "prompt"},
    ),
    (
        {"algorithm.algorithm_type": "mix_chord", EXPERTS: {"path": "e.jsonl", "format": {"prompt_type": "messages"}}},
        {
            f"{EXPERTS}.schema_type": "sft",
            f"{EXPERTS}.storage_type": "file",
            f"{EXPERTS}.format.messages_key": "message",
        },
    ),
]


@pytest.mark.parametrize(("given", "wanted"), RULES, ids=["-".join(given) for given, _ in RULES])
def test_each_rule(given: dict[str, Any], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    found, _ = checked(merged(LEAST, sections(given)))
    assert {key: at(found.settings, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "serve"),
        ("algorithm.enable_router_replay", True),
        ("explorer.rollout_model.tensor_parallel_size", 4),
        ("explorer.rollout_model.engine_type", "sglang"),
        ("explorer.db_url", "sqlite:///x"),
        ("model.rope_theta", 10000.0),
        ("trainer.megatron.tensor_model_parallel_size", 2),
        ("trainer.ulysses_sequence_parallel_size", 4),
        ("data_processor.task_pipeline.num_process", 4),
        ("service.data_juicer.auto_start", True),
        ("a_key.that_nobody.knows", 1),
    ],
)
def test_what_has_no_counterpart_is_named(key: str, value: Any) -> None:
    found, _ = checked(merged(LEAST, sections({key: value})))
    (left,) = [one for one in found.left_out if one.matters]
    assert (left.key, left.value) == (key, value)
    assert left.reason


def test_nothing_of_a_file_is_lost_without_a_word() -> None:
    """Every value is in the result, in a comment, or among what is left out."""
    for source in (GSM8K, DPO):
        found = migrate(source)
        said = as_yaml(found.settings, found.comments) + " ".join(f"{one.key} {one.value}" for one in found.left_out)
        for key, value in leaves(source):
            last = key.rsplit(".", 1)[-1]
            assert any(word in said for word in (last, last.replace("_", "-"), str(value))), key


def leaves(section: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(section, dict):
        return [one for key, value in section.items() for one in leaves(value, f"{prefix}.{key}")]
    if isinstance(section, list) and section and isinstance(section[0], dict):
        return [one for number, value in enumerate(section) for one in leaves(value, f"{prefix}.{number}")]
    return [(prefix[1:], section)]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({}, "is not a configuration of Trinity-RFT: it has nothing"),
        ({"name": "x"}, "it has name, wanted sections"),
        ({**LEAST, "name": "${nowhere}"}, "name: '\\$\\{nowhere\\}' has no value"),
        ({**LEAST, "stages": ["sft"]}, "stages: wanted a list of settings with a stage_name each"),
        ({**LEAST, "buffer": {"explorer_input": {"taskset": "gsm8k"}}}, "buffer.explorer_input.taskset: wanted"),
        ({**LEAST, "buffer": {"explorer_input": {"eval_tasksets": ["x"]}}}, "eval_tasksets.0: wanted"),
        ({**LEAST, "explorer": {"auxiliary_models": "judge"}}, "explorer.auxiliary_models: wanted"),
        ({**LEAST, "explorer": {"env_vars": [1]}}, "explorer.env_vars: wanted"),
        ({**LEAST, "data_processor": {"experience_pipeline": {"operators": ["x"]}}}, "operators.0: wanted"),
        ({**LEAST, "buffer": {"trainer_input": {"auxiliary_buffers": [1]}}}, "auxiliary_buffers: wanted"),
    ],
)
def test_rubbish_is_refused_with_its_place(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        migrate(source)

"""Configurations of Trinity-RFT rewritten as ours: valid, with the same meaning, and nothing lost without a word."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trinity_configs import DPO, GSM8K, GSM8K_STAGES
from trinity_mq.cli.main import main
from trinity_mq.config import Config, ConfigError, load_config, load_stages
from trinity_mq.config.estimators import DotsEstimator
from trinity_mq.config.trinity_names import trinity_names
from trinity_mq.rewards import REWARD_FUNCTIONS
from trinity_mq.trinity_rft.migration import Migration, as_yaml, migrate
from trinity_mq.trinity_rft.migration.data import registered_names
from trinity_mq.workflows import WORKFLOWS

PROJECT = Path(__file__).parents[3] / "examples" / "trinity-project"
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
    assert config.model.dtype == "bfloat16"
    assert not important(found)
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "/data/train.jsonl")
    taskset = checked(GSM8K)[1].buffer.taskset
    assert (taskset.storage_type, taskset.path) == ("file", "/data/train.jsonl"), "a file of a known kind is a file"


def test_references_to_numbers_of_the_environment_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "7b")
    model = {"model_path": "m-${oc.env:NAME}", "max_prompt_tokens": "${oc.env:UNSET_LENGTH,2048}"}
    args = {"length": "${model.max_prompt_tokens}", "path": "${model.model_path}", "both": "${project}-${project}"}
    taskset = {"name": "t", "path": "t.jsonl", "workflow_args": args}
    given = {
        **LEAST,
        "project": "p",
        "model": model,
        "buffer": {"batch_size": 8, "explorer_input": {"taskset": taskset}},
    }
    kept = migrate(given).settings["buffer"]["taskset"]["workflow_args"]
    assert kept == {"length": 2048, "path": "m-7b", "both": "p-p"}


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


RULES = json.loads(Path(__file__).with_name("migration_rules.json").read_text(encoding="utf-8"))
"""Settings of Trinity-RFT over the least configuration, and what they become, both by dotted keys."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule["given"]))
def test_each_rule(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key without a counterpart is left out and named."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    found, _ = checked(merged(LEAST, sections(rule["given"])))
    if "is_left_out" in rule:
        (left,) = [one for one in found.left_out if one.matters]
        assert {left.key: left.value} == rule["given"]
        assert left.reason
    else:
        assert {key: at(found.settings, key) for key in rule["wanted"]} == rule["wanted"]
    assert rule.get("lost", {}).items() <= {(left.key, left.matters) for left in found.left_out}


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


REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"
REPLAYED = {"enable": True, "reuse_cooldown_time": 1, "priority_fn": "linear_decay", "priority_fn_args": {"decay": 1}}


ROWS = [row.old.removesuffix(".*") for row in trinity_names()]


@pytest.mark.parametrize("value", [float("nan"), 10**400, []], ids=["nan", "huge", "list"])
def test_no_value_of_a_row_stops_a_migration(value: Any) -> None:
    """A value of the wrong type or size is refused with its place, or left for `validate`."""
    for source in (merged(LEAST, sections({key: value})) for key in ROWS):
        with contextlib.suppress(ConfigError):
            migrate(source)


@pytest.mark.parametrize("value", [float("nan"), [{"a": 1}, "x"], {"a.b": {"c": 1}}], ids=["nan", "list", "dots"])
def test_no_value_of_a_file_stops_a_migration_and_all_are_read_as_they_are_meant(value: Any) -> None:
    for source in replaced(merged(merged(GSM8K, PACKS), sections({REPLAY: REPLAYED})), value):
        with contextlib.suppress(ConfigError):
            found = migrate(source)
            assert repr(yaml.safe_load(as_yaml(found.settings, found.comments))) == repr(found.settings)


def replaced(section: Any, value: Any) -> Iterator[Any]:
    """Yield a configuration with each of its values and sections replaced by another value."""
    for key, inner in list(section.items() if isinstance(section, dict) else enumerate(section)):
        for new in (value, *(replaced(inner, value) if isinstance(inner, dict | list) else ())):
            copy = section.copy()
            copy[key] = new
            yield copy


def test_a_key_that_is_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="NoneType"):
        migrate({**LEAST, "log": {None: 1}})


REFUSED = json.loads(Path(__file__).with_name("migration_refused.json").read_text(encoding="utf-8"))
"""Settings of Trinity-RFT without which a run would lose its purpose, their key and a word of the reason."""


def migrated(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code of ``trinity-mq migrate`` and the lines on standard error."""
    code = main(["migrate", str(path), "-o", str(path.with_suffix(".ours")), "--force"])
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row["key"])
def test_a_run_that_would_lose_its_purpose_is_refused_in_a_line(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = row["key"]
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump({**LEAST, **row["settings"]}))
    code, lines = migrated(path, capsys)
    assert (code, len(lines)) == (1, 1), lines
    last = key.split(".")[-1]
    numbers = [number for number, text in enumerate(path.read_text().splitlines(), 1) if f"{last}:" in text]
    assert f"{key} (theirs.yaml line {numbers[0]}): " in lines[0]
    assert row["word"] in lines[0]


def test_messages_name_the_place_in_the_users_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "model:\n  model_path: m\n"
        "algorithm:\n  algorithm_type: grpo\n  optimizer:\n    lr: fast\n"
        "explorer:\n  rollout_model:\n    gpu_memory_utilization: 7\n    dtype: float16\n"
        "buffer:\n  explorer_input:\n    eval_tasksets:\n"
        "    - name: held_out\n      path: p\n      repeat_times: none\n"
        "seed: -1\n"
    )
    code, lines = migrated(path, capsys)
    assert code == 1
    text = "\n".join(lines)
    for key, line in (
        ("algorithm.optimizer.lr", 6),
        ("explorer.rollout_model.gpu_memory_utilization", 9),
        ("explorer.rollout_model.dtype", 10),
        ("buffer.explorer_input.eval_tasksets.0.repeat_times", 16),
        ("seed", 17),
    ):
        assert f"{key} (theirs.yaml line {line})" in text, (key, text)
    path.write_text("model: {model_path: m}\nstages:\n  - stage_name: a\n  - stage_name: b\n    trainer: {nproc: x}\n")
    assert "[from stages.1.trainer.nproc (theirs.yaml line 5)]" in migrated(path, capsys)[1][-1]


def test_a_message_names_the_file_whose_value_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({**EXPLORER, "algorithm": {"optimizer": {"lr": 1e-6}}}))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({**TRAINER, "algorithm": {"optimizer": {"lr": "fast"}}}))
    code, lines = migrated(tmp_path / "a.yaml", capsys)
    assert code == 1
    assert lines[-1].endswith("got 'fast' [from algorithm.optimizer.lr (b.yaml line 3)]")
    assert any("no counterpart: algorithm.optimizer.lr (a.yaml line 3): 1e-06" in line for line in lines)


def test_secrets_are_in_no_message_and_keys_and_comments_are_read_as_the_user_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"yes": "no", "12": "x", "a: b": "c", "#": "d", "L" * 2000: "e", "WANDB_API_KEY": "wandb-secret"}
    source = {
        **LEAST,
        "name": "A\u2028mode: bench",
        "explorer": {
            "env_vars": variables,
            "rollout_model": {"api_key": "k1", "extra_engine_args": {"api-key": "key-2"}},
        },
        "monitor": {"monitor_type": "none", "monitor_args": {"entity": "wandb-secret", "password": 12345}},
        "trainer": {"save_interval": {"password": "hunter2"}, "unknown": "https://u:password@host/?token=abcdef-1"},
        "buffer": {"total_steps": "\\${literal}"},
    }
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(source))
    code, lines = migrated(path, capsys)
    text = path.with_suffix(".ours").read_text()
    lines += [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert code == 1
    for secret in ("k1", "key-2", "wandb-secret", "12345", "hunter2", ":password", "abcdef-1"):
        assert not [line for line in lines if secret in line], secret
    written = yaml.safe_load(text)
    assert written["runner"]["env"] == variables
    assert (written["name"], "mode" in written) == ("a-mode-bench", False)
    assert written["buffer"]["total_steps"] == "\\${literal}"
    path.write_text("model: {model_path: m}\nexplorer:\n  env_vars: {yes: 1, 0x1F: on, null: x, 1_000: y}\n")
    assert migrated(path, capsys)[0] == 0
    env = load_config(path.with_suffix(".ours")).runner.env
    assert env == {"yes": "1", "0x1F": "true", "null": "x", "1_000": "y"}
    path.write_text("model:\n  model_path: m\n  token: abcdefg: h\n")
    assert main(["migrate", str(path)]) == 2
    assert "abcdefg" not in capsys.readouterr().err


EXPLORER: dict[str, Any] = {
    "project": "p", "name": "async", "mode": "explore", "checkpoint_root_dir": "/c",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
    "model": {"model_path": "m", "max_model_len": 512},
    "buffer": {
        "batch_size": 16,
        "explorer_input": {"taskset": {"name": "t", "path": "t.jsonl"}},
        "trainer_input": {"experience_buffer": {"name": "q", "storage_type": "queue"}},
    },
    "explorer": {"eval_interval": 7},
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 10},
}  # fmt: skip
TRAINER: dict[str, Any] = {
    **EXPLORER, "mode": "train",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 2e-6}},
    "buffer": {"train_batch_size": 128, "trainer_input": EXPLORER["buffer"]["trainer_input"]},
    "explorer": {"eval_interval": 9},
    "trainer": {"grad_clip": 0.5},
}  # fmt: skip


def test_the_files_of_explorer_and_trainer_become_the_configuration_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, settings in (("explorer", EXPLORER), ("trainer", TRAINER), ("other", {**TRAINER, "name": "other"})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "notes.yaml").write_text("- no configuration")
    found = []
    for name, other in (("explorer", "trainer"), ("trainer", "explorer")):
        code, lines = migrated(tmp_path / f"{name}.yaml", capsys)
        assert code == 0, lines
        assert f"{name}.yaml and {other}.yaml are the explorer and the trainer of one run" in lines[0]
        assert any(line.startswith("no counterpart: explorer.eval_interval") and "9" in line for line in lines)
        found.append(load_config(tmp_path / f"{name}.ours"))
    assert found[0] == found[1]
    config = found[0]
    assert (config.name, config.mode, config.run_dir) == ("async", "both", "/c/p/async")
    assert (config.buffer.batch_size, config.explorer.eval_interval) == (16, 7)
    assert (config.algorithm.optimizer.lr, config.algorithm.optimizer.clip_grad) == (2e-6, 0.5)
    assert (config.trainer.batches_per_step, config.synchronizer.sync_interval) == (1, 10)
    code, (line,) = migrated(tmp_path / "other.yaml", capsys)
    assert code == 1
    assert "mode train: its experiences come from" in line
    (tmp_path / "trainer.yaml").unlink()
    code, lines = migrated(tmp_path / "explorer.yaml", capsys)
    assert code == 0
    assert "mode explore: a trainer may read the queue" in lines[0]
    assert load_config(tmp_path / "explorer.ours").mode == "explore"


def test_comments_of_an_auxiliary_model_stand_at_its_own_place() -> None:
    """The model of another service that is evaluated becomes the first auxiliary model."""
    settings = {
        "mode": "bench", "model.external_model": {"enable": True, "model_name": "x"},
        "explorer.auxiliary_models": [{"name": "Judge 1", "model_path": "j"}],
    }  # fmt: skip
    found = migrate(merged(LEAST, sections(settings)))
    place = ("explorer", "auxiliary_models", 1)
    assert found.comments[*place, "name"] == ["was Judge 1"]
    assert found.origins[place] == "explorer.auxiliary_models.0"


def test_the_file_of_verl_is_read_with_the_file_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verl = {
        "actor_rollout_ref": {
            "hybrid_engine": True,
            "model": {"use_remove_padding": True, "enable_gradient_checkpointing": True},
            "actor": {
                "strategy": "fsdp",
                "ppo_max_token_len_per_gpu": 4096,
                "grad_clip": 0.25,
                "ppo_epochs": 2,
                "optim": {"lr": 3e-6, "warmup_style": "cosine", "lr_warmup_steps": 4, "min_lr_ratio": 0.2},
                "fsdp_config": {"param_offload": True},
            },
            "ref": {"log_prob_use_dynamic_bsz": "${actor_rollout_ref.actor.use_dynamic_bsz}"},
        },
        "trainer": {"balance_batch": True, "max_actor_ckpt_to_keep": 5, "resume_mode": "auto"},
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(verl))
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump({**LEAST, "trainer": {"trainer_config_path": "examples/x/train.yaml"}}))
    code, lines = migrated(path, capsys)
    assert (code, len(lines)) == (0, 1), lines
    config = load_config(path.with_suffix(".ours"))
    optimizer, trainer = config.algorithm.optimizer, config.trainer
    assert (optimizer.lr, optimizer.lr_scheduler_type, optimizer.lr_warmup_steps) == (3e-6, "cosine", 4)
    assert (optimizer.min_lr_ratio, optimizer.clip_grad, config.algorithm.epochs) == (0.2, 0.25, 2)
    assert (trainer.max_tokens_per_micro_batch, trainer.gradient_checkpointing) == (4096, True)
    assert trainer.max_checkpoints_to_keep == 5
    (tmp_path / "train.yaml").unlink()
    code, lines = migrated(path, capsys)
    assert code == 0
    assert "no counterpart: trainer.trainer_config_path (theirs.yaml line" in lines[0]
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(verl))
    code, (line,) = migrated(tmp_path / "verl.yaml", capsys)
    assert code == 2
    assert "veRL's own configuration" in line


def test_a_workflow_has_its_name_here_and_a_note_of_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.yaml"
    taskset = {"path": "p", "default_workflow_type": "toolcall_workflow"}
    explorer_input = {
        "taskset": taskset,
        "eval_tasksets": [{"name": "a", "path": "p"}, {"name": "b", "path": "p"}],
        "default_workflow_type": "webshop_workflow",
    }
    path.write_text(yaml.safe_dump({**LEAST, "buffer": {"explorer_input": explorer_input}}))
    code, lines = migrated(path, capsys)
    assert code == 0, lines
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == 1, "once for both sets"
    assert "buffer.explorer_input.default_workflow_type (theirs.yaml line" in notes[0]
    buffer = load_config(path.with_suffix(".ours")).buffer
    assert buffer.taskset.workflow == "tool_call_workflow"
    assert [held_out.workflow for held_out in buffer.eval_tasksets] == ["webshop_workflow"] * 2


def test_what_is_refused_by_name_is_not_here() -> None:
    """A row that refuses a name goes when the name is registered here."""
    tables = {"workflow": WORKFLOWS, "reward": REWARD_FUNCTIONS}
    rows = registered_names().values()
    assert {row.kind for row in rows} == set(tables)
    assert [row.name for row in rows if row.refused and row.name in tables[row.kind]] == []
    assert [row.name for row in rows if not row.refused and (row.new_name or row.name) not in tables[row.kind]] == []
    assert all(row.text and not (row.refused and row.new_name) for row in rows)


def test_names_that_plugins_register_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "migrated_names_plugin.py").write_text(
        '@POLICY_LOSS_FN.register_module("mine")\nclass Loss: ...\n'
        '@ENTROPY_LOSS_FN.register_module("mine")\nclass Entropy: ...\n'
        '@SELECTORS.register_module("mine")\nclass Selector: ...\n'
        '@PRIORITY_FUNC.register_module("mine")\nclass Priority: ...\n'
    )
    replay = {"enable": True, "reuse_cooldown_time": 1, "priority_fn": "mine", "priority_fn_args": {"limit": 3}}
    taskset = {"storage_type": "file", "path": "x", "data_selector": {"selector_type": "mine"}}
    source = {
        **LEAST,
        "algorithm": {"algorithm_type": "grpo", "policy_loss_fn": "mine", "entropy_loss_fn": "mine"},
        "buffer": {
            "explorer_input": {"taskset": taskset},
            "trainer_input": {"experience_buffer": {"replay_buffer": replay}},
        },
    }
    found, config = checked({**source, "plugin_dirs": [str(tmp_path)]})
    assert not important(found)
    kept = config.buffer.trainer_input.replay
    assert (kept.priority_fn, kept.priority_fn_args, kept.share) == (
        "migrated_names_plugin.Priority",
        {"limit": 3},
        0.5,
    )
    assert config.algorithm.surrogate.kind == "migrated_names_plugin.Loss"
    assert config.algorithm.entropy_loss is not None
    assert config.algorithm.entropy_loss.kind == "migrated_names_plugin.Entropy"
    assert config.buffer.taskset.effective_selector.selector_type == "migrated_names_plugin.Selector"
    message = r"policy_loss_fn is 'mine', wanted one of .*, or a name that a module in plugin_dirs registers(?s:.*)"
    message += "selector_type is not one of .* nor a name that a module(?s:.*)"
    with pytest.raises(ConfigError, match=message + "priority_fn is 'mine', wanted .* or a name that a module"):
        checked(source)


def test_the_folder_of_plugins_of_trinitys_command_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = PROJECT / "plugins"
    (source, out), command = (PROJECT / "gsm8k.yaml", tmp_path / "ours.yaml"), ["migrate", "--force", "-o"]
    assert main([*command, str(out), str(source)]) == 1
    assert "--plugin-dir FOLDER names the folder of plug-ins" in capsys.readouterr().err
    assert main([*command, str(out), str(source), "--plugin-dir", str(plugins)]) == 0
    config = load_config(out)
    assert config.plugin_dirs == (str(plugins),)
    assert config.algorithm.surrogate.kind == "soft_clip.SoftClipLoss"
    assert main([*command, str(out), str(source), "--plugin-dir", str(tmp_path / "none")]) == 2
    assert "--plugin-dir: there is no folder" in capsys.readouterr().err


PACK_SET: dict[str, Any] = {
    "path": "grids", "default_workflow_type": "cod_grid_navigation_workflow",
    "workflow_args": {"len_zero_penalty": 900, "min_rounds": 4},
}  # fmt: skip
PACK_ARGS = {
    "activated_cod_methods": ["iterative_hint_e2e"], "hint_penalty_coef": 0.1, "len_zero_penalty": 100,
    "len_max_penalty": 200, "inject_pack_seed": True, "log_dir": "logs",
}  # fmt: skip
PACK_INPUT = {"tasksets": [PACK_SET], "eval_tasksets": [{**PACK_SET, "name": "held_out"}]}
PACKS: dict[str, Any] = {
    **LEAST,
    "cod": {"task_pack_size": 4, "eval_task_pack_size": 8, "cod_workflow_args": PACK_ARGS},
    "algorithm": {
        "algorithm_type": "multi_step_grpo", "advantage_fn": "cod", "repeat_times": 8,
        "advantage_fn_args": {
            "std_cal_level": "none", "iterative_hint_e2e_causal": True, "red_weight_adaptive_temp": True,
            "red_weight_adaptive_version": "bisection", "e2e_causal_returns_window": -1,
        },
    },
    "buffer": {"batch_size": 32, "explorer_input": PACK_INPUT},
}  # fmt: skip


def test_packs_of_tasks_are_arguments_of_their_workflow() -> None:
    found, config = checked(PACKS)
    assert not [key for key in important(found) if key.startswith(("cod", "algorithm"))]
    shared = {"len_zero_penalty": 900, "min_rounds": 4, "hint_penalty_coef": 0.1}
    shared |= {"hint_len_zero_penalty": 100, "hint_len_max_penalty": 200}
    [training], [held_out] = config.buffer.tasksets, config.buffer.eval_tasksets
    assert training.workflow_args == {**shared, "pack_size": 4}
    assert held_out.workflow_args == {**shared, "pack_size": 8}
    assert config.buffer.batch_size == 8
    assert config.algorithm.estimator == DotsEstimator(adaptive=True)
    arguments = {"std_cal_level": "none", "iterative_hint_e2e_causal": False}
    changed = {**PACKS, "algorithm": {**PACKS["algorithm"], "advantage_fn_args": arguments}}
    compared = checked(changed)[1].algorithm.estimator
    assert (compared.kind, compared.scale) == ("group", "none"), "without it runs are compared, as step_wise_grpo does"
    changed["algorithm"]["advantage_fn_args"] = {"iterative_hint_e2e_causal": True, "e2e_causal_baseline": "none"}
    with pytest.raises(ConfigError, match="e2e_causal_baseline is 'none', wanted 'group-mean'"):
        checked(changed)

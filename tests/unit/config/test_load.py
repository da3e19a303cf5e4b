"""Loading a configuration, errors that teach, removed settings, and the threads that follow from it."""

from __future__ import annotations

import importlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trinity_mq.config import Config, ConfigError, escape_interpolations, load_config, load_stages
from trinity_mq.config.loading.load import load_yaml
from trinity_mq.config.loading.removed_keys import (
    REMOVED_KEYS,
    RemovedKey,
    RemovedSettingWarning,
    is_refusing,
    without_removed_keys,
)
from trinity_mq.config.loading.secrets import Secrets
from trinity_mq.config.settings_table import all_settings
from trinity_mq.config.threads import available_cores, cpu_threads

TINY = {"model": {"tiny": {}}}
EVAL = {**TINY, "buffer": {"eval_tasksets": [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}]}}


REFUSED = json.loads(Path(__file__).with_name("refused.json").read_text(encoding="utf-8"))
"""Settings (without any: those of TINY), overrides, and what is said of them."""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row["says"][0])
def test_a_wrong_configuration_says_what_is_wrong_and_what_is_right(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(row.get("settings", TINY), row.get("overrides", ()))
    for part in row["says"]:
        assert part in str(caught.value)
    for part in ("s3cr3t", *row.get("omits", ())):  # a password, and what follows from another problem
        assert part not in str(caught.value)


@pytest.mark.parametrize(("mode", "falls"), [("both", True), ("explore", False)])
def test_a_learning_rate_falls_only_in_a_run_that_trains(mode: str, falls: bool) -> None:
    assert load_config(TINY, [f"mode={mode}", "buffer.total_steps=5"]).learning_rate_falls is falls


def test_secrets_in_a_long_text_are_found_in_linear_time() -> None:
    begin = time.process_time()
    assert Secrets("-" * 100_000, "a--" * 50_000, "--api-key s3cr3t").hide("s3cr3t") == "***"
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "text",
    [
        "runner: {env: {API_KEY: " + "s3cr3t" * 20 + ", b: [}}\n",
        "runner: {env: {PASSWORD: a s3cr3t, b: [}}\n",
        "runner:\n  env:\n    API_KEY: *s3cr3t\n",
        "runner:\n  env:\n    KEY: |\n      -----BEGIN\n   " + "s3cr3t" * 9 + "\n",
        "stages: {a: {env: {API_KEY: s3cr3t}}}\n",
        "stages: [{runner: {env: {API_KEY: s3cr3t}}}]\n",
    ],
)
def test_a_file_that_cannot_be_read_shows_no_part_of_a_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{tiny: {{}}}}\n{text}")
    with pytest.raises(
        ConfigError, match=r"is not YAML.* line \d+|wanted a list of stages|wanted settings with"
    ) as caught:
        load_stages(path)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("model: {tiny: {}}\nbuffer: {batch_size: 0, total_step: 3}\n", 2),
        ("model: {tiny: {}}\nbuffer: {batch_size: 1" + "0" * 400 + "}\n", 1),
        (None, 1),
        ("a: [", 1),
        ("- 1\n", 1),
        ("\0", 1),
    ],
)
def test_every_finding_has_a_line_that_names_the_file(tmp_path: Path, text: str | None, lines: int) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    findings = str(caught.value).splitlines()
    assert len(findings) == lines
    assert all(str(path) in finding for finding in findings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {tiny: {}}\nname: a\nname: b\n", "key 'name' is given twice, in lines 2 and 3: remove one"),
        ("model: {tiny: {}}\nbuffer:\n  total_steps: 4\n  batch_size: 8\n  total_steps: 5\n", "'total_steps' is"),
        ("model: {tiny: {}}\nbuffer: {total_steps: 4, total_steps: 4}\n", "'total_steps' is given twice, in line 2"),
        ('model: {tiny: {}}\nname: a\n"name": b\n', "key 'name' is given twice"),
        ("stages:\n- stage_name: a\n  buffer:\n    seed: 1\n    seed: 2\n", "key 'seed' is given twice, in lines 4"),
        ("model: {tiny: {}}\nbuffer: {eval_tasksets: [{name: a, limit: 1, limit: 2}]}\n", "key 'limit' is given twice"),
        ("x: &x {a: 1}\nmodel: {tiny: {}}\ny:\n  <<: *x\n  seed: 1\n  seed: 1\n", "key 'seed' is given twice"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """At any depth: YAML leaves open which one counts, and a person has seen one of them alone."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    for load in (load_config, load_stages):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert said in str(caught.value)
    path.write_text("a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, <<: *a, x: 3}\n")
    merged = load_yaml(path.read_text())
    assert (merged["b"], merged["c"]) == ({"x": 2, "y": 1}, {"x": 3, "y": 1}), (
        "what a merge key brings may be given again"
    )


def test_overrides_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMQ_SECRET", "s,${p}")
    config = load_config(
        {**TINY, "broker": {"url": "amqp://u:${env:TMQ_SECRET}@h/"}, "run_dir": "${env:TMQ_NOWHERE:there}"},
        ["buffer.total_steps=7", "algorithm.optimizer.lr=1e-3"],
    )
    assert config.buffer.total_steps == 7
    assert config.algorithm.optimizer.lr == 1e-3
    assert config.broker.url == "amqp://u:s,${p}@h/", "what is in a variable is not read as an interpolation"
    assert config.path == Path("there")


def test_interpolations_as_users_of_the_reference_system_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMQ_DATA", "/data")
    monkeypatch.delenv("TMQ_NOWHERE", raising=False)
    config = load_config(
        {
            "model": {"tiny": {}, "max_model_len": "${oc.env:TMQ_NOWHERE,64}", "max_prompt_tokens": 32},
            "buffer": {"taskset": {"path": "${oc.env:TMQ_DATA,/tmp}/a.jsonl", "limit": "${buffer.batch_size}"}},
            "runner": {"env": {"PLAIN": "\\${x}", "DOLLAR": "$HOME {x}"}},
        },
        ["model.max_response_tokens=${model.max_prompt_tokens}", "buffer.batch_size=6"],
    )
    assert (config.model.max_model_len, config.model.max_response_tokens) == (64, 32)
    assert (config.buffer.taskset.path, config.buffer.taskset.limit) == ("/data/a.jsonl", 6)
    assert config.runner.env == {"PLAIN": "${x}", "DOLLAR": "$HOME {x}"}


@pytest.mark.parametrize("text", ["${x}", "a\\${x}b${y", "\\\\${oc.env:HOME}", "$", "a\\n", "{{ x }}"])
def test_a_literal_text_is_read_as_it_is(text: str) -> None:
    assert load_config({**TINY, "runner": escape_interpolations({"env": {"X": text}})}).runner.env == {"X": text}


def test_an_override_of_an_item_of_a_list() -> None:
    config = load_config(EVAL, ["buffer.eval_tasksets.0.limit=8", "buffer.eval_tasksets.1.path=c.jsonl"])
    tasksets = [(one.name, one.path, one.limit) for one in config.buffer.eval_tasksets]
    assert tasksets == [("a", "a.jsonl", 8), ("b", "c.jsonl", None)]
    assert Config.model_validate(config.model_dump()) == config
    assert Config.model_validate_json(config.model_dump_json()) == config, "it survives its own dump"


def test_rollouts_of_hours_are_a_matter_of_time_limits_only() -> None:
    assert max(load_config(TINY).hold_seconds.values()) < 1800, "the half hour that brokers have by themselves"
    hours = ["explorer.max_timeout=14400", "explorer.batch_timeout=5e4", "explorer.stall_timeout=1e5"]
    config = load_config(TINY, hours)
    assert config.explorer.slice_timeout == 3 * 14_400
    assert config.hold_seconds["slice"] == 3 * 14_400 + 10 + 2 * 300


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/data/blobs/", "file:///data/blobs"),
        ("file:///data/blobs", "file:///data/blobs"),
        ("~/blobs", f"file://{Path.home()}/blobs"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("null", None),
    ],
)
def test_a_blob_store_is_a_url_or_an_absolute_path(given: str, url: str | None) -> None:
    assert load_config(TINY, [f"broker.blob_store={given}"]).broker.blob_store == url


JUDGE = {"name": "judge", "engine": "external", "url": "https://judge.example/v1", "api_key_env": "JUDGE_KEY"}
TEACHER = {"name": "teacher", "model": {"tiny": {}}, "engine_num": 2}


def test_auxiliary_models_keep_their_order_and_only_an_evaluation_may_be_answered_by_one() -> None:
    def load(*models: dict[str, Any], **buffer: Any) -> Config:
        return load_config({**TINY, "explorer": {"auxiliary_models": list(models)}, "buffer": buffer})

    config = load(JUDGE, TEACHER)
    assert [model.name for model in config.explorer.auxiliary_models] == ["judge", "teacher"]
    assert config.explorer.rollout_model.engine_num == 1
    assert load_config(config.model_dump(mode="json")) == config, "agents read what was written"
    asked = {"storage_type": "synthetic", "path": "ops3", "name": "e", "rollout_args": {"model": "judge"}}
    assert load(JUDGE, eval_tasksets=[asked]).buffer.eval_tasksets[0].rollout_args == {"model": "judge"}
    with pytest.raises(ConfigError, match=r"rollout_args.model is 'judge', wanted one of .*: teacher"):
        load(TEACHER, eval_tasksets=[asked])
    with pytest.raises(ConfigError, match="training tasks are answered by the policy"):
        load(JUDGE, taskset=asked)


def test_a_tap_makes_mode_train_of_a_configuration_that_rolls_out() -> None:
    def tapping(*overrides: str, **more: Any) -> Config:
        return load_config({**TINY, "name": "b", "buffer": {"total_steps": 5}, **more}, ["source.tap=a", *overrides])

    assert tapping().mode == "train"
    assert tapping(mode="both").mode == "train"
    assert tapping(mode="train").source.start == "beginning"
    assert tapping("source.start=17").source.start == 17
    assert tapping().accepts_any_age
    taskset = {"name": "t", "storage_type": "synthetic", "path": "max3"}
    assert tapping("mode=bench", buffer={"eval_tasksets": [taskset]}).mode == "bench"
    for loss in ("algorithm_type=gpg", "anchor=old"):  # which take all data for their own
        assert tapping(f"algorithm.{loss}", "algorithm.correction=[{kind: weight}]").mode == "train"
    assert tapping("algorithm.algorithm_type=sft").mode == "train", "whose answers are imitated makes no difference"


RENAMED_PAGE = Path(__file__).parents[3] / "docs" / "renamed.md"
OTHER = "another value"
"""A value that no constant has."""


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return the sections of a dotted key; auxiliary models are a list."""
    for part in reversed(key.split(".")):
        value = {part: [value] if part == "auxiliary_models" else value}
    assert isinstance(value, dict)
    return value


def test_a_removed_key_warns_with_its_value_the_constant_and_the_next_step() -> None:
    with pytest.warns(RemovedSettingWarning) as caught:
        config = load_config(TINY, ["explorer.batch_tries=7", "explorer.eval_interval=3"])
    (warning,) = caught
    assert str(warning.message) == (
        "explorer.batch_tries: this setting was removed; 3 (trinity_agents.explorer.training_batches.MANIFEST_TRIES) "
        "is used, not 7: remove it; to wait longer for an idle operator, raise explorer.operator_deadline. Release 0.3 "
        "refuses the key"
    )
    assert config == load_config(TINY, ["explorer.eval_interval=3"]), "nothing else is ignored"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the value of the constant is in folders of earlier runs
        assert load_config(TINY, ["explorer.batch_tries=3", "explorer.cancel_grace=2"]) == load_config(TINY)
    with pytest.raises(ConfigError, match="explorer"):
        load_config({**TINY, "explorer": 3})


def test_the_file_of_a_user_is_named_and_stages_warn_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {tiny: {}}\nexplorer: {batch_tries: 9}\nstages: [{stage_name: a}]\n")
    with pytest.warns(RemovedSettingWarning, match=r"explorer.batch_tries: .* is used, not 9:") as caught:
        load_stages(path)
    assert [warning.filename for warning in caught] == [f"{path}: stage a"]


def test_release_0_3_refuses_what_0_2_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_refusing("0.2.9")
    assert is_refusing("0.3.0.dev0")
    assert is_refusing("1.0.0")
    monkeypatch.setattr("trinity_mq.config.loading.load.is_refusing", lambda: True)
    with pytest.raises(ConfigError, match=r"configuration: explorer.batch_tries: this setting was removed"):
        load_config(TINY, ["explorer.batch_tries=7"])
    assert load_config(TINY, ["explorer.batch_tries=3"]) == load_config(TINY)


@pytest.mark.parametrize(("key", "row"), REMOVED_KEYS.items(), ids=REMOVED_KEYS)
def test_each_row_is_true(key: str, row: RemovedKey) -> None:
    settings = nested(key, OTHER)
    kept, (line,) = without_removed_keys(settings)
    assert kept == nested(key.rpartition(".")[0], {})
    assert settings == nested(key, OTHER), "the caller's settings stay"
    assert repr(OTHER) in line
    assert row.advice in line
    module, _, name = row.constant.rpartition(".")
    if module:
        assert getattr(importlib.import_module(module), name) == row.value
        assert name in line
    shown = f"`{row.value!r}`" if module else "none"
    assert f"| `{key}` | {shown} | {row.advice} |" in RENAMED_PAGE.read_text(encoding="utf-8")
    assert key not in {setting.key.replace(".<n>", "") for setting in all_settings()}
    for word in row.advice.replace(",", " ").replace(";", " ").split():
        if "." in word and "=" not in word and "/" not in word:
            assert word in {setting.key for setting in all_settings()}, "the advice names settings that there are"


HERE, ELSEWHERE = "{name: j, model: {tiny: {}}, engine_num: 2}", "{name: j, engine: external, url: 'http://h/v1'}"
SPLIT = "{name: j, engine: vllm, model: {tiny: {}}, tensor_parallel_size: 2}"


def config(*overrides: str) -> Config:
    return load_config({"name": "w", "model": {"tiny": {}}}, overrides)


@pytest.mark.parametrize(
    ("cores", "override", "expected"),
    [
        (2, "seed=1", 1),
        (1, "seed=1", 1),
        (16, "seed=1", 8),
        (16, "trainer.nproc=2", 5),
        (16, "explorer.rollout_model.engine_num=3", 4),
        (16, f"explorer.auxiliary_models=[{HERE}]", 4),
        (16, "explorer.rollout_model={engine: vllm, engine_num: 2, tensor_parallel_size: 2}", 3),
        (16, f"explorer.auxiliary_models=[{SPLIT}]", 4),
        (8, f"explorer.auxiliary_models=[{ELSEWHERE}]", 4),
        (2, "explorer.rollout_model.engine_num=8", 1),
    ],
)
def test_trainer_and_engines_share_the_cores(cores: int, override: str, expected: int) -> None:
    assert cpu_threads(config(override), "auto", cores) == expected
    assert cpu_threads(config(override), 7) == 7


@pytest.mark.parametrize(
    "place", ["explorer.rollout_model={{{}}}", "explorer.auxiliary_models=[{{name: j, model: {{tiny: {{}}}}, {}}}]"]
)
def test_only_some_engines_split_a_model(place: str) -> None:
    with pytest.raises(ConfigError, match=r"size is 2, and the engine transformers does not.*engine to vllm"):
        config(place.format("tensor_parallel_size: 2"))
    for engine in ("vllm", "my.Engine"):
        assert config(place.format(f"engine: {engine}, tensor_parallel_size: 2"))
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        config(place.format("engine: vllm, tensor_parallel_size: 0"))


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_anything_else_is_an_error(value: str) -> None:
    with pytest.raises((ConfigError, ValidationError), match="num_threads"):
        config(f"trainer.num_threads={value}")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 16),
        ({"cpu.max": "nonsense\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "0\n"}, 16),
    ],
)
def test_the_cores_are_those_that_a_container_may_use(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == expected
    monkeypatch.undo()
    assert available_cores() >= 1


def test_the_example_on_gsm8k_reads_a_hub_dataset_with_the_lines_in_its_comment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRINITY_MQ_GSM8K", raising=False)
    monkeypatch.setenv("TRINITY_MQ_MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
    example = Path(__file__).parents[3] / "examples" / "gsm8k.yaml"
    _, _, recipe = example.read_text(encoding="utf-8").partition("From a Hugging Face dataset instead")
    comment = [line for line in recipe.split("\n\n")[0].splitlines()[1:] if line.startswith("#   buffer.")]
    words = [word for line in comment for word in line.removeprefix("#").split()]
    buffer = load_config(example, words).buffer
    found = [(data.storage_type, data.path, data.subset_name, data.split) for data in buffer.training_tasksets]
    found += [(data.storage_type, data.path, data.subset_name, data.split) for data in buffer.eval_tasksets]
    assert found == [("huggingface", "openai/gsm8k", "main", split) for split in ("train", "test")]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trainer.nproc=2"], "only the state of a single process can leave the card"),
        (["synchronizer.backend=nccl"], "needs a separate card for each side"),
        (["synchronizer.sync_style=fully_async"], "set synchronizer.pause_mode to wait or abort"),
        (["explorer.rollout_model.engine=vllm", "model.lora={r: 4, sync: adapter}"], "model.lora.sync to merged"),
        (["mode=explore"], "only in mode both"),
    ],
)
def test_sharing_a_card_in_turns_is_refused_where_it_cannot_work(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config("synchronizer.colocated=true", *overrides)


@pytest.mark.parametrize("style", ["fixed", "trainer_driven", "explorer_driven"])
def test_a_card_can_be_shared_in_each_style_whose_requests_end_before_a_pause(style: str) -> None:
    assert config("synchronizer.colocated=true", f"synchronizer.sync_style={style}").synchronizer.colocated

"""Loading a configuration, and errors that teach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import Config, ConfigError, escape_interpolations, load_config, load_stages
from trinity_mq.config.loading.load import load_yaml

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
    assert "s3cr3t" not in str(caught.value), "a password"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("model: {tiny: {}}\nbuffer: {batch_size: 0, total_step: 3}\n", 2),
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

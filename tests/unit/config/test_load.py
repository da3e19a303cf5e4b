"""Loading a configuration, and errors that teach."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.config import Config, ConfigError, escape_interpolations, load_config, load_stages
from trinity_mq.config.loading.load import load_yaml

TINY = {"model": {"tiny": {}}}
EVAL = {**TINY, "buffer": {"eval_tasksets": [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}]}}


@pytest.mark.parametrize(
    ("data", "overrides", "parts"),
    [
        ({**TINY, "bufer": {}}, [], ["bufer: unknown key", "did you mean 'buffer'"]),
        ({"model": {"tiny": {"hidden": 3}}}, [], ["model.tiny.hidden", "hidden_size"]),
        ({"model": {}}, [], ["exactly one of model_path"]),
        (TINY, ["buffer.batch_siz=3"], ["buffer.batch_siz", "'batch_size'"]),
        (TINY, ["buffer.eval_tasksets=[{name: a, pth: b}]"], ["buffer.eval_tasksets.0.pth", "'path'"]),
        (TINY, ["buffer.batch_size=0"], ["buffer.batch_size", "greater than or equal to 1", "got 0"]),
        (TINY, ["synchronizer.max_staleness=0", "synchronizer.sync_offset=2"], ["max_staleness is 0", "2 steps old"]),
        (TINY, ["algorithm.repeat_times=1"], ["repeat_times is 1", "at least 2"]),
        (TINY, ["algorithm.repeat_times=2", "algorithm.min_group_runs=3"], ["min_group_runs is 3"]),
        (
            TINY,
            ["explorer.max_timeout=50000", "explorer.batch_timeout=2e5", "explorer.stall_timeout=2e5"],
            ["hold a slice for 150610 s", "50000 s x 3 tries", "broker.consumer_timeout is 86400 s", "raise that"],
        ),
        (TINY, ["broker.consumer_timeout=1700"], ["hold a batch for 1760 s", "operator.timeout 800 s, 3 x"]),
        (TINY, ["buffer.batch_size=98000"], ["98000 slices", "explorer.max_repeat_times_per_runner", "8388608"]),
        (
            TINY,
            ["buffer.batch_size=40000", "explorer.refill.max=1.5"],
            ["batch_size 40000 with explorer.refill.max 1.5 makes batches of 100000 slices", "8388608"],
        ),
        (TINY, ["explorer.refill.max=-1"], ["explorer.refill.max", "greater than or equal to 0", "got -1"]),
        (TINY, ["explorer.batch_timeout=10"], ["times must grow"]),
        (TINY, ["explorer.rollout_model.top_p=0.9"], ["top_p", "allow_truncated_sampling"]),
        (TINY, ["trainer.save_interval=100000"], ["ready_max_bytes"]),
        (TINY, ["name=Not Allowed"], ["name:", "Not Allowed"]),
        (TINY, ["nonsense"], ["section.key=value"]),
        (TINY, ["mode=teach"], ["mode: ", "'both'"]),
        (TINY, ["buffer={seed: 1, seed: 2}"], ["override 'buffer={seed: 1, seed: 2}': key 'seed' is given twice"]),
        (TINY, ["run_dir=${env:TMQ_NOT_SET}"], ["run_dir", "TMQ_NOT_SET is not set", "${oc.env:TMQ_NOT_SET,default}"]),
        (TINY, ["run_dir=${oc.env:TMQ_NOT_SET}"], ["run_dir", "TMQ_NOT_SET is not set"]),
        (TINY, ["run_dir=${oc.enf:HOME}"], ["run_dir: Unsupported interpolation type oc.enf", "${oc.env:NAME,"]),
        (TINY, ["run_dir=${nothing.here}"], ["run_dir: Interpolation key 'nothing.here' not found", "plain ${"]),
        (TINY, ["run_dir=x${y"], ["run_dir: ", "wanted ${oc.env:NAME,default}"]),
        (TINY, ["model.tiny.characters=abcb"], ["model.tiny.characters", "holds 'b' more than once"]),
        (TINY, ["model.tiny.characters=''"], ["model.tiny.characters", "is empty"]),
        (EVAL, ["buffer.eval_tasksets.2.limit=8"], ["buffer.eval_tasksets has 2 items", "'2' is not one"]),
        (EVAL, ["buffer.eval_tasksets.math.limit=8"], ["buffer.eval_tasksets has 2 items", "'math' is not one"]),
        (TINY, ["trainer.nproc=2", "algorithm.optimizer.optimizer_type=muon"], ["nproc is 2", "muon", "adamw or sgd"]),
        (TINY, ["trainer.nproc=2", "algorithm.reference.offload=true"], ["nproc is 2", "reference.offload"]),
        (
            TINY,
            ["buffer.taskset={path: a, data_selector: {selector_type: difficulty_based, feature_keys: [weak]}}"],
            ["buffer.taskset.data_selector.feature_keys.1: Field required"],
        ),
        (EVAL, ["buffer.eval_tasksets.0.limt=8"], ["buffer.eval_tasksets.0.limt: unknown key", "'limit'"]),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong_and_what_is_right(
    data: dict[str, object], overrides: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(data, overrides)
    for part in parts:
        assert part in str(caught.value)


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

"""Stages of one file: merging, names, the model of the next one, and errors that teach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import ConfigError, load_config, load_stages
from trinity_mq.config.loading.stages import find_stage, merged

BASE: dict[str, Any] = {
    "name": "digits",
    "model": {"tiny": {"hidden_size": 32}, "max_model_len": 32, "max_prompt_tokens": 16, "max_response_tokens": 4},
    "algorithm": {"algorithm_type": "grpo", "clip_range_low": 0.1},
    "buffer": {"batch_size": 8, "total_steps": 9, "taskset": {"storage_type": "synthetic", "path": "max3"}},
}


def staged(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**BASE, **more, "stages": list(stages)}


def test_each_stage_has_the_settings_of_the_file_with_its_own_over_them() -> None:
    data = staged({"stage_name": "a", "buffer": {"total_steps": 2}}, {"stage_name": "b", "seed": 5})
    assert load_stages(BASE) == []
    with pytest.raises(ConfigError, match="holds stages, each a separate run"):
        load_config(data)
    first, second = load_stages(data, ["buffer.batch_size=4"])
    assert (first.config.name, first.config.path) == ("digits-a", Path("runs/digits-a"))
    assert (first.config.buffer.total_steps, second.config.buffer.total_steps) == (2, 9)
    assert [one.config.buffer.batch_size for one in (first, second)] == [4, 4]
    for override, seeds in (("seed=0", [0, 5]), ("seed=7", [7, 5]), ("stages.0.seed=8", [8, 5])):
        assert [one.config.seed for one in load_stages(data, [override])] == seeds, "of those without their own, or one"
    first, second = load_stages({**data, "run_dir": "/elsewhere/x/"})
    assert [one.config.run_dir for one in (first, second)] == ["/elsewhere/x-a", "/elsewhere/x-b"]
    assert second.config.model.model_path == "/elsewhere/x-a/final"


def test_a_stage_begins_with_the_model_of_the_one_before() -> None:
    first, second, third = load_stages(
        staged({"stage_name": "a"}, {"stage_name": "b"}, {"stage_name": "c", "model": {"max_model_len": 40}}),
    )
    assert (first.begins_with, second.begins_with) == (None, "a")
    assert [stage.config.model.tiny is None for stage in (first, second)] == [False, True]
    assert second.config.model.model_path == str(Path("runs/digits-a/final").absolute())
    assert (third.config.model.model_path or "").endswith("runs/digits-b/final")
    assert (third.config.model.max_model_len, third.config.model.max_prompt_tokens) == (40, 16)


def test_another_algorithm_takes_no_pieces_of_the_files() -> None:
    gspo = {"algorithm": {"algorithm_type": "gspo"}}
    kept, replaced = load_stages(
        staged({"stage_name": "a", "algorithm": {"repeat_times": 4}}, {"stage_name": "b", **gspo})
    )
    assert kept.config.algorithm.surrogate.low == 0.1  # type: ignore[union-attr]
    assert kept.config.algorithm.repeat_times == 4
    alone = load_config({**BASE, **gspo})
    assert replaced.config.algorithm == alone.algorithm


def test_one_of_several_alternatives_takes_the_place_of_the_others() -> None:
    assert merged({"buffer": {"total_steps": 3}}, {"buffer": {"total_epochs": 2}}) == {"buffer": {"total_epochs": 2}}
    assert merged({"model": {"tiny": {}, "dtype": "float32"}}, {"model": {"model_path": "m"}}) == {
        "model": {"dtype": "float32", "model_path": "m"}
    }
    assert merged({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}


@pytest.mark.parametrize(
    ("file", "stage", "result"),
    [
        ({"tiny": {"characters": "a"}}, {"tiny": {"num_experts": 4}}, {"tiny": {"characters": "a", "num_experts": 4}}),
        ({"taskset": {"path": "a", "split": ""}}, {"taskset": {"path": "b"}}, {"taskset": {"path": "b", "split": ""}}),
        ({}, {"total_steps": 3, "total_epochs": 2}, {"total_steps": 3, "total_epochs": 2}),
    ],
)
def test_an_alternative_that_the_stage_sets_itself_is_merged(
    file: dict[str, Any], stage: dict[str, Any], result: dict[str, Any]
) -> None:
    assert merged(file, stage) == result


@pytest.mark.parametrize(
    ("stages", "overrides", "parts"),
    [
        ([], [], ["stages: wanted a list", "[]"]),
        ("sft", [], ["stages: wanted a list", "'sft'"]),
        ([{"mode": "both"}], [], ["stages.0", "stage_name", "'mode': 'both'"]),
        ([{"stage_name": "a"}, {"stage_name": "a"}], [], ["stages.1", "'a'", "a different name"]),
        ([{"stage_name": "a", "name": "b"}], [], ["stages.0.name", "stage_name"]),
        ([{"stage_name": "a", "run_dir": "b"}], [], ["stages.0.run_dir", "run_dir of the file"]),
        ([{"stage_name": "A b"}], [], ["stage A b: name", "'digits-A b'"]),
        ([{"stage_name": "a", "bufer": {}}], [], ["stage a: bufer: unknown key", "'buffer'"]),
        ([{"stage_name": "a", "seed": 1}], ["seed=3"], ["override seed", "no effect", "stages.0.seed=3"]),
        (
            [{"stage_name": "a", "broker": {"url": "b"}}],
            ["broker.url=amqp://u:p@h"],
            ["stages.0.broker.url=amqp://u:***@h"],
        ),
    ],
)
def test_errors_teach(stages: Any, overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_stages({**BASE, "stages": stages}, overrides)
    for part in parts:
        assert part in str(caught.value)


def test_a_stage_is_found_by_its_name() -> None:
    stages = load_stages(staged({"stage_name": "warmup"}, {"stage_name": "b"}))
    assert find_stage(stages, "b").name == "b"
    with pytest.raises(ConfigError, match="did you mean 'warmup'"):
        find_stage(stages, "warm")
    with pytest.raises(ConfigError, match="there are warmup, b"):
        find_stage(stages, "xyz")

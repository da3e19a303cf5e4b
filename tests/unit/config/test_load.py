"""Loading a configuration, and errors that teach."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.config import Config, ConfigError, load_config

TINY = {"model": {"tiny": {}}}


@pytest.mark.parametrize(
    ("data", "overrides", "parts"),
    [
        ({**TINY, "bufer": {}}, [], ["bufer: unknown key", "did you mean 'buffer'"]),
        ({"model": {"tiny": {"hidden": 3}}}, [], ["model.tiny.hidden", "hidden_size"]),
        ({"model": {}}, [], ["either model_path"]),
        (TINY, ["buffer.batch_siz=3"], ["buffer.batch_siz", "'batch_size'"]),
        (TINY, ["buffer.eval_tasksets=[{name: a, pth: b}]"], ["buffer.eval_tasksets.0.pth", "'path'"]),
        (TINY, ["buffer.batch_size=0"], ["buffer.batch_size", "greater than or equal to 1", "got 0"]),
        (TINY, ["synchronizer.max_staleness=0", "synchronizer.sync_offset=2"], ["max_staleness is 0", "2 steps old"]),
        (TINY, ["algorithm.repeat_times=1"], ["repeat_times is 1", "at least 2"]),
        (TINY, ["algorithm.repeat_times=2", "algorithm.min_group_runs=3"], ["min_group_runs is 3"]),
        (TINY, ["explorer.max_timeout=700"], ["2100 s", "1800 s"]),
        (TINY, ["operator.timeout=1800"], ["operator.timeout is 1800 s", "must be less"]),
        (TINY, ["buffer.batch_size=98000"], ["98000 slices", "explorer.max_repeat_times_per_runner", "8388608"]),
        (TINY, ["explorer.batch_timeout=10"], ["times must grow"]),
        (TINY, ["explorer.rollout_model.top_p=0.9"], ["top_p", "allow_truncated_sampling"]),
        (TINY, ["trainer.save_interval=100000"], ["ready_max_bytes"]),
        (TINY, ["name=Not Allowed"], ["name:", "Not Allowed"]),
        (TINY, ["nonsense"], ["section.key=value"]),
        (TINY, ["run_dir=${env:TMQ_NOT_SET}"], ["run_dir", "TMQ_NOT_SET is not set"]),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong_and_what_is_right(
    data: dict[str, object], overrides: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(data, overrides, environ={})
    for part in parts:
        assert part in str(caught.value)


def test_every_finding_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {tiny: {}}\nbuffer: {batch_size: 0, total_step: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(str(path)) for line in lines)


@pytest.mark.parametrize("text", [None, "a: [", "- 1\n", "\x00"])
def test_an_unusable_file_is_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 1


def test_overrides_and_environment() -> None:
    config = load_config(
        {**TINY, "broker": {"url": "amqp://u:${env:SECRET}@h/"}, "run_dir": "${env:NOWHERE:there}"},
        ["buffer.total_steps=7", "algorithm.optimizer.lr=1e-3"],
        environ={"SECRET": "s"},
    )
    assert config.buffer.total_steps == 7
    assert config.algorithm.optimizer.lr == 1e-3
    assert config.broker.url == "amqp://u:s@h/"
    assert config.path == Path("there")


def test_it_survives_its_own_dump() -> None:
    config = load_config(TINY)
    assert Config.model_validate(config.model_dump()) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_the_one_mode_of_the_reference_system_is_accepted_and_no_other() -> None:
    assert load_config({**TINY, "mode": "both"}) == load_config(TINY)
    with pytest.raises(ConfigError, match="mode: unknown key"):
        load_config({**TINY, "mode": "train"})

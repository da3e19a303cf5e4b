from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.config.threads import available_cores, cpu_threads

AUXILIARY = {"name": "judge", "model": {"tiny": {}}}


def config(*overrides: str, auxiliary: int = 0) -> Config:
    data = {"name": "w", "model": {"tiny": {}}}
    if auxiliary:
        data["explorer"] = {"auxiliary_models": [{**AUXILIARY, "engine_num": auxiliary}]}
    return load_config(data, overrides)


@pytest.mark.parametrize(
    ("cores", "overrides", "auxiliary", "expected"),
    [
        (2, (), 0, 1),
        (1, (), 0, 1),
        (16, (), 0, 8),
        (16, ("trainer.nproc=2",), 0, 5),
        (16, ("explorer.rollout_model.engine_num=3",), 0, 4),
        (16, (), 2, 4),
        (2, ("explorer.rollout_model.engine_num=8",), 0, 1),
    ],
)
def test_trainer_and_engines_share_the_cores(
    cores: int, overrides: tuple[str, ...], auxiliary: int, expected: int
) -> None:
    assert cpu_threads(config(*overrides, auxiliary=auxiliary), "auto", cores) == expected


def test_a_number_is_that_number() -> None:
    assert cpu_threads(config(), 7) == 7
    assert config("trainer.num_threads=3").trainer.num_threads == 3
    assert config().trainer.num_threads == "auto"


def test_external_engines_compute_elsewhere() -> None:
    external = {"name": "judge", "engine": "external", "url": "http://127.0.0.1:1/v1"}
    run = load_config({"name": "w", "model": {"tiny": {}}, "explorer": {"auxiliary_models": [external]}})
    assert cpu_threads(run, "auto", 8) == 4


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


def test_this_process_has_cores() -> None:
    assert available_cores() >= 1

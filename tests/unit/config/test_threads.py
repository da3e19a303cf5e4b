from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.config.threads import available_cores, cpu_threads

JUDGE, ELSEWHERE = "{name: j, model: {tiny: {}}, engine_num: 2}", "{name: j, engine: external, url: 'http://h/v1'}"


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
        (16, f"explorer.auxiliary_models=[{JUDGE}]", 4),
        (8, f"explorer.auxiliary_models=[{ELSEWHERE}]", 4),
        (2, "explorer.rollout_model.engine_num=8", 1),
    ],
)
def test_trainer_and_engines_share_the_cores(cores: int, override: str, expected: int) -> None:
    assert cpu_threads(config(override), "auto", cores) == expected
    assert cpu_threads(config(override), 7) == 7


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

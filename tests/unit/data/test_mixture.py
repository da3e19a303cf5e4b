"""Several tasksets as one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trinity_mq.config import BufferConfig, TasksetConfig
from trinity_mq.data import Taskset, TasksetError, TasksetMixture, TaskStats, open_taskset
from trinity_mq.data.mixture import shares


def taskset(folder: Path, name: str, size: int, seed: int = 5, **keys: Any) -> Taskset:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"question": i, "answer": ""}) + "\n" for i in range(size)))
    config = {"name": name, "path": str(path), "workflow": f"{name}_workflow", **keys}
    return open_taskset(TasksetConfig.model_validate(config), seed=seed)


def mixture(folder: Path, sizes: dict[str, int], seed: int = 5, **ratios: float) -> TasksetMixture:
    return TasksetMixture([taskset(folder, name, sizes[name], seed, ratio=ratios.get(name)) for name in sizes], seed)


def taken(tasks: TasksetMixture, size: int) -> list[tuple[str, int]]:
    return [(body.index["taskset"], body.index["index"]) for body in tasks.next_batch(size)]


def test_an_epoch_gives_every_task_of_every_set_once_in_mixed_order(tmp_path: Path) -> None:
    tasks = mixture(tmp_path, {"a": 12, "b": 6})
    assert len(tasks) == 18
    first, second = taken(tasks, 18), taken(tasks, 18)
    assert sorted(first) == sorted(second) == [*(("a", i) for i in range(12)), *(("b", i) for i in range(6))]
    assert [name for name, _ in first] not in ([name for name, _ in second], ["a"] * 12 + ["b"] * 6)
    assert {body.workflow for body in tasks.next_batch(18)} == {"a_workflow", "b_workflow"}


def test_ratios_say_how_many_tasks_come_from_each(tmp_path: Path) -> None:
    tasks = mixture(tmp_path, {"a": 16, "b": 4}, a=1.0, b=1.0)
    found = taken(tasks, 40)
    assert Counter(name for name, _ in found) == {"a": 20, "b": 20}
    assert Counter(found)["b", 0] == 5
    with pytest.raises(TasksetError, match=r"'b': a ratio of 0\.001 gives it no task among the 20"):
        mixture(tmp_path, {"a": 16, "b": 4}, a=1.0, b=0.001)


@pytest.mark.parametrize("killed", range(0, 60, 7))
def test_killed_anywhere_it_goes_on_as_if_it_had_not_been(tmp_path: Path, killed: int) -> None:
    sizes = {"a": 7, "b": 5, "c": 1}
    tasks, again = mixture(tmp_path, sizes), mixture(tmp_path, sizes)
    taken(tasks, killed)
    again.restore(json.loads(json.dumps(tasks.state())))
    assert taken(again, 9) == taken(tasks, 9)
    assert again.state() == tasks.state()


def test_a_position_of_other_tasksets_is_refused(tmp_path: Path) -> None:
    state = mixture(tmp_path, {"a": 7, "b": 5}).state()
    with pytest.raises(TasksetError, match="belongs to turns"):
        mixture(tmp_path, {"a": 7}).restore(state)
    with pytest.raises(TasksetError, match=r"'b': the records of .* have changed .*: 1 were appended to the 5"):
        mixture(tmp_path, {"a": 7, "b": 6}).restore(state)
    with pytest.raises(TasksetError, match="belongs to seed 5"):
        mixture(tmp_path, {"a": 7, "b": 5}, seed=6).restore(state)


def test_a_position_of_one_taskset_is_not_taken_for_a_position_of_several(tmp_path: Path) -> None:
    several, single = mixture(tmp_path, {"a": 7, "b": 5}), taskset(tmp_path, "a", 7)
    with pytest.raises(TasksetError, match=r"belongs to a single taskset .*tasksets: a, b\); put .*--fresh"):
        several.restore(single.state())
    with pytest.raises(TasksetError, match=r"'a': .* belongs to several tasksets .*: a, b\), .*--fresh"):
        single.restore(several.state())


def test_each_selector_is_told_of_its_own_tasks(tmp_path: Path) -> None:
    selector = {"selector_type": "difficulty_pools", "pools": [{"threshold": 0, "weight": 1}]}
    tasks = TasksetMixture([taskset(tmp_path, name, 1, data_selector=selector) for name in "ab"], 0)
    assert tasks.learns
    tasks.observe({"b": [TaskStats(0, 1.0, 2)]})
    metrics = tasks.metrics()
    assert (metrics["selector/a/observed_tasks"], metrics["selector/b/observed_tasks"]) == (0, 1)


def test_shares_are_whole_and_within_one_of_the_ratio() -> None:
    ratios = [1, 2.5, 0.3, 4]
    for total in range(1, 40):
        found = shares(ratios, total)
        assert sum(found) == total
        assert all(abs(part - ratio / 7.8 * total) < 1 for part, ratio in zip(found, ratios, strict=True))


A: dict[str, Any] = {"name": "a", "path": "a.jsonl"}
B: dict[str, Any] = {"name": "b", "path": "b.jsonl"}


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        ({"tasksets": [A, A]}, "different names"),
        ({"tasksets": [A, B], "taskset": A}, "both given"),
        ({"tasksets": [A, B | {"ratio": 1}]}, "give a ratio to all of them or to none"),
        ({"tasksets": [A, {"name": "q", "storage_type": "queue"}]}, "q of storage_type queue hold no tasks"),
        ({"taskset": A | {"ratio": 1}}, "no meaning with a single taskset"),
        ({"eval_tasksets": [A | {"data_selector": {"selector_type": "random"}}]}, "every task is run once"),
    ],
)
def test_bad_settings_are_refused(buffer: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        BufferConfig.model_validate(buffer)

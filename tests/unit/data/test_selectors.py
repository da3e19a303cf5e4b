"""Every selector: its order, what it learns, and that it goes on where it was killed."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.unit.algorithms.vectors import VECTORS
from trinity_mq.config import TasksetConfig, load_config
from trinity_mq.config.buffer.selectors import DifficultyBasedSelector
from trinity_mq.data import Taskset, TasksetError, TaskStats, open_taskset
from trinity_mq.data.selectors.difficulty_based import DifficultyBased, PassRates, probabilities
from trinity_mq.runtime.plugins import add_plugins, resolve

POOLS = [{"threshold": 0.0, "weight": 0.5}, {"threshold": 0.25, "weight": 3.0}, {"threshold": 0.75, "weight": 0.0}]
SELECTORS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "shuffle": {},
    "random": {},
    "offline_easy2hard": {"feature_keys": ["weak"]},
    "difficulty_based": {"feature_keys": ["weak", "strong"]},
    "thompson": {"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"], "do_sample": True},
    "closest": {"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"], "tau": 0.0},
    "difficulty_pools": {"pools": POOLS},
}
BY_EPOCH = ["sequential", "shuffle", "offline_easy2hard"]
COUNT = 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [{"question": f"q{i}", "answer": "", "weak": i % 5 / 10, "strong": 0.5 + i % 4 / 10} for i in range(COUNT)]
    found = tmp_path / "tasks.jsonl"
    found.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def opened(path: Path, name: str, *, seed: int = 7, **more: Any) -> Taskset:
    selector = {"selector_type": name, **SELECTORS.get(name, {}), **more}
    return open_taskset(TasksetConfig.model_validate({"path": str(path), "data_selector": selector}), seed=seed)


def taken(taskset: Taskset, size: int) -> list[int]:
    return [body.index["index"] for body in taskset.next_batch(size)]


CLASS_FORM = """
from typing import Dict, List

import numpy as np

from trinity_mq.data.selectors import SELECTORS, BaseSelector


@SELECTORS.register_module("rising")
class Rising(BaseSelector):
    def __init__(self, data_source, config):
        super().__init__(data_source, config)
        self.bias = config.kwargs.get("bias", 0.0) + config.seed
        self.features = np.array(list(data_source.dataset[config.feature_keys[0]]))
        self.values = np.zeros(data_source.dataset_size)
        self.current_index = 0

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> List[int]:
        order = np.lexsort([self.features, np.roll(self.values, self.current_index) + self.bias])
        self.current_index += batch_size
        return np.resize(order, batch_size)

    def feedback(self, indices: List[int], values: List[float]) -> None:
        self.values[indices] = values

    def state_dict(self) -> Dict:
        return {"current_index": np.int64(self.current_index)}

    def load_state_dict(self, state_dict: Dict) -> None:
        self.current_index = state_dict.get("current_index", 0)
"""
RISING: dict[str, Any] = {"feature_keys": ["weak"], "kwargs": {"bias": 0.5}}


@pytest.fixture
def rising(tmp_path: Path, fresh_imports: None) -> Path:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "selector_class_plugin.py").write_text(CLASS_FORM)
    add_plugins([str(tmp_path / "plugins")])
    return tmp_path / "plugins"


def test_a_selector_in_class_form_chooses_as_a_direct_call(rising: Path, path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kind = resolve("selector", "selector_class_plugin.Rising")
    data = SimpleNamespace(
        dataset={key: [row[key] for row in rows] for key in rows[0]}, dataset_size=len(rows), name="tasks"
    )
    direct = kind(data, SimpleNamespace(seed=7, feature_keys=["weak"], kwargs={"bias": 0.5}))
    taskset = opened(path, "selector_class_plugin.Rising", **RISING)
    for step, size in enumerate((5, 5, 12, 30)):
        chosen = taken(taskset, size)
        assert chosen == direct.get_indices(size).tolist()
        results = [outcome(index, step) for index in dict.fromkeys(chosen)]
        taskset.observe({"train": results})
        direct.feedback([result.task for result in results], [result.reward for result in results])


def test_a_selector_in_class_form_resumes_from_its_position_and_its_results(rising: Path, path: Path) -> None:
    whole, observed = opened(path, "selector_class_plugin.Rising", **RISING), list[Any]()
    for step in range(3):
        observed.append({"train": [outcome(index, step) for index in taken(whole, 5)]})
        whole.observe(observed[-1])
    again = opened(path, "selector_class_plugin.Rising", **RISING)
    for stats in observed:
        again.observe(stats)
    again.restore(json.loads(json.dumps(whole.state())))
    assert [taken(again, 4), taken(again, 4)] == [taken(whole, 4), taken(whole, 4)]


def test_a_registered_selector_is_chosen_by_its_name(rising: Path, path: Path) -> None:
    taskset = {"path": str(path), "data_selector": {"selector_type": "rising", **RISING}}
    config = load_config({"plugin_dirs": [str(rising)], "model": {"model_path": "m"}, "buffer": {"taskset": taskset}})
    selector = config.buffer.taskset.effective_selector
    assert selector.selector_type == "selector_class_plugin.Rising"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [0, 1]", r"chose \[0, 1\], wanted 5 indexes from 0 to 11; fix selector_wrong_plugin\.Wrong"),
        ("return range(8, 13)", r"wanted 5 indexes from 0 to 11"),
        ("return None", r"get_indices returns None, wanted a list of numbers"),
        ("raise KeyError(3)", r"get_indices raised KeyError"),
    ],
)
def test_a_selector_in_class_form_that_chooses_no_tasks_is_one_error(
    rising: Path, path: Path, body: str, message: str
) -> None:
    (rising / "selector_wrong_plugin.py").write_text(
        "class Wrong:\n    def __init__(self, data_source, config): ...\n"
        f"    def get_indices(self, batch_size):\n        {body}\n"
    )
    taskset = opened(path, "selector_wrong_plugin.Wrong")
    with pytest.raises(TasksetError, match=rf"(?=.*selector_wrong_plugin\.Wrong).*{message}"):
        taskset.next_batch(5)


def outcome(index: int, step: int) -> TaskStats:
    return TaskStats(index, random.Random(100 * step + index).random(), 4)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("sizes", [(5, 5, 5, 5, 5, 5), (12, 1, 30, 7)])
def test_killed_at_any_batch_it_goes_on_as_if_it_had_not_been(path: Path, name: str, sizes: tuple[int, ...]) -> None:
    whole, log, states, batches = opened(path, name), list[Any](), list[Any](), list[list[int]]()
    for step, size in enumerate(sizes):
        states.append((json.loads(json.dumps(whole.state())), list(log)))
        batches.append(taken(whole, size))
        log.append({"train": [outcome(index, step) for index in batches[-1]]})
        whole.observe(log[-1])
    for begun, (state, observed) in enumerate(states):
        again = opened(path, name)
        for stats in observed:
            again.observe(stats)
        again.restore(state)
        for step in range(begun, len(sizes)):
            assert taken(again, sizes[step]) == batches[step]
            again.observe(log[step])
        assert again.state() == whole.state()
        assert again.metrics() == whole.metrics()


@pytest.mark.parametrize("name", BY_EPOCH)
@pytest.mark.parametrize("size", [1, 5, 12, 17])
def test_by_epoch_no_task_is_lost_and_none_comes_twice(path: Path, name: str, size: int) -> None:
    order, state = list[int](), None
    while len(order) < 5 * COUNT:  # a new process for each batch
        taskset = opened(path, name)
        if state is not None:
            taskset.restore(state)
        order += taken(taskset, size)
        state = taskset.state()
    for begin in range(0, 5 * COUNT, COUNT):
        assert sorted(order[begin : begin + COUNT]) == list(range(COUNT))
    assert (order[:COUNT] == order[COUNT : 2 * COUNT]) == (name != "shuffle")


def test_a_position_of_an_earlier_release_is_taken_up(path: Path) -> None:
    taskset = open_taskset(TasksetConfig(path=str(path)), seed=3)
    first = taken(taskset, 30)
    saved = {"identity": taskset.identity, "seed": 3, "selector": "shuffle", "epoch": 1, "cursor": COUNT}
    again = open_taskset(TasksetConfig(path=str(path)), seed=3)
    again.restore(saved)
    assert taken(again, 6) == first[24:]
    order = list(range(COUNT))
    random.Random(3).shuffle(order)
    assert first[:COUNT] == order


def test_random_gives_no_task_twice_in_a_batch_and_other_batches_by_seed(path: Path) -> None:
    taskset = opened(path, "random")
    batches = [taken(taskset, 10) for _ in range(20)]
    assert all(len(set(batch)) == 10 for batch in batches)
    assert len({tuple(batch) for batch in batches}) == 20
    short = open_taskset(TasksetConfig.model_validate({"path": str(path), "selector": "random"}), seed=7)
    assert taken(short, 10) == batches[0], "its name alone is enough"
    assert taken(opened(path, "random", seed=8), 10) != batches[0]
    assert Counter(taken(opened(path, "random"), 24)) == dict.fromkeys(range(COUNT), 2)


def test_easy_to_hard_sorts_by_the_features_and_then_by_place(path: Path) -> None:
    order = taken(opened(path, "offline_easy2hard"), COUNT)
    assert order == [4, 9, 3, 8, 2, 7, 1, 6, 11, 0, 5, 10]
    order = taken(opened(path, "offline_easy2hard", feature_keys=["weak", "strong"]), COUNT)
    assert order == sorted(range(COUNT), key=lambda i: (-(i % 5), -(i % 4), i))


def test_the_posteriors_are_those_of_the_vector_and_the_draws_follow_them() -> None:
    case = VECTORS["selector/difficulty_based"]
    args, inputs, wanted = case["args"], case["inputs"], case["expected"]
    rates = PassRates(np.array(inputs["features"]), args["m"], args["lamb"], args["rho"])
    rates.update(inputs["indices"], inputs["pass_rates"])
    assert rates.capability == pytest.approx(wanted["capability"], rel=1e-12)
    assert rates.alphas == pytest.approx(wanted["alphas"], rel=1e-12)
    assert rates.betas == pytest.approx(wanted["betas"], rel=1e-12)
    assert rates.predicted() == pytest.approx(wanted["predicted"], rel=1e-12)
    found = probabilities(rates.predicted(), args["target_reward"], args["tau"])
    assert found == pytest.approx(wanted["probabilities"], rel=1e-12)
    config = DifficultyBasedSelector(feature_keys=("a", "b"))
    selector = DifficultyBased(np.array([[0.2, 0.8], [0.5, 0.9], [0.1, 0.4]]), config, seed=0)
    selector.observe([TaskStats(0, 0.5, 16), TaskStats(1, 0.75, 16)])
    first = Counter(selector.next(1)[0] for _ in range(4000))
    wanted = probabilities(selector.rates.predicted(), 0.5, 0.1)
    assert [first[index] / 4000 for index in range(3)] == pytest.approx(wanted, abs=0.03)


def test_a_task_that_is_always_solved_or_never_is_passed_over_for_one_in_between(path: Path) -> None:
    solves = {index: 0.5 if index in {2, 5, 11} else float(index % 2) for index in range(COUNT)}
    for name in ("difficulty_based", "thompson", "closest"):
        taskset = opened(path, name)
        for _ in range(20):
            batch = taken(taskset, COUNT)
            taskset.observe({"train": [TaskStats(index, solves[index], 16) for index in batch]})
        counts = Counter(index for _ in range(20) for index in taken(taskset, 3))
        assert sum(counts[index] for index in (2, 5, 11)) > 50, name
        assert taskset.metrics()["selector/train/observed_tasks"] == COUNT


def test_pools_are_drawn_from_by_their_weights(path: Path) -> None:
    taskset = opened(path, "difficulty_pools")
    rewards = dict(enumerate([-1.0, 0.0, 0.2, 0.25, 0.5, 0.74, 0.75, 1.0]))
    taskset.observe({"train": [TaskStats(index, reward, 4) for index, reward in rewards.items()]})
    metrics = {name.removeprefix("selector/train/"): value for name, value in taskset.metrics().items()}
    assert metrics == {"pool/0": 3, "pool/0.25": 3, "pool/0.75": 2, "observed_tasks": 8}
    counts = Counter(taken(taskset, 14_500))
    weights = [0.5] * 3 + [3.0] * 3 + [0.0] * 2 + [1.0] * 4
    assert [counts[index] / 1000 for index in range(COUNT)] == pytest.approx(weights, abs=0.2)
    assert not counts[6] | counts[7]
    taskset.observe({"other": [TaskStats(1, 1.0, 4)], "train": [TaskStats(COUNT, 1.0, 4), TaskStats(-1, 1.0, 4)]})
    assert taskset.metrics()["selector/train/observed_tasks"] == 8, "unknown tasks and other tasksets say nothing"
    taskset.observe({"train": [TaskStats(7, 0.3, 4)]})  # the latest mean alone counts
    assert Counter(taken(taskset, 1000))[7] > 100
    taskset.observe({"train": [TaskStats(index, 1.0, 4) for index in range(COUNT)]})
    assert set(taken(taskset, 500)) == set(range(COUNT))  # all pools are off


def test_rho_is_halved_where_the_two_models_say_little() -> None:
    features = np.array([[0.0, 1.0]] * 4)
    fixed, adaptive = (PassRates(features, 16, 0.2, 0.2, adaptive=adapts) for adapts in (False, True))
    for rates in (fixed, adaptive):
        rates.update([0, 1], [0.5, 0.5])  # as interpolated
        assert rates.rho == 0.2
        rates.update([0, 1], [0.0, 1.0])  # half of the way in the mean, and wrong by a half for each
    assert (fixed.rho, adaptive.rho) == (0.2, 0.1)
    assert abs(adaptive.alphas[2] - 1) < abs(fixed.alphas[2] - 1), "what was not run has changed less"


def test_the_references_form_is_understood(path: Path) -> None:
    kwargs = {"m": 8, "tau": 0, "adaptive_rho": True}
    selector = {"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"], "kwargs": kwargs, "seed": 42}
    config = TasksetConfig.model_validate({"path": str(path), "data_selector": selector})
    assert config.data_selector == DifficultyBasedSelector(feature_keys=("weak", "strong"), seed=42, **kwargs)
    assert TasksetConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ({"selector_type": "hardest"}, "hardest"),
        ({"selector_type": "offline_easy2hard"}, "feature_keys"),
        ({"selector_type": "difficulty_based", "feature_keys": ["weak"]}, "feature_keys"),
        ({"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"], "kwargs": {"rho": 2}}, "rho"),
        ({"selector_type": "difficulty_based", "feature_keys": "ab", "rho": 0.1, "kwargs": {"rho": 0.2}}, "twice"),
        ({"selector_type": "difficulty_pools", "pools": []}, "pools"),
        ({"selector_type": "difficulty_pools", "pools": [POOLS[0]] * 2}, "each once"),
        ({"selector_type": "difficulty_pools", "pools": POOLS, "unseen_weight": 0}, "be chosen first"),
        ({"selector_type": "shuffle", "kwargs": [1]}, "wanted names with values"),
        ({"selector_type": "shuffle"}, "remove one of them"),
    ],
)
def test_bad_settings_are_refused(selector: dict[str, Any], said: str) -> None:
    given = {"selector": "random"} if said == "remove one of them" else {}
    with pytest.raises(ValidationError, match=said):
        TasksetConfig.model_validate({"path": "x", "data_selector": selector, **given})


@pytest.mark.parametrize(("row", "value"), [({"weak": 0.1}, "None"), ({"weak": 0.1, "strong": 1.5}, "1.5")])
def test_a_record_without_a_feature_is_named(tmp_path: Path, row: dict[str, float], value: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "a", **row}))
    with pytest.raises(TasksetError, match=f"record 0 has {value} at 'strong', wanted a number from 0 to 1"):
        opened(path, "difficulty_based")


@pytest.fixture
def hardest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's selector: that of docs/tasksets.md."""
    page = (Path(__file__).parents[3] / "docs" / "tasksets.md").read_text(encoding="utf-8")
    module = ModuleType("hardest")
    exec(page.partition("```python\n")[2].partition("```")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "hardest", module)
    return module


def test_the_selector_of_the_page_works_and_a_bad_one_is_named(path: Path, hardest: ModuleType) -> None:
    name = "hardest.Hardest"
    taskset, again = (opened(path, name, kwargs={"start": 0.5}) for _ in range(2))
    taskset.observe({"train": [TaskStats(7, 0.25, 2), TaskStats(3, 0.0, 2)]})
    assert taken(taskset, 3) == [3, 7, 0]
    assert taskset.metrics() == {"selector/train/lowest": 0.0}
    again.restore(json.loads(json.dumps(taskset.state())))
    assert again.state() == taskset.state()
    with pytest.raises(TasksetError, match=r"belongs to selector .*'start': 0.5.*this one has .*'start': 0.25"):
        opened(path, name, kwargs={"start": 0.25}).restore(taskset.state())
    with pytest.raises(TasksetError, match=r"Hardest' cannot be made .*unexpected keyword argument 'stop'"):
        opened(path, name, kwargs={"stop": 3})
    hardest.Broken = lambda rows, seed: rows[seed]["level"]
    with pytest.raises(TasksetError, match=r"Broken' cannot be made .*data_selector.kwargs\): KeyError: 'level' \("):
        opened(path, "hardest.Broken")
    with pytest.raises(ValueError, match="module 'hardest' has no 'None'"):
        opened(path, "hardest.None")
    kept: dict[str, int] = {}
    hardest.Hardest.state, hardest.Hardest.restore = lambda self: {"at": 3}, lambda self, state: kept.update(state)
    again.restore(json.loads(json.dumps(opened(path, name, kwargs={"start": 0.5}).state())))
    assert kept == {"at": 3}, "its position comes back after a kill"
    hardest.Hardest.next = lambda self, count: [COUNT] * count
    with pytest.raises(TasksetError, match=r"wanted 2 indexes from 0 to 11; fix hardest\.Hardest"):
        opened(path, name).next_batch(2)

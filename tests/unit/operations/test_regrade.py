"""``trinity-mq regrade``: what counts as a change, and reward functions that misbehave."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.world import experience
from trinity_mq.cli.main import main
from trinity_mq.config import Config, load_config
from trinity_mq.data.records import read_records
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.operations.regrade.comparison import Comparison, RegradedExperience
from trinity_mq.operators import AdvantageOperator

YAML = """
name: r
model: {tiny: {}}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  total_steps: 1
  taskset: {name: max3, storage_type: synthetic, path: max3, reward_fn: char_match, limit: 20}
"""


def graded(*rewards: tuple[float, float], group: str = "1/0") -> list[RegradedExperience]:
    return [
        RegradedExperience(f"{group}/{n}", group, old, new, old - 0.5, new - 0.5, f"answer {n}")
        for n, (old, new) in enumerate(rewards)
    ]


def figures_of(*groups: list[RegradedExperience]) -> dict[str, Any]:
    comparison = Comparison()
    for group in groups:
        comparison.add(group)
    return comparison.figures()


def test_rewards_of_0_and_1_are_a_confusion_table() -> None:
    figures = figures_of(graded((0, 0), (0, 1), (1, 1), (1, 1)), graded((1, 0), (1, 1), group="1/1"))
    assert figures["confusion"] == {"0": {"0": 1, "1": 1}, "1": {"0": 1, "1": 3}}
    assert figures["reward"] == {"old": pytest.approx(4 / 6), "new": pytest.approx(4 / 6)}
    assert (figures["experiences"], figures["changed"]) == (6, 2)
    assert figures["groups"] == {"count": 2, "inverted": 0, "gain_spread": 1, "lose_spread": 0}
    assert figures["advantage"]["sign_flips"] == 2
    assert "quantiles" not in figures
    changes = [(1, 0.0, 0.5), (0, 0.5, None), (0, 1, -1)]
    advantage = figures_of([RegradedExperience("a", "g", 1, *change) for change in changes])["advantage"]
    assert (advantage["sign_flips"], advantage["appear"], advantage["vanish"]) == (1, 1, 1), "appearing is no flip"


def test_orders_ties_spreads_and_what_changed_most() -> None:
    figures = figures_of(graded((0.2, 1.2), (0.8, 0.1), (0.2, 0.5)), graded((0.1, 0.3), (0.7, 0.3), group="2/0"))
    assert figures["pairs"] == {"compared": 4, "inverted": 2, "ties_broken": 1, "ties_made": 1}
    assert figures["groups"] == {"count": 2, "inverted": 1, "gain_spread": 0, "lose_spread": 1}
    assert figures["quantiles"][0] == {"quantile": 0.0, "old": 0.1, "new": 0.1}
    assert figures["quantiles"][3] == {"quantile": 0.5, "old": 0.2, "new": 0.3}
    assert [one["uid"] for one in figures["most_changed"][:2]] == ["1/0/0", "1/0/1"]
    many = figures_of([RegradedExperience(f"u{n}", "g", 0.0, n / 100) for n in range(100)])
    assert [one["uid"] for one in many["most_changed"]] == [f"u{n}" for n in range(99, 89, -1)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A configuration, and beside it a file with two groups of its first two tasks, rewarded and with advantages."""
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    (tmp_path / "seen.tmqx").write_bytes(recorded(load_config(path)).encode())
    return path


def recorded(config: Config) -> ExperienceBatch:
    from trinity_mq.rewards import create_reward, parts_of

    reward, records = create_reward("char_match", {}), read_records(config.buffer.taskset)[0]
    made: list[Experience] = []
    for task in range(2):
        truth = str(records[task]["answer"])
        for number, text in enumerate((truth, truth, "x", f"{truth}x")):
            one = experience(length=8, eid=EID(batch=1, task=task, run=number), response_text=text)
            one.taskset, one.index = "max3", task
            one.reward = sum(parts_of(reward, text, truth, finished=True).values())
            made.append(one)
    return AdvantageOperator(config.algorithm).apply(ExperienceBatch.of(made))[0]


def regraded(
    capsys: pytest.CaptureFixture[str], run: Path, reward: str, *words: str
) -> tuple[int, dict[str, Any], str]:
    file = str(run.with_name("seen.tmqx"))
    code = main(["regrade", str(run), "--reward", reward, "--file", file, "--json", "-", *words])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_the_same_function_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, figures, _ = regraded(capsys, run, "char_match")
    assert (code, figures["experiences"], figures["changed"]) == (0, 8, 0)
    assert figures["not_regraded"] == {}
    advantage = figures["advantage"]
    assert advantage["old_abs_mean"] == pytest.approx(advantage["new_abs_mean"])
    assert advantage["old_abs_mean"] > 0.1
    assert figures["most_changed"] == []


def test_another_one_changes_rewards_and_advantages(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, figures, _ = regraded(capsys, run, f"{__name__}.wrong_is_right")
    assert code == 0
    assert figures["reward"]["new"] == pytest.approx(0.5)
    assert figures["groups"]["inverted"] == 2
    assert figures["advantage"]["sign_flips"] == 8
    assert main(["regrade", str(run), "--reward", "exact_match", "--file", str(run.with_name("seen.tmqx"))]) == 0
    assert "8 of 8 experiences in 1 batches, by exact_match" in capsys.readouterr().out


def wrong_is_right(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    return {"wrong": float(response != truth)}


def raises_on_x(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    if response == "x":
        raise ValueError("no number")
    return {"accuracy": 1.0}


def blocks_on_x(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    while response == "x":
        time.sleep(0.01)
    return {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (raises_on_x, "the reward function raised ValueError: no number"),
        (blocks_on_x, "the reward function took more than 0.3 s (--timeout)"),
    ],
)
def test_a_call_that_fails_costs_its_experience_alone(
    run: Path, capsys: pytest.CaptureFixture[str], reward: Any, why: str
) -> None:
    before = threading.active_count()
    code, figures, _ = regraded(capsys, run, f"{__name__}.{reward.__name__}", "--timeout", "0.3")
    assert (code, figures["experiences"], figures["not_regraded"]) == (0, 6, {why: 2})
    assert figures["seconds"]["calls"] == 8
    assert threading.active_count() <= before + 3


def test_what_has_no_record_any_more_is_counted_with_its_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorded(load_config(run)).to_list()
    made[0].taskset = made[0].index = None
    made[1].taskset = "gone"
    made[2].index = 10_000
    made[3].response_text = None
    run.with_name("seen.tmqx").write_bytes(ExperienceBatch.of(made).encode())
    code, figures, _ = regraded(capsys, run, "char_match")
    assert (code, figures["experiences"]) == (0, 4)
    assert figures["not_regraded"] == {
        "its task was submitted from outside, and its record is not stored": 1,
        "the configuration has no taskset 'gone'": 1,
        "taskset 'max3' has 20 records now, and the record of its task is not among them": 1,
        "it keeps no text of the response": 1,
    }


def test_nothing_to_regrade_and_a_limit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert regraded(capsys, run, "char_match", "--batch", "7")[0] == 1
    whole = recorded(load_config(run))
    second = [one.eid for one in whole]
    made = whole.to_list()
    for one, eid in zip(made, second, strict=True):
        one.eid = EID(batch=2, task=eid.task, run=eid.run)
    run.with_name("seen.tmqx").write_bytes(ExperienceBatch.concat([whole, ExperienceBatch.of(made)]).encode())
    code, figures, _ = regraded(capsys, run, "char_match", "--limit", "3")
    assert (code, figures["seen"], figures["batches"]) == (0, 8, 1), "a batch is not cut"
    assert figures["advantage"]["old_abs_mean"] == pytest.approx(figures["advantage"]["new_abs_mean"])
    assert regraded(capsys, run, "char_match", "--limit", "9")[1]["batches"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reward", "char_mach"], "did you mean 'char_match'"),
        (["--reward", "char_match", "--reward-args", "[1]"], "wanted an object"),
        (["--reward", "char_match", "--reward-args", '{"nothing": 1}'], "cannot be called as reward"),
        (["--reward", "char_match", "--limit", "0"], "wanted at least 1"),
        (["--reward", "char_match", "--timeout", "0"], "wanted seconds above 0"),
    ],
)
def test_mistakes_are_told(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["regrade", str(run), *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["regrade", str(run.with_name("seen.tmqx")), *words]) == 2

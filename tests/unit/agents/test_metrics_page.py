"""docs/metrics.md names every metric that a run writes, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.metric_names import LINE, PAGE, documented, undocumented
from tests.unit.training.test_composed_losses import SETTINGS, rows, with_algorithm
from tests.unit.training.test_critic_and_reference import ppo, rewarded
from tests.unit.training.test_learner import Opener, config, folder, opened
from trinity_agents.simulation import Simulation
from trinity_mq.config import OperatorConfig
from trinity_mq.experience import ExperienceBatch
from trinity_mq.operators import create_operators, run_chain
from trinity_mq.operators.registry import OPERATORS
from trinity_mq.telemetry import aggregate_eval_runs, aggregate_eval_tasks
from trinity_mq.testing.virtual_time import run_virtually

__all__ = ["folder", "opened"]

ROOT = Path(__file__).parents[3]
SOURCES = [*(ROOT / "trinity_mq").rglob("*.py"), *(ROOT / "agents").rglob("*.py")]
FAMILIES = sorted({name.partition("/")[0] for name in documented()})
CLIPS = {"truncate": {"surrogate": {"kind": "truncate"}}, "ref": {"kl": {"kind": "k2", "coef": 0.1}}}


def test_the_page_has_a_row_for_each_name_and_a_metric_that_has_none_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in LINE)
    assert len(set(documented())) == len(documented()) > 100
    assert undocumented({"actor/loss", "actor/losss", "actor/loss/mean", "loss", "time"}) == {
        "actor/losss",
        "actor/loss/mean",
        "loss",
    }


def literals() -> Iterator[tuple[str, str]]:
    """Yield texts in the code that look like names of metrics, and where they are."""
    looks = re.compile(rf"(?:{'|'.join(FAMILIES)})/[a-z0-9_]+(?:/[a-z0-9_]+)*")
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and looks.fullmatch(node.value):
                yield node.value, f"{path.relative_to(ROOT)}:{node.lineno}"


NOT_METRICS = {"time/task_execution", "time/run_execution"}
"""Names within ``rollout/`` and ``eval/<taskset>/``."""
EARLIER = {"time/sync_weight", "time/save_checkpoint"}
"""Read from the files of earlier releases."""


def test_names_in_the_code_are_on_the_page() -> None:
    begun = {name[: end.start()] for name in documented() for end in re.finditer("/|(?<=skipped_)", name)}
    found = {name: where for name, where in literals() if name not in NOT_METRICS | EARLIER | begun}
    assert len(found) > 60
    assert {name: found[name] for name in undocumented(found)} == {}


def test_names_on_the_page_are_in_the_code() -> None:
    """The last word of each is a text in the code, or a text with another before it, as in ``pair_`` and ``margin``."""
    texts = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
                texts |= set(re.split(r"[/@ ]", node.value))
    last = {re.sub(r"@?<[^>]*>|_ms$", "", name.rpartition("/")[2]): name for name in documented()}
    missing = {
        name
        for word, name in last.items()
        if not any(word == text or (len(text) > 1 and word.endswith(f"_{text}")) for text in texts)
    }
    assert missing == set()


def test_what_a_whole_run_writes(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("explorer.refill.max=1.0",), batches=3)
    run_virtually(sim.run(), limit=1000)
    names = {name for _, values in sim.reports for name in values}
    assert {"rollout/reward/mean", "reward/mean", "groups/size", "sync/transfer_ms", "time/save", "time/eval"} <= names
    assert undocumented(names) == set()


@pytest.mark.parametrize("name", [*SETTINGS, *CLIPS])
async def test_what_a_train_step_writes(opened: Opener, name: str) -> None:
    learner = await opened(with_algorithm(config(), **(SETTINGS | CLIPS)[name]))
    metrics = await learner.step(rows(name), 4)
    assert "actor/loss" in metrics
    assert undocumented(metrics) == set()


async def test_what_a_train_step_with_a_critic_writes(opened: Opener) -> None:
    learner = await opened(ppo())
    metrics = await learner.step(rewarded(1), 1)
    assert {"critic/vf_loss", "critic/vpred_mean", "critic/explained_variance"} <= metrics.keys()
    assert undocumented(metrics) == set()


WITH_ARGUMENTS = {"human_review", "length_penalty", "reward_shaping_mapper"}


async def test_what_operators_write() -> None:
    chain = create_operators([OperatorConfig(name=name) for name in OPERATORS if name not in WITH_ARGUMENTS])
    _, metrics = await run_chain(chain, ExperienceBatch.of(rewarded(1)))
    assert any(name.startswith("selection/") for name in metrics)
    assert undocumented(metrics) == set()


@pytest.mark.parametrize("detailed", [False, True])
def test_what_an_evaluation_writes(detailed: bool) -> None:
    runs = [{"accuracy": 1.0, "majority": 1.0, "reward": 0.3, "time/run_execution": 2.0}] * 4
    found = aggregate_eval_tasks([aggregate_eval_runs(runs)], "eval/some/set", detailed=detailed)
    assert len(found) > 10
    assert undocumented(found) == set()

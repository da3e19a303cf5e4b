"""Examples, and the smoke example with other algorithms, styles and kinds of weights, as whole runs that learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import completed
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
PLUGINS = f"plugin_dirs=['{EXAMPLES}']"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"
PPO = (
    "algorithm.algorithm_type=ppo",
    "algorithm.std_level=null",
    "algorithm.critic.lr=1e-3",
    "algorithm.reward_kl={kind: k1, coef: 0.01, target: 0.05}",
    "algorithm.reference={update: ema, every_steps: 5, decay: 0.9}",
)
ADAPTERS = ("model.lora={r: 16, alpha: 32}", "algorithm.optimizer.lr=5e-3", "trainer.nproc=2")
ASYNC = ("synchronizer.sync_style=fully_async", "synchronizer.sync_interval=2", "synchronizer.sync_offset=0")

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("example", "settings", "folder", "metric", "rise"),
    [
        pytest.param(
            "gymnasium", (PLUGINS, "explorer.eval_interval=100"), "run", "eval/digits_held_out/success/mean@1", 0.6,
            id="an environment of gymnasium",
        ),
        pytest.param("step-wise", (PLUGINS,), "run", ACCURACY, 0.1, id="a reward for each step, from a plug-in folder"),
        pytest.param(
            "sft-then-rl", (), "run-rl", "eval/ops3_held_out/accuracy/mean@1", 0.1, id="reinforcement after imitation"
        ),
        pytest.param("smoke", PPO, "run", ACCURACY, 0.3, id="a critic, a moving reference and a KL in the rewards"),
        pytest.param("smoke", ADAPTERS, "run", ACCURACY, 0.3, id="adapters alone, on two ranks"),
        pytest.param("smoke", ASYNC, "run", ACCURACY, 0.3, id="fully asynchronous"),
    ],
)  # fmt: skip
async def test_a_run_learns(
    tmp_path: Path, example: str, settings: tuple[str, ...], folder: str, metric: str, rise: float
) -> None:
    file = EXAMPLES / f"{example}.yaml"
    await completed(file, tmp_path / "run", settings, seconds=800.0)
    results = LocalRun(file, tmp_path / folder)
    values = dict(results.values(metric))
    assert values[max(values)] >= values[0] + rise, values
    assert max(count for _, count in results.values("sync/canary_failures")) == 0

"""A short run as real processes: plug-ins in Trinity-RFT's own style, with only their import lines changed, and the
GPUs of each process. Eight GPUs are pretended, so that everything computes on the CPU.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.processes import completed
from trinity_mq.testing.runs import LocalRun

FOLDER = Path(__file__).parent / "trinity_plugins"
EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
SETTINGS = (
    *("buffer.total_steps=4", "buffer.eval_tasksets=[]", "explorer.eval_on_startup=false"),
    f"plugin_dirs=['{FOLDER}']",
    "buffer.taskset.workflow=trinity_digits_workflow",
    "buffer.taskset.reward_fn=trinity_near_reward",
    "buffer.taskset.reward_fn_args={weight: 0.5}",
    "operator.operators=[{name: trinity_scaling, args: {scale: 3.0}}]",
    *("trainer.nproc=2", "explorer.rollout_model.engine_num=2", "runner.num_runners=1"),
    "explorer.auxiliary_models=[{name: judge, model: {tiny: {}}}]",
)

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalRun, str]:
    """The run and its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRINITY_MQ_PRETEND_GPUS", "8")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return asyncio.run(completed(EXAMPLE, tmp_path_factory.mktemp("plugins") / "run", SETTINGS))


def test_they_are_found_by_name_and_do_their_work(finished: tuple[LocalRun, str]) -> None:
    run, _ = finished
    starts = dict(run.values("rollout/starts_right/mean"))
    assert sorted(starts) == [1, 2, 3, 4]
    assert 0.0 < starts[4] <= 0.5
    best = dict(run.values("rollout/starts_right/max"))[4]
    assert best > 0
    assert best % (0.5 / 8) == 0, "of eight runs each right one counts by the weight that the reward was made with"
    assert dict(run.values("group_advantages/reward_mean/max"))[4] == pytest.approx(3 * best), "behind the operator"
    scaled = sorted(run.values("experience_pipeline/0_ScalingOperator/scaled_count"))
    assert scaled == [(step, 128.0) for step in (1, 2, 3, 4)]
    assert [step for step, _ in run.values("trainer/step")] == [1, 2, 3, 4]


def test_each_process_gets_its_gpus(finished: tuple[LocalRun, str]) -> None:
    """/proc shows forked processes the environment of their parent, so each process reports its own in its first
    line.
    """
    run, output = finished
    first = {log.stem: json.loads(log.read_text().splitlines()[0]) for log in (run.run_dir / "logs").glob("*.jsonl")}
    assert {name: line.get("devices") for name, line in first.items() if name != "supervisor"} == {
        "trainer-0": ["0", "1"],
        "trainer-0-rank-1": ["0", "1"],
        "explorer-0-engine": ["2"],
        "explorer-0-engine-1": ["3"],
        "explorer-0-auxiliary-judge": ["4"],
        "explorer-0": [],
        "runner-0": [],
        "operator-0": [],
    }
    assert first["trainer-0-rank-1"]["device"] == 1, "the second of these GPUs"
    assert "GPUs: trainer-0 on 0,1; explorer-0-engine on 2; explorer-0-engine-1 on 3" in " ".join(output.split())

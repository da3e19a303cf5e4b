"""A whole run whose operator cannot do one batch: it is skipped, the run goes on, a replay does it meanwhile, and the
trainer takes it along with a later batch.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import yaml

from trinity_agents.trainer.history import lineage
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
OPERATOR = """
from pathlib import Path
from trinity_mq.operators import ExperienceOperator

class Choosy(ExperienceOperator):
    def process(self, exps):
        if exps[0].eid.batch == 2 and not (Path(__file__).parent / "repaired").exists():
            raise ArithmeticError("not this one")
        return exps, {"seen": len(exps)}
"""
SEEN = "experience_pipeline/0_Choosy/seen"
BATCHES = 40

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.timeout(300)]


async def test_the_run_goes_on_without_the_batch_and_a_replay_does_it(tmp_path: Path) -> None:
    (tmp_path / "choosy.py").write_text(OPERATOR)
    config = yaml.safe_load((ROOT / "examples" / "smoke.yaml").read_text())
    config["run_dir"] = str(tmp_path / "run")
    config["plugin_dirs"] = [str(tmp_path)]
    config["operator"] = {"operators": [{"name": "choosy.Choosy"}]}
    config["broker"] = {"delivery_limit": 2}
    config["buffer"] |= {"total_steps": BATCHES, "batch_size": 4}
    config["synchronizer"] |= {"max_staleness": BATCHES}  # however long the replay takes
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(config))
    async with LocalRun(path, tmp_path / "run") as run:
        await run.until(lambda: (2, 1.0) in run.values("sample/skipped_step"), 200.0)
        (tmp_path / "repaired").touch()
        words = (sys.executable, "-m", "trinity_mq.cli.main", "dead", "replay", str(path), "--batch", "2")
        replay = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        said, _ = await replay.communicate()
        assert replay.returncode == 0
        assert b"batch 2 is with the operators again" in said
        code, output = await run.ended(200.0)
    assert code == 0, output
    skipped = dict(run.values("sample/skipped_step"))
    assert skipped == {batch: float(batch == 2) for batch in range(1, BATCHES + 1)}
    assert sorted(step for step, _ in run.values(SEEN)) == list(range(1, BATCHES + 1)), "batch 2 was done, late"
    history = lineage(tmp_path / "run" / "history", 1, BATCHES)
    (late,) = (entry for entry in history if entry.get("repaired"))
    assert (late["batch"], late["outcome"], len(late["uids"])) == (2, "trained", 4 * 8)
    assert run.values("sample/repaired_batches") == [(late["progress"], 1.0)]
    trained = [uid for entry in history for uid in entry["uids"]]
    assert len(trained) == len(set(trained)) == BATCHES * 4 * 8, "each experience once"
    assert dict(run.values("trainer/step"))[BATCHES] == BATCHES - 1, "and no step more for it"

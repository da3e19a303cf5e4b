"""A run with a judge that some server elsewhere is, and a hosted model that answers an evaluation beside the policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.unit.models.test_external import Theirs
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"

JUDGED = """
from trinity_mq.workflows import Workflow

class Judged(Workflow):
    is_async = True
    async def run_async(self):
        judge, = self.auxiliary_models[:1]
        (experience,) = await self.model.chat_async([{"role": "user", "content": self.task.raw_task["question"]}])
        said = await judge.chat.completions.create(
            model=self.auxiliary_model_wrappers[0].model_name,
            messages=[{"role": "user", "content": f"Good? {experience.response_text}"}],
        )
        experience.reward = float(said.choices[0].message.content) / 42
        return [experience]
"""

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(600)]


@pytest.fixture
async def theirs() -> AsyncIterator[Theirs]:
    server = Theirs()
    await server.start()
    yield server
    await server.stop()


async def test_judged_by_a_server_elsewhere_and_compared_with_a_fixed_model(
    tmp_path: Path, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    (tmp_path / "judged_workflow.py").write_text(JUDGED)
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((EXAMPLES / "smoke.yaml").read_text())
    config["buffer"] |= {"total_steps": 2, "batch_size": 4}
    config["buffer"]["taskset"]["workflow"] = "judged_workflow.Judged"
    held_out = config["buffer"]["eval_tasksets"][0] | {"limit": 8}
    baseline = {**held_out, "name": "first", "rollout_args": {"temperature": 0, "model": "first"}}
    config["buffer"]["eval_tasksets"] = [held_out, baseline]
    config["explorer"]["auxiliary_models"] = [
        {"name": "judge", "engine": "external", "url": theirs.url, "api_key_env": "JUDGE_KEY"},
        {"name": "first", "model": config["model"]},
    ]
    config["runner"] = {"num_runners": 1}
    file = tmp_path / "judged.yaml"
    file.write_text(yaml.safe_dump(config))
    async with LocalRun(file, tmp_path / "run") as run:
        code, output = await run.ended(550.0)
    assert code == 0, output
    assert [value for _, value in run.values("rollout/reward/mean")] == [1.0, 1.0], "as the judge said"
    assert len(theirs.bodies) >= 2 * 4 * 8
    assert {headers["Authorization"] for headers in theirs.headers} == {"Bearer secret-key"}
    # the same weights before the first step, and the fixed model stays what it was
    policy, first = (dict(run.values(f"eval/{name}/accuracy/mean@1")) for name in ("max3_held_out", "first"))
    assert policy.keys() == first.keys() == {0, 2}
    assert policy[0] == first[0] == first[2]
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"secret-key" in path.read_bytes()]

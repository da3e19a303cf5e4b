"""The page of a run: live beside real agents, and from the folder alone once the run is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dash_page import DashProcess
from tests.waiting import until
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
ROLES = {"explorer", "engine", "runner", "operator", "trainer"}

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(180)]


async def test_a_run_is_seen_while_it_goes_on_and_afterwards(tmp_path: Path) -> None:
    words = ("buffer.total_steps=10000", "explorer.eval_interval=5000", "trainer.save_interval=1000")
    async with LocalRun(EXAMPLES / "smoke.yaml", tmp_path / "run", words) as run:
        await run.until((tmp_path / "run" / "config.yaml").exists, 60)
        async with DashProcess(tmp_path / "run") as page:
            await page.until(["live", "step", "samples", "curves"], 90)

            async def all_send_heartbeats() -> bool:
                return {node["role"] for node in (await page.get("api/state"))["flow"]["nodes"]} == ROLES

            await until(all_send_heartbeats, 30)  # the page may have read the metrics earlier
            assert (await page.get("api/dead")) == {"letters": []}
            assert run.process is not None
            run.process.terminate()
            await run.ended(60.0)
            await page.until(["over"], 30)
            lanes = (await page.get("api/timeline", seconds=120))["lanes"]
            assert {lane["agent"] for lane in lanes} >= {"explorer-0", "runner-0", "trainer-0"}
    async with DashProcess(tmp_path / "run") as page:
        state = await page.until(["step", "samples", "curves"], 30)
        assert (state["live"], state["agents"]) == (False, [])
        rows = await page.get("api/samples")
        assert len(rows["rows"]) % 16 == 0, "two groups of each step"
        first = dict(zip(rows["columns"], rows["rows"][0], strict=True))
        sample = await page.get("api/sample", uid=first["uid"])
        assert "".join(sample["token_texts"]).startswith(sample["prompt_text"])
        assert len(sample["logprobs"]) == len(sample["advantages"]) == first["response"]
        titles = [picture["title"] for picture in (await page.get("api/curves"))["pictures"]]
        assert {"Reward", "Evaluation: accuracy", "Spread of rewards"} <= set(titles)
        assert [one["state"] for one in (await page.get("api/runs"))["runs"]] == ["stopped"]

"""A real Prometheus scrapes the exporter of a real run, and its rules hold what they promise."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
LOOK_AGAIN = 0.5

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.any_broker,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there: Debian's package prometheus"),
]


@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_each_alert_is_raised_by_what_it_is_for(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=GRAFANA, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def query(http: aiohttp.ClientSession, url: str, expression: str) -> list[dict[str, Any]]:
    async with http.get(f"{url}/api/v1/query", params={"query": expression}) as answer:
        found: dict[str, Any] = await answer.json()
    assert found["status"] == "success", found
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


async def answers(http: aiohttp.ClientSession, url: str, expression: str) -> bool:
    """Return whether an expression has a value; none where Prometheus is still starting."""
    try:
        return bool(await query(http, url, expression))
    except (aiohttp.ClientConnectionError, aiohttp.ContentTypeError):
        return False


@pytest.mark.extended
@pytest.mark.timeout(240)
async def test_a_prometheus_knows_the_run(tmp_path: Path) -> None:
    exporter_port, port = free_ports(2)
    settings = (GRAFANA / "prometheus.yml").read_text()
    settings = settings.replace("9464", str(exporter_port)).replace("[alerts.yml]", f"[{GRAFANA / 'alerts.yml'}]")
    (tmp_path / "prometheus.yml").write_text(settings.replace("5s", "1s").replace("15s", "1s"))
    words = ("buffer.total_steps=10000", "explorer.eval_interval=20", "trainer.save_interval=1000")
    async with LocalRun(ROOT / "examples" / "smoke.yaml", tmp_path / "run", words) as run:
        await run.until_progress(2, 90)
        exporter = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trinity_mq.cli.main", "exporter", str(tmp_path / "run"), "--port", str(exporter_port)
        )
        prometheus = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        )
        try:
            async with aiohttp.ClientSession() as http, asyncio.timeout(120):
                url = f"http://127.0.0.1:{port}"
                while True:
                    if await answers(http, url, "rate(tmq_engine_tokens_total[20s]) > 0"):
                        break
                    await asyncio.sleep(LOOK_AGAIN)
                for panel in json.loads((GRAFANA / "trinity-mq.json").read_text())["panels"]:
                    for target in panel["targets"]:
                        await query(http, url, target["expr"].replace("$run", ".*"))
                [alive] = await query(http, url, 'sum(tmq_agent_up{run="smoke"})')
                assert float(alive["value"][1]) == 6
                [trained] = await query(http, url, "tmq_batches_consumed_total")
                assert float(trained["value"][1]) >= 2
                rules = [{"health": "unknown"}]
                while any(rule["health"] == "unknown" for rule in rules):  # they are evaluated one after the other
                    await asyncio.sleep(LOOK_AGAIN)
                    async with http.get(f"{url}/api/v1/rules") as answer:
                        rules = (await answer.json())["data"]["groups"][0]["rules"]
                assert {rule["health"] for rule in rules} == {"ok"}
                assert len(rules) == 7
        finally:
            for process in (prometheus, exporter):
                process.terminate()
                await process.wait()

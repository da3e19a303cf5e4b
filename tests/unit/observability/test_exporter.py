"""The metrics for Prometheus: names that dashboards rely on, totals that never fall, and the page that lists them."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.observability.test_run_state import beat, metrics
from trinity_mq.cli.main import main
from trinity_mq.observability.prometheus import families
from trinity_mq.observability.prometheus.families import RunCollector, wanted_runners
from trinity_mq.observability.prometheus.handler import metrics_handler
from trinity_mq.observability.run_state import RunState

ROOT = Path(__file__).parents[3]
Series = dict[tuple[str, str], float]


def seen() -> RunState:
    view = RunState("r", 10)
    view.receive(beat("explorer", "explorer-0", detail={"opened": 4, "closed": 3, "total_batches": 10}), 0.0)
    view.receive(beat("runner", "runner-0", detail={"running": 3, "slots": 4, "done": 20}), 0.0)
    engine = {"id": "engine-0", "load": 2, "tokens": 700, "version": (1, 3)}
    engine["use"] = {"running": 2, "waiting": 1, "cache_used": 0.25, "prompt_tokens": 90, "cached_prompt_tokens": 30}
    view.receive(beat("engine", "engine-0", detail=engine), 0.0)
    gate = {"version": (1, 3), "syncs": 3, "aborts": 1, "phases": {"transfer": 31.0}}
    view.receive(beat("trainer", "trainer-0", detail={"progress": 3, "step": 3, "sync": gate}), 0.0)
    view.receive(beat("gateway", "gateway-0", detail={"url": "http://x", "open": 2, "calls": 9}), 0.0)
    view.receive(metrics("explorer", 3, **{"eval/max3/accuracy/mean@1": 0.5, "rollout/reward/mean": 0.25}), 0.0)
    view.set_depths({"tasks.train": 6, "tasks.eval": None, "dead": 1})
    return view


async def scraped(view: RunState, accept: str = "text/plain", *, now: float = 1.0) -> str:
    app = web.Application()
    app.add_routes([web.get("/metrics", metrics_handler(RunCollector(view, lambda: now)))])
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/metrics", headers={"Accept": accept})
        assert answer.status == 200
        return await answer.text()


def value_of(name: str, collector: RunCollector) -> float:
    [family] = [one for one in collector.collect() if one.name == name]
    return float(family.samples[0].value)


def series(text: str) -> Series:
    return {
        (sample.name, ",".join(value for name, value in sorted(sample.labels.items()) if name != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_scrape_tells_the_state_of_the_run() -> None:
    text = await scraped(seen(), "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert series(await scraped(seen(), now=60.0))["tmq_agent_up", "runner-0,runner"] == 0.0, "silent"
    found = series(await scraped(seen()))
    assert found["tmq_agent_up", "runner-0,runner"] == 1.0
    assert found["tmq_agent_state", "runner-0,runner,working"] == 1.0
    assert found["tmq_queue_messages", "tasks.train"] == 6
    assert ("tmq_queue_messages", "tasks.eval") not in found, "there is no such queue"
    assert found["tmq_batches_closed_total", ""] == 3
    assert found["tmq_runner_slots", "busy"] == 3
    assert found["tmq_runner_slots", "free"] == 1
    assert found["tmq_wanted_runners", ""] == 3, "6 wait and 3 are worked on, 4 a runner"
    assert found["tmq_sync_phase_seconds", "transfer"] == 0.031
    assert found["tmq_engine_tokens_total", "engine-0"] == 700
    assert found["tmq_engine_cache_used", "engine-0"] == 0.25
    assert [found["tmq_engine_batch", f"engine-0,{state}"] for state in ("running", "waiting")] == [2, 1]
    assert found["tmq_engine_prompt_tokens_total", "engine-0,cache"] == 30
    assert found["tmq_engine_prompt_tokens_total", "engine-0,computed"] == 60
    assert found["tmq_sessions", "open"] == 2
    assert found["tmq_eval_result", "max3"] == 0.5
    assert found["tmq_metric", "rollout/reward/mean"] == 0.25


def test_totals_never_fall_and_a_restart_counts_on() -> None:
    view = RunState("r", 10)
    collector = RunCollector(view, lambda: 0.0)
    totals = []
    for seq, (incarnation, done) in enumerate([("a", 5), ("a", 9), ("b", 0), ("b", 4)], 1):
        view.receive(beat("runner", "runner-0", seq, incarnation=incarnation, detail={"done": done}), 0.0)
        totals.append(value_of("tmq_slices_done", collector))
    assert totals == [5, 9, 9, 13]


def test_wanted_runners_are_those_of_the_busiest_moment_of_late() -> None:
    assert (wanted_runners(0, 0, 16), wanted_runners(1, 0, 16), wanted_runners(16, 17, 16)) == (0, 1, 3)
    assert wanted_runners(3, 0, 0) == 3, "slots that are not known count as one"
    view = seen()
    collector = RunCollector(view, lambda: 1.0)
    assert value_of("tmq_wanted_runners", collector) == 3
    view.set_depths({"tasks.train": 0})
    later = [value_of("tmq_wanted_runners", collector) for _ in range(families.SMOOTHED)]
    assert later == [3] * (families.SMOOTHED - 1) + [1]


def test_with_the_configuration_an_autoscaler_knows_what_a_runner_takes_before_there_is_one() -> None:
    view = RunState("r", 10)
    view.set_depths({"tasks.train": 64})

    def wanted(slots: int | None) -> float:
        return value_of("tmq_wanted_runners", RunCollector(view, lambda: 1.0, slots))

    assert (wanted(None), wanted(16)) == (64, 4)
    view.receive(beat("runner", "runner-0", detail={"running": 16, "slots": 32}), 0.0)
    assert (wanted(None), wanted(16)) == (3, 5), "half of the slots are for evaluations"


async def test_names_that_workflows_choose_cannot_make_series_without_end() -> None:
    view = seen()
    view.receive(metrics("explorer", 1, **{f"rollout/task_{number}": 1.0 for number in range(2000)}), 0.0)
    found = series(await scraped(view))
    assert sum(name == "tmq_metric" for name, _ in found) == families.MOST_METRICS


def names(text: str) -> set[str]:
    return {name for name, _ in series(text)}


async def test_the_page_lists_every_name_and_no_other() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    section = page[page.index("## Prometheus") :].partition("\n## ")[0]
    listed = set(re.findall(r"`(tmq_\w+)`", section))
    exported = names(await scraped(seen()))
    assert listed == exported


async def test_dashboard_and_alerts_ask_for_what_there_is() -> None:
    exported = names(await scraped(seen()))
    board = json.loads((ROOT / "deploy" / "grafana" / "trinity-mq.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked += re.findall(r"expr: (.+)", (ROOT / "deploy" / "grafana" / "alerts.yml").read_text(encoding="utf-8"))
    assert len(asked) > 20
    for expression in asked:
        used = set(re.findall(r"tmq_\w+", expression))
        assert used, expression
        assert used <= exported, expression


def test_a_port_that_is_taken_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["exporter", "r", "--broker", "amqp://127.0.0.1:1", "--port", port]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "choose another --port" in said

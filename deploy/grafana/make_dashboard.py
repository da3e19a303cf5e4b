"""Writes the Grafana dashboard beside this file: ``python deploy/grafana/make_dashboard.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("trinity-mq.json")
WIDTH, HEIGHT = 8, 8
COLUMNS = 24 // WIDTH
RUN = '{run=~"$run"}'
PANELS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Batches a minute", "short", "trained, closed and opened; they should go together", (
        ("trained", f"60 * rate(tmq_batches_consumed_total{RUN}[2m])"),
        ("closed", f"60 * rate(tmq_batches_closed_total{RUN}[2m])"),
        ("opened", f"60 * rate(tmq_batches_opened_total{RUN}[2m])"),
    )),
    ("Tokens a second", "short", "sampled by each engine", (("{{agent}}", f"rate(tmq_engine_tokens_total{RUN}[1m])"),)),
    ("Agents that live", "short", "by role", (("{{role}}", f"sum by (role) (tmq_agent_up{RUN})"),)),
    ("Waiting", "s", "longest wait of an agent of each role", (
        ("{{role}}", f"max by (role) (tmq_agent_waiting_seconds{RUN})"),
    )),
    ("Queues", "short", "messages that wait", (("{{queue}}", f"tmq_queue_messages{RUN}"),)),
    ("Slots of runners", "short", "free and busy", (("{{state}}", f"tmq_runner_slots{RUN}"),)),
    ("Wanted runners", "short", "what an autoscaler would set", (("wanted", f"tmq_wanted_runners{RUN}"),)),
    ("Load of engines", "short", "sequences under way", (("{{agent}}", f"tmq_engine_load{RUN}"),)),
    ("Slices a second", "short", "done by each runner", (("{{agent}}", f"rate(tmq_slices_done_total{RUN}[1m])"),)),
    ("Evaluations", "short", "accuracy, else reward", (("{{taskset}}", f"tmq_eval_result{RUN}"),)),
    ("Reward", "short", "of rollouts", (("mean", 'tmq_metric{run=~"$run", name="rollout/reward/mean"}'),)),
    ("Entropy", "short", "nats a token", (("entropy", 'tmq_metric{run=~"$run", name="actor/entropy"}'),)),
    ("Staleness", "short", "train steps", (("largest", 'tmq_metric{run=~"$run", name="sample/staleness/max"}'),)),
    ("Weight sync", "s", "phases of the last one", (("{{phase}}", f"tmq_sync_phase_seconds{RUN}"),)),
    ("Syncs", "short", "committed and aborted, a minute", (
        ("committed", f"60 * rate(tmq_syncs_total{RUN}[2m])"),
        ("aborted", f"60 * rate(tmq_sync_aborts_total{RUN}[2m])"),
    )),
    ("Engine against trainer", "short", "difference of logprobs", (
        ("mean", 'tmq_metric{run=~"$run", name="rollout/rollout_vs_train_logprob_diff/mean"}'),
    )),
    ("Sessions", "short", "of agents that know only a base URL", (("{{state}}", f"tmq_sessions{RUN}"),)),
    ("Not recorded", "short", "answers a minute that the broker did not confirm in time", (
        ("unrecorded", f"60 * rate(tmq_sessions_unrecorded_total{RUN}[2m])"),
    )),
)  # fmt: skip
"""Title, unit, description, and the legend and expression of each curve."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "title": "trinity_mq",
        "uid": "trinity-mq",
        "tags": ["trinity_mq"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(tmq_agent_up, run)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "label": "Run",
                },
            ]
        },
        "panels": [_panel(number, source, *panel) for number, panel in enumerate(PANELS)],
    }


def _panel(
    number: int, source: dict[str, str], title: str, unit: str, about: str, curves: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": source,
        "gridPos": {"x": WIDTH * (number % COLUMNS), "y": HEIGHT * (number // COLUMNS), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"lineWidth": 1, "fillOpacity": 5}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + place), "datasource": source, "expr": expression, "legendFormat": legend}
            for place, (legend, expression) in enumerate(curves)
        ],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")

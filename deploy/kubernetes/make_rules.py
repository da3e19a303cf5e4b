"""Writes deploy/grafana/alerts.yml as a PrometheusRule: ``python deploy/kubernetes/make_rules.py``."""

from __future__ import annotations

from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parent / "grafana" / "alerts.yml"
FILE = FOLDER / "components" / "monitoring" / "alerts.yaml"


def rules() -> str:
    """Return the text of the file."""
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "trinity-mq"},
        "spec": yaml.safe_load(SOURCE.read_text()),
    }
    return "# Written by make_rules.py from deploy/grafana/alerts.yml.\n" + yaml.safe_dump(
        manifest, sort_keys=False, width=1000
    )


if __name__ == "__main__":
    FILE.write_text(rules())

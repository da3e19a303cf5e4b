"""One agent by itself, as the command line starts it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import trinity_agents.explorer.agent
import trinity_agents.explorer.engine_hosting
from trinity_mq.cli.agents import agent_id
from trinity_mq.cli.main import main


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def note(what: str) -> Any:
        return lambda config, agent_id: calls.append((what, agent_id)) or 0

    monkeypatch.setattr(trinity_agents.explorer.agent, "main", note("schedules"))
    monkeypatch.setattr(trinity_agents.explorer.engine_hosting, "host_engines", note("hosts"))
    return calls


def test_engines_only_hosts_under_a_name_of_this_machine(
    tmp_path: Path, started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://x")
    config = tmp_path / "run.yaml"
    config.write_text("name: r\nmodel: {tiny: {}}\n")
    assert main(["explorer", str(config)]) == 0
    assert main(["explorer", str(config), "--engines-only"]) == 0
    assert main(["explorer", str(config), "--engines-only", "--id", "engines-7"]) == 0
    assert started == [("schedules", "explorer-0"), ("hosts", agent_id("engines-{host}")), ("hosts", "engines-7")]


@pytest.mark.parametrize(
    ("host", "name"), [("GPU-3.example.org", "engines-gpu-3-example-org"), ("ünï", "engines-n"), ("--", "engines-host")]
)
def test_a_machines_name_fits_into_the_brokers(host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert agent_id("engines-{host}") == name
    assert agent_id("runner-0") == "runner-0"

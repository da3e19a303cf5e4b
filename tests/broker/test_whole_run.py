"""One run with real processes, on a broker with users of its own, traced, at log level debug. Each user can do what it
may; secrets come out nowhere, also when the connections are cut; the run is drained, and resumed to its end; and each
batch leaves and exports one connected trace.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from yarl import URL

from tests.broker_fixtures import Users
from tests.otlp_receiver import Receiver, receiving, values
from tests.processes import command, completed, descendants
from trinity_mq.bus.permissions import permissions
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.cli.main import main
from trinity_mq.observability.waterfall import MARKS, lay_out
from trinity_mq.telemetry import read_trace
from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
ONCE_A_SLICE = {
    "runner": (
        *("make workflow", "make request", "ask engine", "parse answer", "make experiences", "compute reward"),
        *("finish runs", "hand over experiences", "hand over result", "acknowledge"),
    ),
    "engine": ("parse request", "wait for company", "encode answer"),
}
ONCE_A_BATCH = {
    "explorer": ("make ticket", "declare queue", "make manifest", "confirm batch_closed", "commit at engine"),
    "operator": (
        *("read parts", "decode parts", "run operators", "encode chunks"),
        *("confirm experience_chunk", "confirm batch_ready"),
    ),
    "trainer": (
        *("batch is here", "decode chunks", "train step", "pack tokens", "backward", "measure step"),
        *("confirm progress", "offer weights", "transfer weights"),
    ),
    "engine": ("receive weights", "apply weights", "score canary"),
}
SEVERAL_A_BATCH = {
    "explorer": ("encode slices", "take results"),
    "runner": ("decode slices", "encode experiences", "confirm experience_part"),
    "engine": ("generate",),
    "trainer": ("forward", "optimizer"),
}
STEPS = 4
EXPORTED = {
    "explorer": ("make ticket", "commit at engine"),
    "runner": ("make workflow", "ask engine", "hand over result"),
    "engine": ("parse request", "encode answer", "apply weights"),
    "operator": ("run operators",),
    "trainer": ("train step", "transfer weights"),
}
"""From the task to the version that a batch's train step made."""

pytestmark = [pytest.mark.broker, pytest.mark.e2e, pytest.mark.timeout(500)]


def pairs(table: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    return ((who, what) for who, names in table.items() for what in names)


TASK = '{"raw_task": {"question": "3,7,2=", "answer": "7"}}'
HOLDERS = {
    "broker.url": {"agent"},
    "config.yaml": {"runner.env"},
    "explorer-0-engine.config.json": {"runner.env"},
    "explorer-0-engine.ready.json": {"engine token"},
}
"""Files of the run folder that must hold a secret: other commands, agents and the engine's host read it there, and
nobody else: mode 0600."""


def shown(text: str, planted: Mapping[str, str]) -> list[str]:
    """Return the names of the secrets in a text."""
    return [name for name, secret in planted.items() if secret in text]


def leaks(folder: Path, planted: Mapping[str, str]) -> list[str]:
    """Return files below ``folder`` that hold a secret and must not, or hold one open to others."""
    problems = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        held = set(shown(path.read_bytes().decode(errors="replace"), planted))
        if held - HOLDERS.get(path.name, set()):
            problems.append(f"{path} holds {held}")
        elif held and stat.S_IMODE(path.stat().st_mode) != 0o600:
            problems.append(f"{path} is open to others")
    return problems


def configuration(folder: Path, run: str, otlp: str) -> Path:
    """Write the smoke example with a secret in it, as a user would: by the name of a variable."""
    data = yaml.safe_load(SMOKE.read_text())
    data |= {"name": run, "runner": {"env": {"JUDGE_KEY": "${env:TEST_RUNNERS_KEY}"}}}
    data["monitor"] = {"log_level": "debug", "trace": True, "otlp": {"endpoint": otlp}}
    data["buffer"]["eval_tasksets"] = []
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


async def test_a_run_with_its_own_users_shows_no_secret_and_leaves_a_whole_trace(
    users: Users,
    bus: RabbitBus,
    topology: Topology,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, folder = topology.run, tmp_path / "run"
    agent = await users.make(f"{run}-a", permissions(run, "agent", replies=True))
    submitter = await users.make(f"{run}-s", permissions(run, "submitter"))
    reader = await users.make(f"{run}-r", permissions(run, "reader"))
    urls = {"agent": agent, "submitter": submitter, "reader": reader}
    planted = {name: str(URL(url).password) for name, url in urls.items()}
    planted |= {"key password": f"kp{secrets.token_hex(12)}", "runner.env": f"rn{secrets.token_hex(12)}"}
    told: list[str] = []

    async def as_user(url: str, *words: str, fails: bool = False) -> str:
        """Run ``trinity-mq`` as the user of ``url`` and return its output."""
        code, out, errors = await command(*words, "--broker", url)
        assert (code != 0) == fails, out + errors
        told.append(out + errors)
        return out

    (tmp_path / "url").write_text(f"{agent}\n")
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("TRINITY_MQ_BROKER_KEY_PASSWORD", planted["key password"])
    monkeypatch.setenv("TEST_RUNNERS_KEY", planted["runner.env"])
    with receiving(Receiver()) as receiver:
        config = configuration(tmp_path, run, receiver.url)
        async with LocalRun(config, folder, ("buffer.total_steps=500",)) as going:
            await going.until_progress(STEPS, 180.0)
            assert going.process is not None
            ready = next((folder / "engines").glob("*.ready.json"))
            planted["engine token"] = json.loads(ready.read_text())["token"]
            family = [psutil.Process(going.process.pid).cmdline(), *(cmd for _, cmd in descendants(going.process.pid))]
            lines = [" ".join(words) for words in family]
            assert len(lines) > 4
            assert [line for line in lines if shown(line, planted)] == []
            assert leaks(folder, planted) == []
            answer, status, letters, experiences, tapped, regraded, *_ = await asyncio.gather(
                as_user(submitter, "submit", run, "--task", TASK, "--wait", "90"),
                as_user(reader, "status", run, "--seconds", "3"),
                as_user(reader, "dead", "list", run),
                as_user(reader, "inspect", run),
                as_user(reader, "tap", run, "--from", "beginning", "--no-follow", "--fields", "uid"),
                as_user(reader, "regrade", str(folder), "--reward", "char_match", "--json", "-"),
                as_user(submitter, "submit", run, "--task", "not JSON", fails=True),
                as_user(submitter, "submit", run, "--task", TASK.replace("{", '{"workflow": "none", ', 1)),
            )
            await users.tools.ctl("close_all_connections", "maintenance")
            await going.until_progress(max(step for step, _ in going.values("trainer/step")) + 2, 90.0)
            going.process.send_signal(signal.SIGINT)
            code, output = await going.ended(60.0)
            assert code == 130, output
        reached = max(step for step, _ in going.values("trainer/step"))
        rest, again = await completed(config, folder, (f"buffer.total_steps={reached + 1}",), seconds=180.0)
    assert max(step for step, _ in rest.values("trainer/step")) > reached

    assert json.loads(answer.splitlines()[-1])["outcome"] == "finished"
    assert [name for name in ("explorer-0", "trainer-0", "operator-0", "runner-0") if name not in status] == []
    assert run in letters
    assert "reward" in experiences
    assert '"uid"' in tapped
    regrading = json.loads(regraded[regraded.index("{") :])
    assert (regrading["changed"], regrading["experiences"] > 0) == (0, True)

    assert shown(output + again + "".join(told), planted) == []
    assert leaks(folder, planted) == []
    logs = "".join(path.read_text() for path in (folder / "logs").glob("*.jsonl"))
    assert "lost" in logs
    assert "ACCESS_REFUSED" not in logs
    async with await bus.consume(replace(topology.dead, redeclare=False)) as feed:
        dead = [await anext(feed) for _ in range(await bus.depth(topology.dead.name) or 0)]
    assert [letter for letter in dead if shown(f"{letter.headers} {letter.body!r}", planted)] == []

    assert "not all sent" not in output + again
    check_what_was_exported(receiver)
    check_the_trace(folder)
    capsys.readouterr()  # what our own bus has logged of its lost connections
    assert main(["timeline", str(folder), "--batch", "1-2", "--json"]) == 0
    timeline = json.loads(capsys.readouterr().out)
    assert timeline["batch"] == "1 to 2"
    assert timeline["took"] > sum(timeline["stages"].values()) / 2


def check_the_trace(folder: Path) -> None:
    spans = read_trace(folder)
    for batch in ("1", "2"):
        found = lay_out(spans, batch)
        times = {(row.who, row.what): row.times for row in found.rows}
        missing = {key: times.get(key) for key in pairs(ONCE_A_SLICE) if times.get(key, 0) < 16}
        assert missing == {}, "16 tasks a batch, some of which may be asked about again"
        assert {key: times.get(key) for key in pairs(ONCE_A_BATCH) if times.get(key) != 1} == {}
        assert [key for key in pairs(SEVERAL_A_BATCH) if key not in times] == []
        assert found.stages.keys() == MARKS.keys()
        assert all(took >= 0 for took in found.stages.values()), found.stages
        by_name = {(row.who, row.what): row for row in found.rows}
        assert by_name["runner", "ask engine"].bytes >= by_name["engine", "encode answer"].bytes > 0
        assert by_name["runner", "decode slices"].bytes >= by_name["explorer", "encode slices"].bytes > 0
        slices_confirmed = [times.get(("explorer", f"confirm {kind}"), 0) for kind in ("task_slice", "task_slices")]
        assert times["explorer", "encode slices"] == sum(slices_confirmed)
        assert times["runner", "decode slices"] >= sum(slices_confirmed), "a message may come again"
        assert by_name["engine", "generate"].cpu


def check_what_was_exported(receiver: Receiver) -> None:
    found = receiver.batches()
    for n in range(1, STEPS):
        spans = found[f"batch {n}"]
        orphans = [span.name for _, span in spans.values() if span.parent_span_id.hex() not in {"", *spans}]
        assert orphans == []
        names = Counter((service.removeprefix("trinity_mq."), span.name) for service, span in spans.values())
        assert [step for step in pairs(EXPORTED) if step not in names] == []
        (root,) = (span for _, span in spans.values() if not span.parent_span_id)
        assert values(root)["tmq.version"]
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano for _, span in spans.values())
        tasks = [span for _, span in spans.values() if span.name.startswith("task ")]
        assert len(tasks) == 16
        requests = [span for _, span in spans.values() if span.name == "ask engine"]
        assert {spans[span.parent_span_id.hex()][1].name for span in requests} <= {span.name for span in tasks}
        assert values(requests[0])["gen_ai.operation.name"] == "chat"
        assert min(values(one)[f"gen_ai.usage.{of}_tokens"] for one in requests for of in ("input", "output")) > 0

"""Metrics on their way to services: all of them, from where the last call ended, and none kept back by another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.otlp_receiver import Receiver, receiving, values
from trinity_agents.simulation import Simulation
from trinity_mq.cli.main import main
from trinity_mq.config import ConfigError, load_config
from trinity_mq.messages import BatchReady
from trinity_mq.observability.spans.collector import OtlpClient, parse_headers
from trinity_mq.observability.spans.forward import SpanForwarder
from trinity_mq.observability.spans.tree import SETTLED_SECONDS, TraceTree, TreeSpan
from trinity_mq.observability.trackers.base import Forwarder, TrackerError
from trinity_mq.observability.trackers.process import TrackerProcess
from trinity_mq.observability.trackers.services import shown_settings
from trinity_mq.operations.validate import check_trackers
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.telemetry import METRICS_FILE, trace
from trinity_mq.telemetry.trace import BATCH, TraceSpan, record, start_trace
from trinity_mq.telemetry.trace_files import READ_BYTES, TraceTail, read_trace
from trinity_mq.telemetry.trace_ids import is_sampled, trace_id, trace_key
from trinity_mq.testing.virtual_time import run_virtually

SETTINGS: dict[str, Any] = {"name": "tracked", "model": {"tiny": {}}}


class Service:
    """Keeps what it gets."""

    def __init__(self, kind: str = "one", fails: int = 0) -> None:
        self.kind, self.fails = kind, fails
        self.ids: list[str] = []
        self.values: list[tuple[int, float, Mapping[str, float]]] = []
        self.finished = 0

    def begin(self, run_id: str) -> str:
        self.ids.append(run_id)
        return run_id or f"{self.kind}-1"

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        if self.fails:
            self.fails -= 1
            raise TrackerError(f"{self.kind} is away")
        self.values.append((step, seconds, values))

    def finish(self) -> str:
        self.finished += 1
        return f"at {self.kind}"

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.values]


def write(folder: Path, *steps: int, end: str = "\n") -> None:
    with (folder / METRICS_FILE).open("a") as file:
        for step in steps:
            file.write(
                json.dumps({"time": 1.5, "role": "trainer", "agent": "t", "step": step, "a/b": step * 0.5}) + end
            )


def test_each_line_is_sent_once_also_by_a_later_process(tmp_path: Path) -> None:
    service = Service()
    write(tmp_path, 1, 2)
    first = Forwarder(tmp_path, [service])
    first.send()
    write(tmp_path, 3)
    first.send()
    assert first.finish() == ["at one"]
    write(tmp_path, 4)
    Forwarder(tmp_path, [service]).send()
    assert service.values == [(step, 1.5, {"a/b": step * 0.5}) for step in (1, 2, 3, 4)]
    assert service.ids == ["", "one-1"], "the same run goes on"


def test_what_is_no_finite_number_is_left_out(tmp_path: Path) -> None:
    line = {"time": 1.0, "step": 1, "a/x": None, "a/y": "text", "a/z": float("inf"), "a/ok": 2, "plain": 3.0}
    torn = '{"step": 2, "ti\n{"step": 3}\n[]\n'
    (tmp_path / METRICS_FILE).write_text(f"{torn}{json.dumps(line)}\n")
    service = Service()
    Forwarder(tmp_path, [service]).send()
    assert service.values == [(1, 1.0, {"a/ok": 2.0, "plain": 3.0})]


def test_a_service_that_is_away_is_asked_again_and_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    away, there = Service("away", fails=2), Service("there")
    write(tmp_path, 1, 2)
    forwarder = Forwarder(tmp_path, [away, there])
    forwarder.send()
    assert forwarder.problems == {"away": "away is away"}
    assert (away.steps, there.steps) == ([], [1, 2])
    forwarder.send()
    forwarder.finish()
    assert (away.steps, forwarder.problems) == ([1, 2], {})


def folder_of_a_run(tmp_path: Path, **monitor: Any) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "run_dir": str(folder), "monitor": monitor}))
    write(folder, 1, 2, 3)
    return folder


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The real library with its store of files, in a process of its own: it starts threads that never end."""
    folder = folder_of_a_run(tmp_path, trackers=[{"kind": "mlflow", "project": "p"}])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for _ in range(2):
        done = run_track(folder)
        assert done.returncode == 0, done.stderr
        assert "MLflow, experiment p, run " in done.stdout
    (values,) = (tmp_path / "mlruns").glob("*/*/metrics/a/b")
    assert [line.split()[1:] for line in values.read_text().splitlines()] == [["0.5", "1"], ["1.0", "2"], ["1.5", "3"]]
    (seed,) = (tmp_path / "mlruns").glob("*/*/params/seed")
    assert seed.read_text() == "0"


@pytest.mark.parametrize(
    ("kind", "pattern", "parts"),
    [("wandb", "offline-run-*/*.wandb", (b"a/b", b"algorithm", b"tracked")), ("swanlab", "run-*/*.swanlab", (b"a/b",))],
)
def test_a_service_that_keeps_files(tmp_path: Path, kind: str, pattern: str, parts: tuple[bytes, ...]) -> None:
    folder = folder_of_a_run(tmp_path, trackers=[{"kind": kind, "offline": True, "project": "p"}])
    done = run_track(folder)
    assert done.returncode == 0, done.stderr
    assert f"for `{kind} sync`" in done.stdout
    (file,) = (folder / "trackers" / kind).glob(pattern)
    body = file.read_bytes()
    assert all(word in body for word in parts)


def run_track(folder: Path, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "track", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        **how,
    )


def test_a_run_without_a_folder_is_refused_before_a_service_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    folder, file = tmp_path / "run", tmp_path / "new.yaml"
    file.write_text(yaml.safe_dump({**SETTINGS, "run_dir": str(folder)}))
    assert main(["track", str(file), "--to", "mlflow"]) == 2
    assert f"run 'tracked' has no folder {folder} yet" in capsys.readouterr().err
    assert not folder.exists()


def test_a_state_that_is_rubbish_says_what_to_remove(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    for rubbish in ("[]", "{", '{"one": 3, "tree": {"open": 3}}'):
        for file in ("sent", "spans"):
            (tmp_path / "trackers" / f"{file}.json").write_text(rubbish)
        with pytest.raises(TrackerError, match=r"sent\.json is not a valid record .*: remove it to send all again"):
            Forwarder(tmp_path, [Service()])
        with pytest.raises(TrackerError, match=r"spans\.json is not a valid record .*: remove it to send all again"):
            SpanForwarder(tmp_path, "traced", OtlpClient("http://127.0.0.1:9", "NONE", 1.0))


def test_a_service_that_is_not_installed_or_named_twice_is_said_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config({**SETTINGS, "monitor": {"trackers": [{"kind": "mlflow"}]}})
    assert check_trackers(config) == []
    with pytest.raises(ConfigError, match="wanted each kind once"):
        load_config({**SETTINGS, "monitor": {"trackers": [{"kind": "mlflow"}, {"kind": "mlflow"}]}})
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"mlflow is not installed: pip install 'trinity-mq\[mlflow\]'"):
        check_trackers(config)


def test_nothing_about_the_broker_is_shown() -> None:
    config = load_config({**SETTINGS, "broker": {"url": "amqp://me:secret@h/"}})
    assert "secret" not in json.dumps(shown_settings(config))


async def test_a_run_whose_service_is_away_ends_and_says_how_to_send_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    folder = folder_of_a_run(tmp_path, trackers=[{"kind": "mlflow"}])
    config = load_config(folder / "config.yaml")
    process = TrackerProcess(config, RunFolder(config), said.append)
    await process.start()
    await process.end()
    (line,) = said
    assert line.startswith("metrics were not all sent to mlflow: the process ended with 2, see ")
    assert line.endswith(f"`trinity-mq track {folder}` sends the rest")
    assert "set MLFLOW_TRACKING_URI to a server" in (folder / "logs" / "track.out").read_text()


TRACED: dict[str, Any] = {"name": "traced", "model": {"tiny": {}}}
ASKED = TraceSpan("runner", "runner-0", "ask engine", 2.0, 3.0, batch=1, task=3, first_run=0, ticks=2_000_000)
TRAINED = TraceSpan(
    "trainer", "trainer-0", "write history", 5.0, 6.0, batch=1, ticks=5_000_000, attributes={"tmq.version": "1.1"}
)
APPLIED = TraceSpan("engine", "engine-0", "apply weights", 7.0, 8.0, batch=1, version="1.1", ticks=7_000_000)
OPENED = TraceSpan("explorer", "explorer-0", "make ticket", 1.0, 1.5, batch=1, ticks=1_000_000)
BATCH_ONE = (OPENED, ASKED, TRAINED, APPLIED)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    trace.stop_trace()


def tree_of(spans: Sequence[TreeSpan]) -> dict[str, str]:
    """Return by name the name of the parent, of spans of one trace whose names differ."""
    names = {one.id: one.name for one in spans}
    assert len({one.trace for one in spans}) == 1
    assert len(names) == len(spans)
    return {one.name: names[one.parent] if one.parent else "" for one in spans}


WHOLE = {
    "batch 1": "",
    "explore": "batch 1",
    "make ticket": "explore",
    "rollout": "batch 1",
    "task 3": "rollout",
    "ask engine": "task 3",
    "train": "batch 1",
    "write history": "train",
    "sync": "batch 1",
    "apply weights": "sync",
}


def test_a_batch_is_one_tree_from_its_task_to_its_version() -> None:
    tree = TraceTree("traced", "key")
    found = [*tree.add(BATCH_ONE), *tree.finish()]
    assert tree_of(found) == WHOLE
    by_name = {one.name: one for one in found}
    assert (by_name["batch 1"].start, by_name["batch 1"].end) == (1.0, 8.0)
    assert by_name["batch 1"].attributes == {"tmq.run": "traced", "tmq.batch": "1", "tmq.version": "1.1"}
    asked = by_name["ask engine"].attributes
    assert (asked["tmq.task"], asked["tmq.agent"], asked["tmq.count"]) == (3, "runner-0", 1)


def test_ids_are_the_same_in_every_order_and_after_a_restart() -> None:
    whole = TraceTree("traced", "key")
    expected = {one.id: one for one in (*whole.add(BATCH_ONE), *whole.finish())}
    state: Any = None
    found: list[TreeSpan] = []
    for one in reversed(BATCH_ONE):
        tree = TraceTree("traced", "key", state=state)
        found += tree.add([one])
        state = json.loads(json.dumps(tree.state))
    found += TraceTree("traced", "key", state=state).finish()
    assert {one.id: one for one in found} == expected
    assert len(found) == len(expected), "each once"
    other = TraceTree("traced", "of a run that began anew")
    assert other.add([OPENED])[0].trace != whole.add([OPENED])[0].trace


def test_a_batch_is_over_when_its_weights_are_made_and_nothing_comes_any_more() -> None:
    tree = TraceTree("traced", "key")
    assert all(one.parent for one in tree.add(BATCH_ONE))
    later = replace(OPENED, batch=2, start=8.0, end=8.1 + SETTLED_SECONDS)
    assert [one.name for one in tree.add([later]) if not one.parent] == ["batch 1"]
    late = replace(ASKED, start=9.0, end=9.1, ticks=9_000_000)
    assert [one.name for one in tree.add([late])] == ["ask engine"], "below its task, whose span is known"
    assert [one.name for one in tree.finish() if not one.parent] == ["batch 2"]


def test_what_is_written_comes_once_torn_lines_never_and_new_processes_too(folder: Path) -> None:
    tail = TraceTail(folder)
    assert tail.read() is None
    start_trace("runner", "runner-0", folder, on=True)
    record("first", 1.0, 2.0, batch=1)
    trace.flush_trace()
    assert [one.what for one in tail.read() or ()] == ["first"]
    path = folder / "trace" / "runner-0.jsonl"
    with path.open("a") as file:
        file.write('[["still being written",1,nu')
    assert tail.read() is None
    tail = TraceTail(folder, json.loads(json.dumps(tail.state)))
    start_trace("runner", "runner-0", folder, on=True)  # it was killed, and begins anew
    with path.open("a") as file:
        file.write('"text"\n[1]\n[["too","short"]]\n{"role":1}\n' + "x" * READ_BYTES + "\n")
    record("second", 3.0, 4.0, batch=1)
    trace.flush_trace()
    start_trace("engine", "engine-0", folder, on=True)
    record("third", 3.0, 4.0, batch="1")
    trace.flush_trace()
    found: list[str] = []
    while (spans := tail.read()) is not None:
        found += [one.what for one in spans]
    assert sorted(found) == ["second", "third"]
    assert sorted(one.what for one in read_trace(folder)) == ["first", "second", "third"]


def test_batches_that_are_not_exported_cost_no_span(folder: Path) -> None:
    start_trace("runner", "runner-0", folder, on=True, sample=0.25, exported_only=True)
    for n in range(200):
        record("ask engine", float(n), n + 0.5, batch=str(n))
        record("apply weights", float(n), n + 0.5, batch=n, version=(1, n))
        record("apply weights", float(n), n + 0.5, version=(1, n))
        token = BATCH.set(n)
        ready = BatchReady(batch=n, ticket="t", op="o", chunks=0, experiences=0)
        said = "traceparent" in envelope(ready).headers, bool(trace.trace_headers())
        BATCH.reset(token)
        assert said == (is_sampled(trace_id(trace_key(folder / "trace"), n), 0.25),) * 2
    trace.flush_trace()
    key = trace_key(folder / "trace")
    found = read_trace(folder)
    names = [name for n in range(200) for name in (str(n), f"weights 1.{n}")]
    exported = {name for name in names if is_sampled(trace_id(key, name), 0.25)}
    assert 60 < len(exported) < 140
    assert {str(one.batch) for one in found} == exported
    assert all(one.version is not None for one in found if str(one.batch).startswith("weights"))


def test_spans_of_a_sync_that_an_earlier_release_wrote_have_a_trace_of_their_weights(folder: Path) -> None:
    (folder / "trace").mkdir()
    who = {"role": "engine", "agent": "engine-0", "clock": "a", "pid": 1, "offset": 1000.0}
    row = ["apply weights", None, "1.0", 10**6, 2 * 10**6, 8000, 1, 0, False]
    (folder / "trace" / "engine-0.jsonl").write_text(f"{json.dumps(who)}\n{json.dumps([row])}\n")
    tree = TraceTree("traced", trace_key(folder / "trace"))
    found = [*tree.add(read_trace(folder)), *tree.finish()]
    assert tree_of(found) == {"weights 1.0": "", "sync": "weights 1.0", "apply weights": "sync"}


def test_a_task_from_outside_is_linked_to_the_work_that_submitted_it(tmp_path: Path) -> None:
    outside = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sim = Simulation(tmp_path, batches=1, taskset=None)

    async def scene() -> None:
        start_trace("explorer", "explorer-0", tmp_path, on=True)
        client = await sim.client()
        await client.declare(*sim.topology.durable)
        await sim.submit(0, headers={"traceparent": outside})
        await sim.submit(1, headers={"traceparent": "rubbish"})
        await sim.run()

    try:
        run_virtually(scene())
        trace.flush_trace()
    finally:
        trace.stop_trace()
    tree = TraceTree("sim", trace_key(tmp_path / "trace"))
    with receiving(Receiver()) as receiver:
        collector = OtlpClient(receiver.url, "NONE", 5.0)
        collector.send([*tree.add(read_trace(tmp_path)), *tree.finish()])
    spans = receiver.batches()["batch 1"]
    (taken,) = [one for _, one in spans.values() if one.name == "take submission"]
    assert spans[taken.parent_span_id.hex()][1].name == "task 0"
    (link,) = taken.links
    assert f"00-{link.trace_id.hex()}-{link.span_id.hex()}-01" == outside


def recorded(folder: Path) -> None:
    start_trace("runner", "runner-0", folder, on=True)
    for n in range(3):
        record("ask engine", 1.0 + n, 2.0 + n, batch=1, size=5)
    trace.flush_trace()


def test_a_collector_gets_each_span_once_also_from_a_later_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(folder)
    monkeypatch.setenv("HEADERS", "Authorization=Basic%20eHk=, x-project=p")
    with receiving(Receiver()) as receiver:
        SpanForwarder(folder, "traced", OtlpClient(receiver.url, "HEADERS", 5.0)).send()
        recorded(folder)
        SpanForwarder(folder, "traced", OtlpClient(f"{receiver.url}/v1/traces", "HEADERS", 5.0)).finish()
    (spans,) = receiver.spans.values()
    assert sorted(one.name for _, one in spans.values()) == ["ask engine"] * 3 + ["batch 1", "rollout"]
    assert receiver.headers[0]["path"] == "/v1/traces"
    assert receiver.headers[-1]["path"] == "/v1/traces"
    assert (receiver.headers[0]["authorization"], receiver.headers[0]["x-project"]) == ("Basic eHk=", "p")
    service, asked = next((service, one) for service, one in spans.values() if one.name == "ask engine")
    assert service == "trinity_mq.runner"
    assert values(asked)["tmq.bytes"] == 5


def test_a_collector_that_is_away_gets_all_of_it_later(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorded(folder)
    with receiving(Receiver()) as receiver:
        receiver.answers = [503, 401, 404]
        forwarder = SpanForwarder(folder, "traced", OtlpClient(receiver.url, "NONE", 5.0))
        forwarder.send()
        assert "answers 503, wanted 200: not now" in forwarder.problem
        forwarder.send()
        assert len(receiver.answers) == 2, "it is not asked again at once"
        for _ in range(2):
            forwarder.finish()
        assert receiver.spans == {}
        forwarder.finish()
    (spans,) = receiver.spans.values()
    assert (len(spans), forwarder.sent, forwarder.lost, forwarder.problem) == (5, 5, 0, "")
    assert capfd.readouterr().out.count("spans_not_sent") <= 1, "said once"


def test_what_a_collector_refuses_keeps_nothing_from_the_rest(folder: Path) -> None:
    recorded(folder)
    with receiving(Receiver()) as receiver:
        receiver.answers = [400]
        forwarder = SpanForwarder(folder, "traced", OtlpClient(receiver.url, "NONE", 5.0))
        forwarder.finish()
    assert (forwarder.lost, forwarder.sent) == (3, 2)
    forwarder = SpanForwarder(folder, "again", OtlpClient("http://127.0.0.1:9", "NONE", 5.0))
    recorded(folder)
    forwarder.finish()
    assert "is monitor.otlp.endpoint right" in forwarder.problem


def folder_of_a_traced_run(tmp_path: Path, **monitor: Any) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**TRACED, "run_dir": str(folder), "monitor": monitor}))
    recorded(folder)
    return folder


def test_the_command_sends_a_run_that_is_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder_of_a_traced_run(folder)
    with receiving(Receiver()) as receiver:
        assert main(["track", str(run), "--to", "otlp", "--endpoint", receiver.url]) == 0
    assert list(receiver.batches()) == ["batch 1"]
    assert f"5 spans to {receiver.url}/v1/traces" in capsys.readouterr().out
    for words, said in (
        ([], "the run has no monitor.trackers: name a service with --to"),
        (["--to", "otlp"], "the run has no monitor.otlp: name a collector with --endpoint"),
        (["--to", "otlp", "--endpoint", "localhost"], "--endpoint is 'localhost', wanted a URL"),
    ):
        assert main(["track", str(run), *words]) == 2
        assert said in capsys.readouterr().err


def test_settings_and_headers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        load_config({**TRACED, "monitor": {"otlp": {"endpoint": "localhost:4318"}}})
    config = load_config({**TRACED, "monitor": {"otlp": {"endpoint": "http://localhost:4318", "sample": 0.5}}})
    assert (config.monitor.traced, config.monitor.sample) == (True, 0.5)
    assert check_trackers(config) == []
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'trinity-mq\[otel\]'"):
        check_trackers(config)
    with pytest.raises(
        TrackerError, match=r"entry 2 of the environment variable X is not of the form name=value"
    ) as caught:
        parse_headers("a=b,secret", "X")
    assert "secret" not in str(caught.value)

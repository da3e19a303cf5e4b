"""Spans on their way to a collector of OpenTelemetry: one tree a batch, each span once, whatever the collector does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.otlp_receiver import Receiver, receiving, values
from trinity_agents.simulation import Simulation
from trinity_mq.cli.main import main
from trinity_mq.config import ConfigError, load_config
from trinity_mq.messages import BatchReady, Mark
from trinity_mq.observability.spans.collector import OtlpClient, parse_headers
from trinity_mq.observability.spans.forward import SpanForwarder
from trinity_mq.observability.spans.tree import SETTLED_SECONDS, TraceTree, TreeSpan
from trinity_mq.observability.trackers.base import TrackerError
from trinity_mq.observability.trackers.process import TrackerProcess
from trinity_mq.operations.validate import check_trackers
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.telemetry import trace
from trinity_mq.telemetry.trace import BATCH, TASK, TraceSpan, record, span, start_trace
from trinity_mq.telemetry.trace_files import READ_BYTES, TraceTail, read_trace
from trinity_mq.telemetry.trace_ids import is_sampled, trace_id, trace_key
from trinity_mq.testing.virtual_time import run_virtually

SETTINGS: dict[str, Any] = {"name": "traced", "model": {"tiny": {}}}
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


def parsed(header: object) -> tuple[str, str, int]:
    """Return trace, parent and flags of a header ``traceparent``."""
    match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", str(header))
    assert match is not None, header
    return match[1], match[2], int(match[3], 16)


def test_messages_and_requests_name_their_parent(folder: Path) -> None:
    ready = BatchReady(batch=4, ticket="t", op="o", chunks=0, experiences=0)
    assert "traceparent" not in envelope(ready).headers, "switched off"
    start_trace("operator", "operator-0", folder, on=True, sample=0.0)
    parent = parsed(envelope(ready).headers["traceparent"])
    assert parent[2] == 0, "not sampled"
    start_trace("operator", "operator-0", folder, on=True)
    parent = parsed(envelope(ready).headers["traceparent"])
    assert parent[0] == trace_id(trace_key(folder / "trace"), "4")
    assert parent[2] == 1
    assert "traceparent" not in envelope(Mark(nonce="n")).headers, "of no batch"
    batch, task = BATCH.set(4), TASK.set((3, 0))
    try:
        of_task = parsed(trace.trace_headers()["traceparent"])
        with span("ask engine", wait=True) as asked:
            of_call = parsed(asked.parent_header()["traceparent"])
    finally:
        BATCH.reset(batch)
        TASK.reset(task)
    trace.flush_trace()
    tree = TraceTree("traced", trace_key(folder / "trace"))
    found = {one.name: one for one in (*tree.add(read_trace(folder)), *tree.finish())}
    assert of_task[:2] == (found["task 3"].trace, found["task 3"].id)
    assert of_call[:2] == (found["ask engine"].trace, found["ask engine"].id)


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


def test_memory_is_bounded_while_the_collector_is_away(folder: Path) -> None:
    start_trace("engine", "engine-0", folder, on=True)
    for n in range(20_000):
        record("generate", float(n), float(n) + 0.5, batch=n % 7)
    trace.flush_trace()

    forwarder = SpanForwarder(folder, "traced", OtlpClient("http://127.0.0.1:9", "NONE", 5.0))
    for _ in range(5):
        forwarder.finish()
    assert 0 < len(forwarder._unsent) < 12_000, "what one read brought; the rest waits in the file"


def folder_of_a_run(tmp_path: Path, **monitor: Any) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "run_dir": str(folder), "monitor": monitor}))
    recorded(folder)
    return folder


def test_the_command_sends_a_run_that_is_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder_of_a_run(folder)
    with receiving(Receiver()) as receiver:
        assert main(["track", str(run), "--to", "otlp", "--endpoint", receiver.url]) == 0
    assert list(receiver.batches()) == ["batch 1"]
    assert f"5 spans to {receiver.url}/v1/traces" in capsys.readouterr().out
    assert main(["track", str(run), "--to", "otlp"]) == 2
    assert "the run has no monitor.otlp: name a collector with --endpoint" in capsys.readouterr().err
    assert main(["track", str(run), "--to", "otlp", "--endpoint", "localhost"]) == 2
    assert "--endpoint is 'localhost', wanted a URL" in capsys.readouterr().err


async def test_a_run_whose_collector_never_comes_ends_and_says_so_once(folder: Path) -> None:
    run = folder_of_a_run(folder, otlp={"endpoint": "http://127.0.0.1:9"})
    said: list[str] = []
    config = load_config(run / "config.yaml", [f"run_dir={run}"])
    process = TrackerProcess(config, RunFolder(config), said.append)
    await process.start()
    await process.end()
    (line,) = said
    assert line.startswith("spans were not all sent to http://127.0.0.1:9: the process ended with 2, see ")
    output = (run / "logs" / "track-spans.out").read_text()
    assert "is monitor.otlp.endpoint right" in output
    assert "Traceback" not in output


def test_settings_and_headers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        load_config({**SETTINGS, "monitor": {"otlp": {"endpoint": "localhost:4318"}}})
    config = load_config({**SETTINGS, "monitor": {"otlp": {"endpoint": "http://localhost:4318", "sample": 0.5}}})
    assert (config.monitor.traced, config.monitor.sample) == (True, 0.5)
    assert check_trackers(config) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trinity-mq\[otel\]'"):
        check_trackers(config)
    with pytest.raises(
        TrackerError, match=r"entry 2 of the environment variable X is not of the form name=value"
    ) as caught:
        parse_headers("a=b,secret", "X")
    assert "secret" not in str(caught.value)


def test_a_state_that_is_rubbish_says_what_to_remove(folder: Path) -> None:
    (folder / "trackers").mkdir()
    for rubbish in ("[]", "{", '{"tree": {"open": 3}}'):
        (folder / "trackers" / "spans.json").write_text(rubbish)
        with pytest.raises(TrackerError, match=r"spans\.json is not a valid record .*: remove it to send all again"):
            SpanForwarder(folder, "traced", OtlpClient("http://127.0.0.1:9", "NONE", 1.0))

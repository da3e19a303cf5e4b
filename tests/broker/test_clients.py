"""The clients in schemas/clients against a real broker; the explorer's and the operator's part is played here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from yarl import URL

from tests.golden.forms import experience_form
from trinity_mq.bus.base import Consumer, Delivery, Envelope, Incoming
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.experience import EID, Experience, encode
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.messages import (
    JSON_CONTENT_TYPE,
    Accepted,
    BatchClosed,
    SubmissionOutcome,
    TaskBody,
    TaskSubmission,
    Wanted,
    decode,
)
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.testing.tcp_proxy import FaultProxy
from trinity_mq.transport.experience_parts import AttemptRows, ReceivedPart, requested_parts

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "schemas" / "clients"
UNAVAILABLE, OLDEST_NODE = 69, 18
TASK = {"raw_task": {"question": "1+1=", "n": 7, "x": [1.5, None]}, "workflow_args": {"a": {"b": "ü"}}}

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


class Program:
    """A process that is ended with the block."""

    def __init__(self, words: Sequence[str | Path], folder: Path, url: str) -> None:
        self._words, self._folder, self._url = words, folder, url

    async def __aenter__(self) -> Program:
        pipe, env = asyncio.subprocess.PIPE, os.environ | {"TRINITY_MQ_BROKER_URL": self._url}
        self._process = await asyncio.create_subprocess_exec(
            *self._words, cwd=self._folder, env=env, stdout=pipe, stderr=pipe
        )
        return self

    async def ended(self) -> tuple[int | None, str, str]:
        """Return exit status, output and errors."""
        async with asyncio.timeout(60):
            out, err = await self._process.communicate()
        return self._process.returncode, out.decode(), err.decode()

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@dataclass(frozen=True)
class Client:
    """The program of a client that submits a task, built."""

    name: str
    command: tuple[str | Path, ...]
    folder: Path

    def submits(
        self, url: str, run: str, *words: str, task: dict[str, Any] = TASK, wait: float | None = 50.0
    ) -> Program:
        words = ("--run", run, "--task", json.dumps(task), *words)
        words += () if wait is None else ("--wait", f"{wait}s" if self.name == "go" else str(wait))
        words += ("--broker", url) if self.name == "js" else ()
        return Program((*self.command, *words), self.folder, url)

    def printed(self, out: str) -> tuple[dict[str, Any], list[Any]]:
        """Return the outcome and the experiences of an output."""
        if self.name == "go":
            outcome, *experiences = (json.loads(line) for line in out.splitlines())
            return outcome, experiences
        told = json.loads(out)
        return told["outcome"], [one for part in told["experiences"] for one in part]

    def described(self, experience: Experience) -> dict[str, Any]:
        """Return an experience as the program prints it."""
        if self.name == "go":
            return experience_form(experience)
        eid = experience.eid.to_dict()
        return {
            "eid": eid | ({"task": str(eid["task"])} if isinstance(eid["task"], int) else {}),
            "reward": experience.reward,
            "experience_type": experience.experience_type,
            "prompt_length": experience.prompt_length,
            "info": experience.info,
            "tokens": experience.tokens.tolist(),
            "logprobs": None if experience.logprobs is None else experience.logprobs.float().tolist(),
        }


def go(factory: pytest.TempPathFactory, *words: str | Path, **environment: str) -> str:
    """Return what a go command said; skip where there is no Go or not the libraries."""
    done = subprocess.run(
        [CLIENTS / "go" / "offline", "go", *words],
        env=os.environ | {"GOCACHE": str(factory.getbasetemp() / "go-cache")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def go_client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    built = tmp_path_factory.mktemp("go-client") / "trinity-mq-submit"
    go(tmp_path_factory, "build", "-o", built, "trinitymq/cmd/trinity-mq-submit")
    return Client("go", (built,), built.parent)


@pytest.fixture(scope="session")
def js_client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Its package in a folder of its own, installed as its lock file says, and built."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST_NODE:
        pytest.skip(f"needs Node {OLDEST_NODE} or later, this is {version}")
    folder = tmp_path_factory.mktemp("js") / "package"
    shutil.copytree(CLIENTS / "js", folder, ignore=shutil.ignore_patterns("node_modules", "dist"))
    for words in (["ci", "--no-audit", "--no-fund", "--prefer-offline"], ["run", "build"]):
        done = subprocess.run([npm, *words], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, f"npm {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return Client("js", (node, "examples/submit.mjs"), folder)


@pytest.fixture(params=["go", "js"])
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.getfixturevalue(f"{request.param}_client")
    return found


@pytest.fixture
async def submitted(bus: RabbitBus, topology: Topology) -> AsyncIterator[Consumer]:
    """What an explorer reads."""
    async with await bus.consume(topology.submitted) as feed:
        yield feed


async def received(feed: Consumer) -> tuple[TaskSubmission, Delivery]:
    """Return the next submission, acknowledged."""
    async with asyncio.timeout(30):
        delivery = await anext(feed)
    await delivery.ack()
    return decode(delivery.body, TaskSubmission, delivery.content_type), delivery


async def answer(bus: RabbitBus, delivery: Delivery, *mails: Envelope) -> None:
    assert delivery.reply_to is not None
    for mail in mails:
        assert await bus.publish("", delivery.reply_to, mail)


def outcome_of(delivery: Delivery, **fields: Any) -> Envelope:
    """Return what an explorer tells of a submission."""
    assert delivery.message_id is not None
    known = {"submission_id": delivery.message_id, "batch": "3/gsm8k", "ticket": "t", "outcome": "finished"}
    outcome = SubmissionOutcome.model_validate(known | fields)
    return envelope(outcome, message_id=f"outcome-{outcome.submission_id}", correlation_id=delivery.correlation_id)


def parts_of(delivery: Delivery, bodies: Sequence[bytes]) -> list[Envelope]:
    """Return the experience parts of a submission as an operator publishes them."""
    accepted = Accepted(task_id=0, run_base=0, attempt="a", runs=[0], parts=len(bodies))
    wanted = Wanted(task_id=0, reply_to=delivery.reply_to or "", correlation_id=delivery.correlation_id)
    manifest = BatchClosed(batch=3, ticket="t", accepted=[accepted], wanted=[wanted])
    parts = {}
    for number, body in enumerate(bodies):
        incoming = Incoming(body=body, exchange="", routing_key="", queue="", content_type=EXPERIENCES)
        parts["a", number] = ReceivedPart(incoming, AttemptRows(("a", number)))
    return [mail for _, mail in requested_parts(manifest, parts)]


def group(run: int, length: int) -> list[Experience]:
    """Return two experiences, the second without what may be absent."""
    ids = torch.arange(length, dtype=torch.int32) * 7 % 50_000 + run
    return [
        Experience(
            eid=EID(batch=3, task=2**60 + run, run=run, step=0, suffix=f"a{run}"),
            tokens=ids,
            prompt_length=2,
            logprobs=(-torch.arange(length - 2) / 8).to(torch.bfloat16),
            reward=run + 0.5,
            info={"note": "Größe 🙂"},
        ),
        Experience(eid=EID(batch=3, task="b", run=run, step=1, suffix="x"), tokens=[run, 1, 2], prompt_length=1),
    ]


@pytest.mark.parametrize("form", ["plain", "compressed"])
async def test_outcome_and_experiences_come_back(
    client: Client, broker_url: str, topology: Topology, bus: RabbitBus, submitted: Consumer, form: str
) -> None:
    # one body of a single AMQP frame, one of many
    groups = [group(0, 40), group(1, 60_000), group(2, 10)]
    bodies = [encode(found, compression="none" if form == "plain" else "zstd") for found in groups]
    assert bodies[1][5] == (form == "compressed")
    async with client.submits(broker_url, topology.run, "--experiences", "--id", "mine") as program:
        message, delivery = await received(submitted)
        assert message == TaskSubmission(
            task=TaskBody.model_validate(TASK), submission_id="mine", want_experiences=True
        )
        assert "repeat_times" not in message.task.model_fields_set, "left to the run"
        assert (delivery.message_id, delivery.correlation_id, delivery.kind) == ("mine", "mine", "task_submission")
        told = outcome_of(
            delivery, outcome="partial", completed_runs=2, total_runs=3, metrics={"r": 0.25}, experiences=3
        )
        if form == "compressed":
            outcome = decode(told.body, SubmissionOutcome, told.content_type)
            text = json.dumps(outcome.model_dump(mode="json")).encode()
            told = Envelope(body=text, kind=outcome.kind, content_type=JSON_CONTENT_TYPE, correlation_id="mine")
        first, second, third = parts_of(delivery, bodies)
        stray = Envelope(body=told.body, kind=told.kind, content_type=told.content_type, correlation_id="other")
        # at least once, and a part may overtake the outcome
        await answer(bus, delivery, stray, first, told, told, third, first, second)
        code, out, err = await program.ended()
    assert code == 0, err
    printed, experiences = client.printed(out)
    assert (printed["outcome"], printed["batch"], printed["total_runs"]) == ("partial", "3/gsm8k", 3)
    assert (printed["completed_runs"], printed["metrics"]) == (2, {"r": 0.25})
    by_run = sorted(experiences, key=lambda one: (one["eid"]["run"], one["eid"]["step"]))
    assert by_run == [client.described(one) for found in groups for one in found]


async def test_parts_that_do_not_come_in_time_are_counted(
    client: Client, broker_url: str, topology: Topology, bus: RabbitBus, submitted: Consumer
) -> None:
    async with client.submits(broker_url, topology.run, "--experiences", wait=3.0) as program:
        _, delivery = await received(submitted)
        await answer(bus, delivery, outcome_of(delivery, experiences=2), *parts_of(delivery, [encode(group(0, 9))]))
        code, _, err = await program.ended()
    assert code == 1
    assert "1 of 2 experience parts" in err


@pytest.mark.parametrize("exchange", [True, False], ids=["no queue", "no exchange"])
async def test_a_run_that_takes_no_tasks_is_named(
    client: Client, broker_url: str, topology: Topology, bus: RabbitBus, exchange: bool
) -> None:
    if exchange:
        await bus.declare(topology.tasks_train)
    async with client.submits(broker_url, topology.run) as program:
        code, out, err = await program.ended()
    assert (code, out) == (1, "")
    assert f'NoSuchRunError: no run "{topology.run}" takes tasks' in err or "run takes no tasks on this broker" in err
    assert topology.run in err


async def test_a_lost_connection_ends_the_wait(
    client: Client, broker_url: str, topology: Topology, submitted: Consumer
) -> None:
    async with FaultProxy(broker_url) as proxy, client.submits(proxy.url, topology.run) as program:
        await received(submitted)
        proxy.cut()
        code, out, err = await program.ended()
    assert (code, out) == (1, "")
    assert {"go": "connection to the broker lost", "js": "the connection was closed"}[client.name] in err


async def test_a_wrong_password_is_told_without_repeating_it(client: Client, broker_url: str) -> None:
    async with client.submits(str(URL(broker_url).with_password("s3cr3t")), "any") as program:
        code, _, err = await program.ended()
    assert code == 1
    assert {"go": "wrong user name or password", "js": "ACCESS"}[client.name] in err
    assert "s3cr3t" not in err


async def test_a_blocked_broker_does_not_hold_the_go_command(
    go_client: Client, broker_url: str, topology: Topology, broker_node: PrivateNode, submitted: Consumer
) -> None:
    await broker_node.ctl("set_vm_memory_high_watermark", "0.0001")
    try:
        async with go_client.submits(broker_url, topology.run, wait=0.5) as program:
            code, _, err = await program.ended()
    finally:
        await broker_node.ctl("set_vm_memory_high_watermark", "0.4")
    assert code == 1
    assert "no confirm from the broker" in err


async def test_the_go_command_tells_by_its_exit_status_what_became_of_the_task(
    go_client: Client, broker_url: str, topology: Topology, bus: RabbitBus, submitted: Consumer
) -> None:
    async with go_client.submits(broker_url, topology.run) as program:
        _, delivery = await received(submitted)
        await answer(bus, delivery, outcome_of(delivery, outcome="failed", message="run 0: ValueError: no"))
        code, out, err = await program.ended()
    assert (code, err) == (1, "")
    assert go_client.printed(out)[0]["message"] == "run 0: ValueError: no"
    task = {"raw_task": {}, "repeat_times": 3, "is_eval": True}
    async with go_client.submits(broker_url, topology.run, "--id", "once", task=task, wait=None) as program:
        assert await program.ended() == (0, "", "submitted once\n")
    message, delivery = await received(submitted)
    assert (message.task, delivery.reply_to) == (TaskBody(repeat_times=3, is_eval=True), None)
    for words, said in (["--experiences"], "-experiences needs it"), (["more"], 'unknown word "more"'):
        async with go_client.submits(broker_url, topology.run, *words, wait=None) as program:
            code, out, err = await program.ended()
        assert (code, out) == (2, "")
        assert said in err


def test_many_at_once_in_one_go_program(tmp_path_factory: pytest.TempPathFactory, broker_url: str) -> None:
    """The tests in live_test.go, which play the explorer themselves."""
    said = go(
        tmp_path_factory, "test", "-count=1", "-v", "-run", "Live", "trinitymq", TRINITY_MQ_TEST_BROKER_URL=broker_url
    )
    assert said.count("--- PASS: TestLive") == 4


async def test_many_tasks_of_one_js_program_are_published_at_once(
    js_client: Client, broker_url: str, topology: Topology, submitted: Consumer
) -> None:
    script = """
        import { Client } from "trinity-mq-client";
        const client = await Client.connect(process.argv[1], process.argv[2]);
        const tasks = Array.from({ length: 50 }, (_, number) => ({ raw_task: { number }, is_eval: true }));
        console.log(JSON.stringify(await Promise.all(tasks.map((task) => client.publish(task)))));
        await client.close();
    """
    words = ("node", "--input-type=module", "-e", script, broker_url, topology.run)
    async with Program(words, js_client.folder, broker_url) as program:
        code, out, err = await program.ended()
    assert code == 0, err
    ids = json.loads(out)
    assert len(set(ids)) == 50
    for number, name in enumerate(ids):
        message, delivery = await received(submitted)
        assert (message.submission_id, message.task.raw_task) == (name, {"number": number})
        assert (message.task.is_eval, message.want_experiences, delivery.reply_to) == (True, False, None)


def test_the_own_tests_of_the_js_client_pass(js_client: Client) -> None:
    surroundings = os.environ | {"TRINITY_MQ_GOLDEN": str(ROOT / "schemas" / "golden")}
    tests = [str(path.relative_to(js_client.folder)) for path in js_client.folder.glob("test/*.test.mjs")]
    words = ["node", "--test", "--test-reporter=tap", *tests]
    done = subprocess.run(
        words, cwd=js_client.folder, env=surroundings, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) > 100, "goldens left out?"


def test_the_lock_file_of_the_js_client_names_no_host() -> None:
    text = (CLIENTS / "js" / "package-lock.json").read_text()
    assert '"resolved"' not in text
    assert "://" not in text
    pinned = json.loads((CLIENTS / "js" / "package.json").read_text())
    versions = [*pinned["dependencies"].values(), *pinned["devDependencies"].values()]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions), versions

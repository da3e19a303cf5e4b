"""The JavaScript client in schemas/clients/js, built, under Node: its own tests, and against a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from trinity_mq.bus.base import Consumer, Delivery, Envelope, Incoming
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import CONTENT_TYPE, EID, Experience, encode
from trinity_mq.messages import (
    JSON_CONTENT_TYPE,
    Accepted,
    BatchClosed,
    ExperienceReference,
    SubmissionOutcome,
    TaskSubmission,
    Wanted,
    decode,
)
from trinity_mq.messages import encode as encode_message
from trinity_mq.runtime.deliveries import REFERENCE, envelope
from trinity_mq.testing.tcp_proxy import FaultProxy
from trinity_mq.transport.co_batched_parts import AttemptRows
from trinity_mq.transport.experience_parts import ReceivedPart, requested_parts

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "schemas" / "clients" / "js"
OLDEST_NODE = 18
TASK = {"raw_task": {"question": "+372=", "answer": "7"}, "is_eval": False}

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a folder of its own, installed as its lock file says, and built."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST_NODE:
        pytest.skip(f"needs Node {OLDEST_NODE} or later, this is {version}")
    folder = tmp_path_factory.mktemp("js") / "package"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("node_modules", "dist"))
    for words in (["ci", "--no-audit", "--no-fund", "--prefer-offline"], ["run", "build"]):
        done = subprocess.run([npm, *words], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, f"npm {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return folder


@pytest.fixture
async def bus(broker_url: str, topology: Topology) -> AsyncIterator[RabbitBus]:
    made = RabbitBus(broker_url, topology, config=BrokerConfig(), name="test")
    await made.connect()
    yield made
    await made.close()


@pytest.fixture
async def submitted(bus: RabbitBus, topology: Topology) -> AsyncIterator[Consumer]:
    """What an explorer reads."""
    async with await bus.consume(topology.submitted) as feed:
        yield feed


class Node:
    """A Node process in the package's folder, ended with the block."""

    def __init__(self, package: Path, *words: str) -> None:
        self._package, self._words = package, words

    async def __aenter__(self) -> Node:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            "node", *self._words, cwd=self._package, stdout=pipe, stderr=pipe
        )
        return self

    async def end(self) -> tuple[int, str, str]:
        """Return exit status, output and errors."""
        async with asyncio.timeout(60):
            out, err = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, out.decode(), err.decode()

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


def submit(package: Path, url: str, run: str, *words: str) -> Node:
    task = json.dumps(TASK)
    return Node(package, "examples/submit.mjs", "--broker", url, "--run", run, "--task", task, "--wait", "50", *words)


async def received(feed: Consumer) -> tuple[TaskSubmission, Delivery]:
    """Return the next submission, acknowledged."""
    async with asyncio.timeout(30):
        delivery = await anext(feed)
    await delivery.ack()
    return decode(delivery.body, TaskSubmission, delivery.content_type), delivery


async def answer(bus: RabbitBus, delivery: Delivery, mails: Iterable[Envelope]) -> None:
    assert delivery.reply_to is not None
    for mail in mails:
        assert await bus.publish("", delivery.reply_to, mail)


def incoming(body: bytes, content_type: str) -> Incoming:
    """Return what an operator has of a part."""
    return Incoming(body=body, exchange="", routing_key="", queue="", content_type=content_type)


def outcome_of(message: TaskSubmission, parts: int) -> SubmissionOutcome:
    return SubmissionOutcome(
        submission_id=message.submission_id,
        batch=3,
        ticket="t1",
        outcome="finished",
        completed_runs=4,
        total_runs=4,
        metrics={"reward": 0.25},
        experiences=parts,
    )


def group(attempt: int, run: int, length: int) -> list[Experience]:
    """Return two experiences, the second without what may be absent."""
    ids = torch.arange(length, dtype=torch.int32) * 7 % 50_000 + run
    return [
        Experience(
            eid=EID(batch=3, task=2**60 + attempt, run=run, step=0, suffix=f"a{attempt}"),
            tokens=ids,
            prompt_length=2,
            logprobs=(-torch.arange(length - 2) / 8).to(torch.bfloat16),
            reward=run + 0.5,
            info={"note": "Größe 🙂", "hidden": torch.tensor([1.5, -2.0])},
        ),
        Experience(eid=EID(batch=3, task="b", run=run, step=1, suffix="x"), tokens=[run, 1, 2], prompt_length=1),
    ]


def described(experience: Experience) -> dict[str, Any]:
    """Return an experience as examples/submit.mjs prints it."""
    eid = experience.eid.to_dict()
    info = {key: value for key, value in experience.info.items() if not isinstance(value, torch.Tensor)}
    return {
        "eid": eid | ({"task": str(eid["task"])} if isinstance(eid["task"], int) else {}),
        "reward": experience.reward,
        "experience_type": experience.experience_type,
        "prompt_length": experience.prompt_length,
        "info": info,
        "tokens": experience.tokens.tolist(),
        "logprobs": None if experience.logprobs is None else experience.logprobs.float().tolist(),
    }


def test_its_own_tests_pass(package: Path) -> None:
    surroundings = os.environ | {"TRINITY_MQ_GOLDEN": str(ROOT / "schemas" / "golden")}
    tests = [str(path.relative_to(package)) for path in package.glob("test/*.test.mjs")]
    words = ["node", "--test", "--test-reporter=tap", *tests]
    done = subprocess.run(
        words, cwd=package, env=surroundings, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) > 100, "goldens left out?"


def test_the_lock_file_names_no_host(package: Path) -> None:
    text = (PACKAGE / "package-lock.json").read_text()
    assert '"resolved"' not in text
    assert "://" not in text
    pinned = json.loads((PACKAGE / "package.json").read_text())
    versions = [*pinned["dependencies"].values(), *pinned["devDependencies"].values()]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions), versions


@pytest.mark.parametrize("form", ["plain", "compressed"])
async def test_outcome_and_experiences_come_back(
    package: Path, broker_url: str, topology: Topology, bus: RabbitBus, submitted: Consumer, form: str
) -> None:
    # one body of a single AMQP frame, one of many
    groups = {("a0", 0): group(0, 0, 40), ("a1", 0): group(1, 1, 60_000), ("a1", 1): group(1, 2, 10)}
    compression = "zstd" if form == "compressed" else "none"
    reference = ExperienceReference(url="memory://blobs/x", bytes=20_000_000, sha256="5a" * 32)
    parts = {key: incoming(encode(found, compression=compression), CONTENT_TYPE) for key, found in groups.items()}
    assert parts["a1", 0].body[5] == (form == "compressed")
    parts["a1", 2] = incoming(encode_message(reference), REFERENCE)
    async with submit(package, broker_url, topology.run, "--experiences", "--id", "mine") as node:
        message, delivery = await received(submitted)
        assert message.model_dump(exclude_defaults=True) == {
            "task": {"raw_task": TASK["raw_task"]},
            "submission_id": "mine",
            "want_experiences": True,
        }
        assert (delivery.message_id, delivery.correlation_id) == ("mine", "mine")
        assert delivery.headers["kind"] == "task_submission"
        assert delivery.headers["version"] == 1
        manifest = BatchClosed(
            batch=3,
            ticket="t1",
            accepted=[
                Accepted(task_id=0, run_base=0, attempt="a0", runs=[0], parts=1),
                Accepted(task_id=0, run_base=1, attempt="a1", runs=[1, 2], parts=3),
            ],
            wanted=[Wanted(task_id=0, reply_to=delivery.reply_to or "", correlation_id=delivery.correlation_id)],
        )
        shares = {key: ReceivedPart(part, AttemptRows(key)) for key, part in parts.items()}
        first, second, third, last = (mail for _, mail in requested_parts(manifest, shares))
        outcome = outcome_of(message, parts=4)
        if form == "compressed":
            text = json.dumps(outcome.model_dump(mode="json")).encode()
            told = Envelope(body=text, kind=outcome.kind, content_type=JSON_CONTENT_TYPE, correlation_id="mine")
        else:
            told = envelope(outcome, message_id="outcome-mine", correlation_id="mine")
        stray = envelope(outcome, message_id="outcome-other", correlation_id="other")
        # at least once, and a part may overtake the outcome
        await answer(bus, delivery, [stray, first, last, told, told, third, first, second])
        code, out, err = await node.end()
    assert code == 0, err
    printed = json.loads(out)
    assert printed["outcome"] == outcome.model_dump(mode="json")
    assert printed["references"] == [reference.model_dump(mode="json")]
    wanted = [[described(experience) for experience in groups[key]] for key in groups]
    for batch in printed["experiences"]:
        for experience in batch:
            hidden = experience["info"].pop("hidden", None)
            assert (hidden is None) == (experience["reward"] is None)
    assert printed["experiences"] == wanted


async def test_many_tasks_are_published_at_once(
    package: Path, broker_url: str, topology: Topology, submitted: Consumer
) -> None:
    script = """
        import { Client } from "trinity-mq-client";
        const client = await Client.connect(process.argv[1], process.argv[2]);
        const tasks = Array.from({ length: 50 }, (_, number) => ({ raw_task: { number }, is_eval: true }));
        console.log(JSON.stringify(await Promise.all(tasks.map((task) => client.publish(task)))));
        await client.close();
    """
    async with Node(package, "--input-type=module", "-e", script, broker_url, topology.run) as node:
        code, out, err = await node.end()
    assert code == 0, err
    ids = json.loads(out)
    assert len(set(ids)) == 50
    for number, name in enumerate(ids):
        message, delivery = await received(submitted)
        assert (message.submission_id, message.task.raw_task) == (name, {"number": number})
        assert message.task.is_eval
        assert delivery.reply_to is None
        assert not message.want_experiences


async def test_a_run_that_is_not_there_is_an_error_each_time(package: Path, broker_url: str, unique_run: str) -> None:
    async with submit(package, broker_url, unique_run) as node:
        code, out, err = await node.end()
    assert (code, out) == (1, "")
    assert err.startswith(f'NoSuchRunError: no run "{unique_run}" takes tasks on this broker')
    script = """
        import { Client } from "trinity-mq-client";
        const client = await Client.connect(process.argv[1], process.argv[2]);
        for (const call of [() => client.publish({}), () => client.submit({}), () => client.publish({})]) {
            await call().catch((error) => console.log(error.name));
        }
        await client.close();
    """
    async with Node(package, "--input-type=module", "-e", script, broker_url, unique_run) as node:
        assert await node.end() == (0, "NoSuchRunError\n" * 3, "")


async def test_a_run_that_takes_no_tasks_is_an_error(
    package: Path, broker_url: str, topology: Topology, bus: RabbitBus
) -> None:
    await bus.declare(topology.submitted)
    await bus.delete(topology.submitted.name)
    async with submit(package, broker_url, topology.run) as node:
        code, _, err = await node.end()
    assert code == 1
    assert "NoSuchRunError: no run" in err


async def test_a_lost_connection_ends_the_wait(
    package: Path, broker_url: str, topology: Topology, submitted: Consumer
) -> None:
    async with FaultProxy(broker_url) as proxy, submit(package, proxy.url, topology.run) as node:
        await received(submitted)
        proxy.cut()
        code, out, err = await node.end()
    assert (code, out) == (1, "")
    assert err.startswith("ConnectionError: the connection was closed")
    assert "tasks that were published are done all the same" in err


async def test_an_outcome_that_does_not_come_in_time(
    package: Path, broker_url: str, topology: Topology, bus: RabbitBus, submitted: Consumer
) -> None:
    async with submit(package, broker_url, topology.run, "--experiences", "--id", "s1", "--wait", "3") as node:
        message, delivery = await received(submitted)
        await answer(bus, delivery, [envelope(outcome_of(message, parts=2), correlation_id="s1")])
        code, _, err = await node.end()
    assert code == 1
    assert err.strip() == (
        "TimeoutError: no answer to submission s1 within 3000 ms: its outcome, finished, has come with 0 of 2 "
        "experience parts"
    )


async def test_a_wrong_password_is_refused_without_repeating_it(package: Path, broker_url: str) -> None:
    split = urlsplit(broker_url)
    url = split._replace(netloc=f"{split.username}:s3cr3t@{split.hostname}:{split.port}").geturl()
    async with submit(package, url, "any") as node:
        code, _, err = await node.end()
    assert code == 1
    assert err.startswith(f"ConnectionError: broker {split.hostname}:{split.port}: ")
    assert "ACCESS" in err.upper()
    assert "s3cr3t" not in err

"""The Go client against a real broker; the explorer's and the operator's part is played here."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.forms import experience_form
from trinity_mq.bus import Delivery, Envelope, Topology
from trinity_mq.bus.base import Incoming
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.experience import encode as encode_experiences
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.messages import (
    Accepted,
    BatchClosed,
    SubmissionOutcome,
    TaskBody,
    TaskSubmission,
    Wanted,
    decode,
    decode_any,
)
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.testing.tcp_proxy import FaultProxy
from trinity_mq.transport.co_batched_parts import AttemptRows
from trinity_mq.transport.experience_parts import ReceivedPart, requested_parts

CLIENT = Path(__file__).parents[2] / "schemas" / "clients" / "go"
UNAVAILABLE = 69
TASK = {"raw_task": {"question": "1+1=", "n": 7, "big": 2**63, "x": [1.5, None]}, "workflow_args": {"a": {"b": "ü"}}}

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


def go(factory: pytest.TempPathFactory, *words: str | Path, **environment: str) -> str:
    """Return what a go command said; skip where there is no Go or not the libraries."""
    done = subprocess.run(
        [CLIENT / "offline", "go", *words],
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
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, built once."""
    built = tmp_path_factory.mktemp("go-client") / "trinity-mq-submit"
    go(tmp_path_factory, "build", "-o", built, "trinitymq/cmd/trinity-mq-submit")
    return built


@pytest.fixture
async def bus(broker_url: str, topology: Topology) -> AsyncIterator[RabbitBus]:
    made = RabbitBus(broker_url, topology, config=BrokerConfig(), name="test")
    await made.connect()
    yield made
    await made.close()


@dataclass
class Run:
    """A running command and the run it talks to."""

    bus: RabbitBus
    topology: Topology
    command: Path
    url: str

    @asynccontextmanager
    async def submitting(self, *words: str, task: dict[str, Any] | None = None) -> AsyncIterator[asyncio.Future[Any]]:
        """Run the command beside the block; what is given becomes ``(exit status, lines of JSON, stderr)``."""
        told = ["-run", self.topology.run, "-task", json.dumps(task or TASK), *words]
        process = await asyncio.create_subprocess_exec(
            self.command,
            *told,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"TRINITY_MQ_BROKER_URL": self.url},
        )

        async def ended() -> tuple[int | None, list[Any], str]:
            out, err = await process.communicate()
            return process.returncode, [json.loads(line) for line in out.splitlines()], err.decode()

        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                yield group.create_task(ended())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def submitted(self) -> Delivery:
        """Return the next submission, acknowledged."""
        async with await self.bus.consume(self.topology.submitted, prefetch=1) as feed:
            delivery = await anext(feed)
            await delivery.ack()
            return delivery

    async def tell(self, to: Delivery, **fields: Any) -> None:
        """Publish an outcome as the explorer does."""
        assert to.reply_to is not None
        known = {"submission_id": to.message_id, "batch": "3/gsm8k", "ticket": "t", "outcome": "finished"}
        outcome = SubmissionOutcome.model_validate(known | fields)
        name = f"outcome-{to.message_id}"
        assert await self.bus.publish(
            "", to.reply_to, envelope(outcome, message_id=name, correlation_id=to.correlation_id)
        )

    async def send_parts(self, to: Delivery, bodies: list[bytes]) -> None:
        """Publish experience parts as the operator does."""
        assert to.reply_to is not None
        accepted = Accepted(task_id=0, run_base=0, attempt="a", runs=[0], parts=len(bodies))
        wanted = Wanted(task_id=0, reply_to=to.reply_to, correlation_id=to.correlation_id)
        manifest = BatchClosed(batch=3, ticket="t", accepted=[accepted], wanted=[wanted])
        parts = {
            ("a", number): ReceivedPart(incoming(body), AttemptRows(("a", number)))
            for number, body in enumerate(bodies)
        }
        for reply_to, mail in requested_parts(manifest, parts):
            assert await self.bus.publish("", reply_to, mail)


def incoming(body: bytes) -> Incoming:
    return Incoming(body=body, exchange="", routing_key="", queue="", content_type=EXPERIENCES)


@pytest.fixture
async def run(bus: RabbitBus, topology: Topology, command: Path, broker_url: str) -> Run:
    await bus.declare(topology.submitted)
    return Run(bus, topology, command, broker_url)


def experiences() -> list[Experience]:
    return [
        Experience(
            eid=EID(batch="3/gsm8k", task=0, run=number, suffix=f"s{number}"),
            tokens=[5, 6, 7, 8 + number],
            prompt_length=2,
            logprobs=torch.tensor([-0.5, -1.5 * number], dtype=torch.bfloat16 if number == 2 else torch.float32),
            reward=float("nan") if number == 2 else 0.1 * number,
            response_text=None if number == 1 else "größe",
            info={"n": number, "deep": [{"t": torch.arange(3) + number}]},
            versions=[(0, 1, number)],
        )
        for number in range(3)
    ]


async def test_outcome_and_experiences_come_back(run: Run) -> None:
    made = experiences()
    bodies = [encode_experiences(made[:2]), encode_experiences(made[2:] * 40, compression="zstd")]
    assert bodies[1][5] == 1, "the second is compressed"
    async with run.submitting("-wait", "60s", "-experiences", "-id", "mine") as ending:
        asked = await run.submitted()
        submission = decode(asked.body, TaskSubmission, asked.content_type)
        assert submission == TaskSubmission(
            task=TaskBody.model_validate(TASK), submission_id="mine", want_experiences=True
        )
        assert "repeat_times" not in submission.task.model_fields_set, "left to the run"
        assert isinstance(decode_any(asked.body, asked.content_type), TaskSubmission)
        assert (asked.message_id, asked.correlation_id, asked.kind) == ("mine", "mine", "task_submission")
        # either may come first, and both at least once
        await run.send_parts(asked, bodies)
        await run.send_parts(asked, bodies)
        assert not ending.done()
        await run.tell(asked, experiences=2, completed_runs=2, total_runs=3, outcome="partial", metrics={"r": 0.25})
        code, lines, err = await ending
    assert code == 0, err
    assert lines[0]["outcome"] == "partial"
    assert (lines[0]["batch"], lines[0]["completed_runs"], lines[0]["metrics"]) == ("3/gsm8k", 2, {"r": 0.25})
    assert lines[1:] == [experience_form(one) for one in [*made[:2], *made[2:] * 40]]
    assert err.count("repeated part") == 2


async def test_a_task_that_failed_exits_with_1(run: Run) -> None:
    async with run.submitting("-wait", "60s") as ending:
        await run.tell(await run.submitted(), outcome="failed", message="run 0: ValueError: no", total_runs=8)
        code, lines, err = await ending
    assert (code, err) == (1, "")
    assert (lines[0]["outcome"], lines[0]["message"]) == ("failed", "run 0: ValueError: no")
    assert len(lines) == 1


async def test_rubbish_and_repeats_are_dropped(run: Run) -> None:
    async with run.submitting("-wait", "60s", "-experiences") as ending:
        asked = await run.submitted()
        assert asked.reply_to is not None
        mine = asked.correlation_id
        body = encode_experiences(experiences()[:1])
        for strange in (
            Envelope(body=b"\xc1 rubbish", kind="note", correlation_id=mine),
            Envelope(body=b"\xdf\xff\xff\xff\xff", kind="submission_outcome", correlation_id=mine),
            Envelope(body=b"{", kind="note", content_type="application/json", correlation_id=mine),
            Envelope(body=body, kind="experience_part", content_type=EXPERIENCES, correlation_id="another"),
            Envelope(body=b"", kind="note"),
        ):
            assert await run.bus.publish("", asked.reply_to, strange)
        await run.tell(asked, submission_id="another")
        await run.tell(asked, experiences=1)
        await run.tell(asked, experiences=0, outcome="failed")
        await run.send_parts(asked, [body])
        code, lines, err = await ending
    assert code == 0, err
    assert [line.get("outcome", "experience") for line in lines] == ["finished", "experience"]
    assert err.count("dropped") == 7
    assert "a second outcome" in err


async def test_a_damaged_part_is_an_error_that_says_so(run: Run) -> None:
    body = bytearray(encode_experiences(experiences()))
    body[-1] ^= 1
    async with run.submitting("-wait", "60s", "-experiences") as ending:
        asked = await run.submitted()
        await run.tell(asked, experiences=1)
        await run.send_parts(asked, [bytes(body)])
        code, lines, err = await ending
    assert (code, len(lines)) == (1, 1)
    assert "damaged" in err


@pytest.mark.parametrize("exchange", [True, False], ids=["no queue", "no exchange"])
async def test_no_such_run(bus: RabbitBus, topology: Topology, command: Path, broker_url: str, exchange: bool) -> None:
    if exchange:
        await bus.declare(topology.tasks_train)
    async with Run(bus, topology, command, broker_url).submitting("-wait", "60s") as ending:
        code, lines, err = await ending
    assert (code, lines) == (1, [])
    assert err.startswith("trinity-mq-submit: run takes no tasks on this broker")
    assert topology.run in err


async def test_no_outcome_in_time(run: Run) -> None:
    async with run.submitting("-wait", "300ms") as ending:
        await run.submitted()
        code, lines, err = await ending
    assert (code, lines) == (1, [])
    assert "no outcome of task" in err
    assert "may still be done" in err


async def test_missing_parts_do_not_hide_the_outcome(run: Run) -> None:
    made = experiences()
    async with run.submitting("-wait", "1s", "-experiences") as ending:
        asked = await run.submitted()
        await run.tell(asked, experiences=2)
        await run.send_parts(asked, [encode_experiences(made)])
        code, lines, err = await ending
    assert (code, len(lines)) == (1, 1 + len(made))
    assert "1 of 2 experience parts" in err


async def test_without_wait_the_task_is_only_handed_over(run: Run) -> None:
    async with run.submitting("-id", "once", task={"raw_task": {}, "repeat_times": 3, "is_eval": True}) as ending:
        code, lines, err = await ending
    assert (code, lines, err) == (0, [], "submitted once\n")
    asked = await run.submitted()
    assert (asked.message_id, asked.reply_to) == ("once", None)
    assert decode(asked.body, TaskSubmission).task == TaskBody(repeat_times=3, is_eval=True)


async def test_a_lost_connection_ends_the_waiting(run: Run) -> None:
    async with FaultProxy(run.url) as proxy:
        run.url = proxy.url
        async with run.submitting("-wait", "60s") as ending:
            await run.submitted()
            proxy.cut()
            code, lines, err = await ending
    assert (code, lines) == (1, [])
    assert "connection to the broker lost" in err


async def test_a_blocked_broker_does_not_hold_it(run: Run, broker_node: PrivateNode) -> None:
    await broker_node.ctl("set_vm_memory_high_watermark", "0.0001")
    try:
        async with run.submitting("-wait", "500ms") as ending:
            code, _, err = await ending
    finally:
        await broker_node.ctl("set_vm_memory_high_watermark", "0.4")
    assert code == 1
    assert "no confirm from the broker" in err


async def test_a_wrong_password_is_told_without_repeating_it(run: Run) -> None:
    scheme, _, rest = run.url.partition("://")
    run.url = f"{scheme}://tmq:s3cr3t@{rest.rpartition('@')[2]}"
    async with run.submitting("-wait", "60s") as ending:
        code, _, err = await ending
    assert code == 1
    assert "wrong user name or password" in err
    assert "s3cr3t" not in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-task", "{"], "unexpected EOF"),
        (["-task", '{"rawtask": {}}'], 'unknown field "rawtask"'),
        (["-experiences"], "-experiences needs it"),
        (["-run", "No Run"], "must be 1 to 40"),
        (["more"], 'unknown word "more"'),
    ],
)
async def test_usage(run: Run, words: list[str], told: str) -> None:
    async with run.submitting(*words) as ending:
        code, lines, err = await ending
    assert (code, lines) == (2, [])
    assert told in err


def test_many_at_once_in_one_program(tmp_path_factory: pytest.TempPathFactory, broker_url: str) -> None:
    """The tests in live_test.go, which play the explorer themselves."""
    said = go(
        tmp_path_factory, "test", "-count=1", "-v", "-run", "Live", "trinitymq", TRINITY_MQ_TEST_BROKER_URL=broker_url
    )
    assert said.count("--- PASS: TestLive") == 4

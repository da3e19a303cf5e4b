"""One long run, asked and watched from outside: foreign tasks and rubbish, a staged hang, and the page of the run. Each
test needs only that the run is at work; the last one ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest
import pytest_asyncio

from tests.dash_page import DashProcess
from tests.processes import command, python
from tests.waiting import until
from trinity_mq.experience import Experience
from trinity_mq.local_broker.node import find_rabbitmq
from trinity_mq.rewards.text import char_match
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
RUBBISH = b"\xc1 this is no message"
QUEUES = {f"tmq.outside.{queue}" for queue in ("submitted", "tasks.train", "tasks.eval", "closed", "results", "ready")}
AGENTS = ("explorer-0", "runner-0", "runner-1", "operator-0", "trainer-0")
ROLES = {"explorer", "engine", "runner", "operator", "trainer"}
NAMED_WITHIN = 15.0
"""Seconds from the moment that a hang can be seen, the start of the command included."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalRun]:
    words = ("name=outside", "buffer.total_steps=10000", "explorer.eval_interval=5000", "trainer.save_interval=1000")
    folder = tmp_path_factory.mktemp("live") / "outside"
    async with LocalRun(EXAMPLES / "smoke.yaml", folder, words) as started:
        await started.until_progress(3, 120.0)
        yield started


async def publish_rubbish(channel: aio_pika.abc.AbstractChannel) -> None:
    for queue in QUEUES:
        await channel.default_exchange.publish(aio_pika.Message(RUBBISH), queue)
    for exchange, key in (("experiences", "1.nobody"), ("sync", "weights.prepare"), ("control", "restart.all")):
        target = await channel.get_exchange(f"tmq.outside.{exchange}", ensure=False)
        await target.publish(aio_pika.Message(RUBBISH), key, mandatory=False)


async def group_of_a_wanting_task(channel: aio_pika.abc.AbstractChannel) -> list[Experience]:
    """Submit a task twice under one id, and return the experiences that come back: it is done once."""
    replies = await channel.declare_queue(exclusive=True)
    task = {"task": {"raw_task": {"question": "9,2,3=", "answer": "9"}}, "want_experiences": True}
    tasks = await channel.get_exchange("tmq.outside.tasks", ensure=False)
    for _ in range(2):
        message = aio_pika.Message(
            json.dumps(task).encode(),
            content_type="application/json",
            message_id="wanting",
            correlation_id="mine",
            reply_to=replies.name,
        )
        await tasks.publish(message, "submit")
    experiences: list[Experience] = []
    async with asyncio.timeout(60), replies.iterator() as answers:
        for _ in ("outcome", "experiences"):
            async with (await anext(answers)).process() as answer:
                assert answer.correlation_id == "mine"
                if answer.content_type == "application/vnd.trinity-mq.experiences":
                    experiences += Experience.deserialize_many(answer.body)
    return experiences


async def parked_rubbish(channel: aio_pika.abc.AbstractChannel) -> dict[str, str]:
    """Return the reasons of the dead letters by queue, once there is one of each queue."""
    dead = await channel.declare_queue("tmq.outside.dead", passive=True)
    reasons: dict[str, str] = {}
    async with asyncio.timeout(30):
        while not reasons.keys() >= QUEUES:
            letter = await dead.get(fail=False)
            if letter is None:
                await asyncio.sleep(0.2)
                continue
            assert letter.body == RUBBISH
            reasons[str(letter.headers["dead-queue"])] = str(letter.headers["dead-reason"])
            await letter.ack()
    return reasons


async def test_tasks_come_back_and_rubbish_is_parked(run: LocalRun) -> None:
    url = (run.run_dir / "broker.url").read_text().strip()
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await publish_rubbish(channel)
        # one task by the example script, one by the command line, one that wants its experiences
        words = ("--broker", url, "--run", "outside", "--question", "3,7,2=", "--answer", "7")
        task = json.dumps({"raw_task": {"question": "1,2,3=", "answer": "3"}})
        (code, out, err), (cli_code, cli_out, cli_err), experiences = await asyncio.gather(
            python("examples/submit_task.py", *words),
            command("submit", "outside", "--broker", url, "--task", task, "--wait", "60"),
            group_of_a_wanting_task(channel),
        )
        reasons = await parked_rubbish(channel)
    assert code == 0, err
    assert json.loads(out)["outcome"] == "finished"
    assert cli_code == 0, cli_err
    outcome = json.loads(cli_out)
    assert outcome["outcome"] == "finished"
    assert outcome["completed_runs"] == outcome["total_runs"] == len(outcome["answers"]) == 8
    assert [answer["run"] for answer in outcome["answers"]] == list(range(8))
    for answer in outcome["answers"]:  # the model has hardly learnt: it may end an answer at once, its text is empty
        possible = [sum(char_match(answer["text"], "3", finished=ended).values()) for ended in (True, False)]
        assert any(answer["reward"] == pytest.approx(reward) for reward in possible), answer
    assert len(experiences) == 8, "a group of algorithm.repeat_times runs"
    assert all(experience.reward is not None for experience in experiences)
    assert all("does not decode" in reason for reason in reasons.values())
    reached = max(step for step, _ in run.values("trainer/step"))
    await run.until_progress(reached + 5, 60.0)  # nothing else has stopped
    for agent in AGENTS:
        starts = (run.run_dir / "logs" / f"{agent}.jsonl").read_text().count('"agent_starts"')
        assert starts == 1, f"{agent} was restarted"


@pytest.mark.chaos
@pytest.mark.timeout(240)
@pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here")
async def test_why_names_an_engine_that_is_frozen(run: LocalRun) -> None:
    pid = run.kill("engine", signal.SIGSTOP)
    try:
        began = time.monotonic()
        code, told, errors = await command("why", str(run.run_dir), "--json")
        seconds = time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)
    assert told, errors
    finding = json.loads(told)
    logs = "\n".join(log.read_text()[-600:] for log in sorted((run.run_dir / "logs").glob("*.jsonl")))
    assert finding["culprit"] == "explorer-0-engine", f"{finding}\n{logs}"
    assert code == 3, finding
    assert seconds <= NAMED_WITHIN, f"{seconds:.1f} s: {finding}"
    assert "explorer-0-engine" in finding["sentence"]
    assert "has not answered its host" in finding["sentence"]
    assert "explorer.rollout_model.lease" in finding["lever"]


@pytest.mark.timeout(180)
async def test_the_page_shows_the_run_while_it_goes_on_and_afterwards(run: LocalRun) -> None:
    async with DashProcess(run.run_dir) as page:
        await page.until(["live", "step", "samples", "curves"], 90)

        async def all_send_heartbeats() -> bool:
            return {node["role"] for node in (await page.get("api/state"))["flow"]["nodes"]} == ROLES

        await until(all_send_heartbeats, 30)  # the page may have read the metrics earlier
        letters = (await page.get("api/dead"))["letters"]
        assert {letter["reason"].partition(":")[0] for letter in letters} <= {"does not decode"}, "only our rubbish"
        assert run.process is not None
        run.process.terminate()
        code, output = await run.ended(90.0)
        assert code == 143, output
        await page.until(["over"], 30)
        lanes = (await page.get("api/timeline", seconds=120))["lanes"]
        assert {lane["agent"] for lane in lanes} >= {"explorer-0", "runner-0", "trainer-0"}
    async with DashProcess(run.run_dir) as page:
        state = await page.until(["step", "samples", "curves"], 30)
        assert (state["live"], state["agents"]) == (False, [])
        samples: dict[str, Any] = await page.get("api/samples")
        assert len(samples["rows"]) % 16 == 0, "two groups of each step"
        first = dict(zip(samples["columns"], samples["rows"][0], strict=True))
        sample = await page.get("api/sample", uid=first["uid"])
        assert "".join(sample["token_texts"]).startswith(sample["prompt_text"])
        assert len(sample["logprobs"]) == len(sample["advantages"]) == first["response"]
        titles = [picture["title"] for picture in (await page.get("api/curves"))["pictures"]]
        assert {"Reward", "Evaluation: accuracy", "Spread of rewards"} <= set(titles)
        assert [listed["state"] for listed in (await page.get("api/runs"))["runs"]] == ["stopped"]

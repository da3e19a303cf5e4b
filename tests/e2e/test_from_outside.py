"""What others put on the queues of a run: tasks, whose outcomes come back, and rubbish, which is parked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aio_pika
import pytest

from tests.processes import command, python
from trinity_mq.experience import Experience
from trinity_mq.rewards.text import char_match
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
RUBBISH = b"\xc1 this is no message"
QUEUES = ("submitted", "tasks.train", "tasks.eval", "closed", "results", "ready")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def test_tasks_come_back_and_rubbish_is_parked(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with LocalRun(ROOT / "examples" / "smoke.yaml", run_dir, ("buffer.total_steps=5000", "name=outside")) as run:
        await run.until_progress(3, 120.0)
        url = (run_dir / "broker.url").read_text().strip()
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            for queue in QUEUES:
                await channel.default_exchange.publish(aio_pika.Message(RUBBISH), f"tmq.outside.{queue}")
            for exchange, key in (("experiences", "1.nobody"), ("sync", "weights.prepare"), ("control", "restart.all")):
                target = await channel.get_exchange(f"tmq.outside.{exchange}", ensure=False)
                await target.publish(aio_pika.Message(RUBBISH), key, mandatory=False)

            # one task by the example script, one by the command line, one that wants its experiences
            script = python(
                "examples/submit_task.py", "--broker", url, "--run", "outside", "--question", "3,7,2=", "--answer", "7"
            )
            words = json.dumps({"raw_task": {"question": "1,2,3=", "answer": "3"}})
            cli = command("submit", "outside", "--broker", url, "--task", words, "--wait", "60")
            replies = await channel.declare_queue(exclusive=True)
            wanting = {"task": {"raw_task": {"question": "9,2,3=", "answer": "9"}}, "want_experiences": True}
            tasks = await channel.get_exchange("tmq.outside.tasks", ensure=False)
            for _ in range(2):  # published twice: done once
                await tasks.publish(
                    aio_pika.Message(
                        json.dumps(wanting).encode(),
                        content_type="application/json",
                        message_id="wanting",
                        correlation_id="mine",
                        reply_to=replies.name,
                    ),
                    "submit",
                )
            (code, out, err), (cli_code, cli_out, cli_err) = await asyncio.gather(script, cli)
            assert code == 0, err
            assert json.loads(out)["outcome"] == "finished"
            assert cli_code == 0, cli_err
            told = json.loads(cli_out)
            assert told["outcome"] == "finished"
            assert told["completed_runs"] == told["total_runs"] == len(told["answers"]) == 8
            assert [one["run"] for one in told["answers"]] == list(range(8))
            for one in told["answers"]:  # the model has hardly learnt: it may end an answer at once, its text is empty
                possible = [sum(char_match(one["text"], "3", finished=ended).values()) for ended in (True, False)]
                assert any(one["reward"] == pytest.approx(reward) for reward in possible), one
            kinds, experiences = [], []
            async with asyncio.timeout(60), replies.iterator() as answers:
                async for answer in answers:
                    async with answer.process():
                        assert answer.correlation_id == "mine"
                        kinds.append(answer.headers.get("kind") or answer.content_type)
                        if answer.content_type == "application/vnd.trinity-mq.experiences":
                            experiences += Experience.deserialize_many(answer.body)
                    if len(kinds) == 2:
                        break
            assert len(experiences) == 8, "a group of algorithm.repeat_times runs"
            assert all(experience.reward is not None for experience in experiences)
            dead = await channel.declare_queue("tmq.outside.dead", passive=True)
            parked: dict[str, str] = {}
            async with asyncio.timeout(30):
                while not {f"tmq.outside.{queue}" for queue in QUEUES} <= set(parked):
                    letter = await dead.get(fail=False)
                    if letter is None:
                        await asyncio.sleep(0.2)
                        continue
                    assert letter.body == RUBBISH
                    parked[str(letter.headers["dead-queue"])] = str(letter.headers["dead-reason"])
                    await letter.ack()
            assert all("does not decode" in reason for reason in parked.values())
        reached = max(step for step, _ in run.values("trainer/step"))
        await run.until_progress(reached + 5, 60.0)  # nothing else has stopped
        assert run.process is not None
        run.process.terminate()
        code, output = await run.ended(90.0)
    assert code == 143, output
    for agent in ("explorer-0", "runner-0", "runner-1", "operator-0", "trainer-0"):
        starts = (run_dir / "logs" / f"{agent}.jsonl").read_text().count('"agent_starts"')
        assert starts == 1, f"{agent} was restarted"

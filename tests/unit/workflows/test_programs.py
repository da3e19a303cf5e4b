"""Programs that are given a base URL: real processes, one a run or kept, on a real engine server."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import gone
from tests.unit.workflows.scripted_runs import run_scripted
from tests.waiting import until
from trinity_mq.experience import Experience
from trinity_mq.testing.scripted import END, byte_codec
from trinity_mq.workflows import RunFailedError, SandboxFailed, Task
from trinity_mq.workflows.sessions.children import close_persistent_programs, kept, make_program
from trinity_mq.workflows.sessions.program import ProgramWorkflow
from trinity_mq.workflows.sessions.verifiers import VerifiersWorkflow

ASK = """
import json, os, sys, urllib.request
def ask(base, key, text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(base + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
ONCE = (
    ASK
    + """
told = json.load(sys.stdin)
assert told["base_url"] == os.environ["OPENAI_BASE_URL"] and told["key"] == os.environ["OPENAI_API_KEY"]
said = [ask(told["base_url"], told["key"], told["task"]["question"]) for _ in range(2)]
print("by the way")
"""
)
KEPT = (
    ASK
    + """
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    told = json.loads(line)
    if told["task"]["question"] == "die":
        sys.exit("I was told to die")
    said = ask(told["base_url"], told["key"], told["task"]["question"])
    print(json.dumps({"id": told["id"], "reward": float(said == "5"), "metrics": {"pid": os.getpid()}}), flush=True)
"""
)


def script(folder: Path, text: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


async def run(
    command: list[str], *, question: str = "2+3?", says: Any = lambda _: "5", **arguments: Any
) -> list[Experience]:
    task = Task(
        workflow=ProgramWorkflow, raw_task={"question": question}, workflow_args={"command": command, **arguments}
    )
    return (await run_scripted(task, says))[0]


@pytest.mark.parametrize("rewarded", ["call", "lineage"])
async def test_a_program_asks_and_says_what_it_was_worth(tmp_path: Path, rewarded: str) -> None:
    answer = {"reward": 0.5, "metrics": {"tries": 2}, "rewards": [{rewarded: 0, "reward": 0.25}]}
    first, second = await run(script(tmp_path, f"{ONCE}print(json.dumps({answer}))\n"), says=["4", "5"])
    assert (first.reward, second.reward) == (0.25, 0.5)
    codec = byte_codec()
    assert codec.decode([first.tokens[first.prompt_length :].tolist()])[0] == f"4{END}"
    assert second.versions == [(0, 1, 0)]
    assert second.metrics["tries"] == 2
    assert (second.metrics["session_calls"], second.metrics["session_lineages"]) == (2, 2)
    assert (first.eid.step, second.eid.step) == (0, 1)


async def test_a_program_has_the_variables_of_the_runner_but_not_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://user:password@host")
    monkeypatch.setenv("SEARCH_KEY", "key")
    said = (
        'print(json.dumps({"reward": 1, "metrics": {name: 1 for name in os.environ if name[-4:] in ("_URL", "_KEY")}}))'
    )
    _, last = await run(script(tmp_path, ONCE + said), env={"TRINITY_MQ_NAMED_URL": "x"})
    assert {"SEARCH_KEY", "OPENAI_API_KEY", "TRINITY_MQ_NAMED_URL"} <= last.metrics.keys()
    assert "TRINITY_MQ_BROKER_URL" not in last.metrics


async def test_a_program_may_print_line_breaks_of_unicode_in_its_answer(tmp_path: Path) -> None:
    answer = {"reward": 0.5, "metrics": {"one\u2028two\x85three": 1}}
    ending = f'print("half done", end="\\r")\nprint(json.dumps({answer!r}, ensure_ascii=False))\n'
    _, last = await run(script(tmp_path, ONCE + ending))
    assert (last.reward, last.metrics["one\u2028two\x85three"]) == (0.5, 1)


@pytest.mark.parametrize(
    ("ending", "error", "words"),
    [
        ('print("[" * 100_000)', SandboxFailed, "wanted a JSON object in its last line"),
        ('print("no JSON")', SandboxFailed, "printed 'no JSON', wanted a JSON object in its last line"),
        ("", SandboxFailed, "printed 'by the way', wanted"),
        ('sys.exit("the database is away")', SandboxFailed, "ended with 1: the database is away"),
        ("print(json.dumps({}))", RunFailedError, "gave no reward: it has no key reward"),
        (
            'print(json.dumps({"reward": "much"}))',
            RunFailedError,
            "gave the reward 'much': Input should be a valid number",
        ),
        (
            'print(json.dumps({"rewards": [{"call": 7, "reward": 1}]}))',
            RunFailedError,
            "rewarded call 7, which is none of its 2 calls",
        ),
        (
            'print(json.dumps({"rewards": [{"call": 0, "lineage": 0, "reward": 1}]}))',
            RunFailedError,
            "names [0, 0], wanted one call or one lineage",
        ),
        ('print(json.dumps({"kind": "tool", "error": "no search"}))', SandboxFailed, "no search"),
    ],
)
async def test_programs_that_fail_say_why(tmp_path: Path, ending: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        await run(script(tmp_path, ONCE + ending))


async def test_a_program_that_never_asks_and_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="has not asked the model: did it use the base URL"):
        await run(script(tmp_path, 'print("{\\"reward\\": 1}")'))
    with pytest.raises(
        SandboxFailed, match=r"cannot be started: there is no program '.*/nobody' .*; install"
    ) as failed:
        await run([str(tmp_path / "nobody")])
    assert failed.value.kind == "environment"
    with pytest.raises(SandboxFailed, match=r"there is no folder '.*/nowhere' on this machine; make it"):
        await run([sys.executable], cwd=str(tmp_path / "nowhere"))


async def test_a_cancelled_run_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    text = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    running = asyncio.create_task(run(script(tmp_path, text)))
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for pid in map(int, pids.read_text().split()):
        await until(lambda pid=pid: gone(pid))  # type: ignore[misc]


async def test_a_kept_program_answers_many_runs_and_is_started_again(tmp_path: Path) -> None:
    command = script(tmp_path, KEPT)
    try:
        runs = await asyncio.gather(*(run(command, keep=True) for _ in range(5)))
        assert {one[0].reward for one in runs} == {1.0}
        (pid,) = {int(one[0].metrics["pid"]) for one in runs}
        with pytest.raises(SandboxFailed, match="ended with 1: I was told to die"):
            await run(command, keep=True, question="die")
        [again] = await run(command, keep=True)
        assert int(again.metrics["pid"]) != pid
        os.kill(int(again.metrics["pid"]), signal.SIGKILL)
        await until(lambda: not kept(make_program(command, {}, None)).runs)
        assert (await run(command, keep=True))[0].reward == 1.0
    finally:
        await close_persistent_programs()


async def test_the_session_of_a_run_opens_for_nobody_else(tmp_path: Path) -> None:
    text = (
        ASK
        + """
import urllib.error
told = json.load(sys.stdin)
codes = []
base = told["url"]
for path, key in ((base + "/v1", "guess"), (base + "/v1", ""), (base.replace("/s/", "/s/x"), told["key"])):
    try:
        ask(path, key, "x")
    except urllib.error.HTTPError as error:
        codes.append(error.code)
for path in ("/reward", "/end"):
    request = urllib.request.Request(base + path, b'{"reward": 9}', {"Authorization": "Bearer " + told["key"]})
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        codes.append(error.code)
ask(told["base_url"], told["key"], "x")
print(json.dumps({"reward": 0.0, "metrics": {str(n): code for n, code in enumerate(codes)}}))
"""
    )
    [one] = await run(script(tmp_path, text))
    assert [one.metrics[str(number)] for number in range(5)] == [401, 401, 404, 403, 403]


VERIFIERS = os.environ.get("TRINITY_MQ_VERIFIERS_PYTHON", "")


@pytest.mark.skipif(not VERIFIERS, reason="TRINITY_MQ_VERIFIERS_PYTHON names no Python with verifiers and uv")
async def test_an_environment_of_verifiers() -> None:
    folder = Path(__file__).parents[3] / "examples" / "environments"
    arguments = {"python": VERIFIERS, "task": "even:make_task", "env": {"PYTHONPATH": str(folder)}}
    record = {"question": "3,7,2=", "answer": "7"}
    task = Task(workflow=VerifiersWorkflow, raw_task=record, workflow_args=arguments)
    try:
        [one], _ = await run_scripted(task, lambda _: "4")
    finally:
        await close_persistent_programs()
    assert one.reward == 1.0

"""The limits of the process that compares answers; nothing here looks at a clock, a missing limit hangs the test."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from trinity_mq.rewards import RewardError
from trinity_mq.rewards.math.answers import AnswerComparer
from trinity_mq.runtime.processes.children import ChildTimeoutError

SERVES = "import os, time\nfrom trinity_mq.runtime.processes.children import serve\n"


def program(folder: Path, text: str) -> Path:
    """Write a child program that stands in for math-verify."""
    path = folder / "child.py"
    path.write_text(SERVES + text)
    return path


@pytest.fixture
def judge() -> Iterator[AnswerComparer]:
    made = AnswerComparer(cpu_seconds=1.0)
    yield made
    made.close()


def in_threads(judge: AnswerComparer, count: int) -> list[bool]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: judge.same("x", str(number)), range(count)))


MEETING = """
from pathlib import Path
here = Path(__file__).parent

def meet(_):
    (here / f"{os.getpid()}.asked").touch()
    while len(list(here.glob("*.asked"))) < 2:
        time.sleep(0.01)
    return b"[true, null]"

serve(meet)
"""


def test_pairs_of_several_threads_are_compared_at_the_same_time(tmp_path: Path) -> None:
    judge = AnswerComparer(silence=20.0, processes=2, program=program(tmp_path, MEETING))
    assert in_threads(judge, 2) == [True, True], "each process answers only once the other one is asked"
    assert in_threads(judge, 6) == [True] * 6
    assert len(judge.pids) == 2, "no more processes than allowed"
    judge.close()
    assert judge.pids == []


def test_time_that_a_process_waits_for_a_processor_does_not_count(judge: AnswerComparer) -> None:
    assert judge.same("x", "x")
    (child,) = judge.pids
    os.kill(child, signal.SIGSTOP)
    later = threading.Timer(1.5, os.kill, (child, signal.SIGCONT))  # the limit is 1 s of processor time
    later.start()
    assert judge.same("x+1", "1+x")
    later.join()
    assert judge.pids == [child]


@pytest.mark.parametrize(
    "hostile",
    [
        "10^{10^{10^{10}}}",  # one multiplication in C, which no signal handler of Python could interrupt
        "9^{9^{9^{9}}}!",
        "(" * 240 + ")" * 240,
        "{" * 240 + "}" * 240,
    ],
)
def test_what_takes_too_long_is_wrong_and_the_next_is_judged(judge: AnswerComparer, hostile: str) -> None:
    assert not judge.same("5", hostile)
    assert judge.same("\\frac{1}{2}", "0.5")


@pytest.mark.parametrize(
    "hostile", ["\\sqrt{" * 80 + "2" + "}" * 80, "$" * 500, "\\frac{" * 80, "\ud800\x00\n", "", "\\"]
)
def test_what_cannot_be_parsed_is_wrong(judge: AnswerComparer, hostile: str) -> None:
    assert not judge.same("5", hostile)
    assert judge.same("5", "4+1")


def test_text_is_not_evaluated(judge: AnswerComparer, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for code in (f"open('{made}','w')", f"__import__('pathlib').Path('{made}').touch()"):
        assert not judge.same("5", code)
    assert not made.exists()


def test_a_process_that_was_killed_is_started_again(judge: AnswerComparer) -> None:
    assert judge.same("x", "x")
    (first,) = judge.pids
    os.kill(first, signal.SIGKILL)
    assert judge.same("x+1", "1+x")
    assert judge.pids not in ([], [first])


def test_an_answer_that_ends_every_process_is_wrong(tmp_path: Path) -> None:
    judge = AnswerComparer(program=program(tmp_path, "serve(lambda _: os.abort())\n"))
    assert not judge.same("x", "y")
    assert judge.pids == []


def test_silence_is_no_verdict(tmp_path: Path) -> None:
    judge = AnswerComparer(silence=2.0, program=program(tmp_path, "serve(lambda _: time.sleep(1000))\n"))
    with pytest.raises(ChildTimeoutError, match="no answer in 2 s"):
        judge.same("x", "y")
    assert judge.pids == [], "killed: its late answer must not be taken for that to another question"


def test_a_process_that_does_not_start_says_what_to_try(tmp_path: Path) -> None:
    judge = AnswerComparer(program=program(tmp_path, "raise SystemExit(3)"))
    with pytest.raises(RewardError, match=r"ended with code 3 before it was ready.*import math_verify"):
        judge.same("x", "y")


def test_a_fork_has_a_process_of_its_own() -> None:
    code = (
        "import os\n"
        "from trinity_mq.rewards.math.answers import same, _judge\n"
        "assert same('x+1', '1+x')\n"
        "ours = _judge.pids\n"
        "if (child := os.fork()) == 0:\n"
        "    assert same('y+1', '1+y') and len(_judge.pids) == 1 and _judge.pids != ours\n"
        "    _judge.close()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert same('z+1', '1+z') and _judge.pids == ours\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_ends_with_the_process_that_asks() -> None:
    code = "from trinity_mq.rewards.math.answers import same, _judge\n"
    code += "same('x+1', '1+x')\nprint(*_judge.pids, flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", code + "input()"], stdin=-1, stdout=-1, text=True) as asker:
        assert asker.stdout is not None
        child = psutil.Process(int(asker.stdout.readline()))
        asker.kill()
    child.wait(30)

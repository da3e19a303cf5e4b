from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import NoReturn

import pytest

from trinity_mq.config import SupervisorConfig
from trinity_mq.runtime.errors import EXIT_DISK_FULL, EXIT_FATAL, EXIT_RECYCLE
from trinity_mq.runtime.processes.exit_reasons import exit_reason
from trinity_mq.runtime.processes.supervisor import (
    EXIT_NOT_STARTED,
    ProcessEvent,
    ProcessSpec,
    Supervisor,
    exponential_backoff,
)

FOREVER = "import signal; print('up', flush=True); signal.pause()"
GENTLE = """
import os, signal, sys
def leave(signum, frame):
    print("draining", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", os.getpid(), flush=True)
signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


def spec(name: str, program: str, role: str = "runner", **env: str) -> ProcessSpec:
    return ProcessSpec(name=name, role=role, argv=(sys.executable, "-S", "-c", program), env=env)


class Watcher:
    """Keeps the events, and wakes who waits for one."""

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []
        self._changed = asyncio.Condition()
        self._wakers: list[tuple[Callable[[ProcessEvent], bool], asyncio.Future[ProcessEvent]]] = []

    def __call__(self, event: ProcessEvent) -> None:
        self.events.append(event)
        for matches, waker in self._wakers:
            if not waker.done() and matches(event):
                waker.set_result(event)

    async def see(self, name: str, what: str, times: int = 1) -> ProcessEvent:
        def matches(event: ProcessEvent) -> bool:
            return (event.name, event.what) == (name, what) and self.count(name, what) >= times

        found = [event for event in self.events if (event.name, event.what) == (name, what)]
        if len(found) >= times:
            return found[times - 1]
        waker: asyncio.Future[ProcessEvent] = asyncio.get_running_loop().create_future()
        self._wakers.append((matches, waker))
        return await waker

    def count(self, name: str, what: str) -> int:
        return sum((event.name, event.what) == (name, what) for event in self.events)

    def of(self, name: str) -> list[str]:
        return [event.what for event in self.events if event.name == name]


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path, watcher: Watcher) -> Make:
    def build(*specs: ProcessSpec, delay: float = 0.0, **limits: float) -> Supervisor:
        config = SupervisorConfig(**{"grace": 10.0, **limits})  # type: ignore[arg-type]
        return Supervisor(specs, config=config, log_dir=tmp_path, on_event=watcher, backoff=lambda _count: delay)

    return build


async def printed(path: Path, text: str) -> None:
    """Wait for a child's own word: the file is the only channel that it has."""
    async with asyncio.timeout(20):
        while text not in (path.read_text() if path.exists() else ""):  # noqa: ASYNC110 - nothing tells that a file grew
            await asyncio.sleep(0.01)


async def test_all_finished_is_zero_and_each_process_has_its_own_session_and_environment(
    make: Make, watcher: Watcher, tmp_path: Path
) -> None:
    program = (
        "import os\n"
        "e = os.environ; print(os.getsid(0) == os.getpid(), 'PATH' in e, e['COLOUR'], e['TRINITY_MQ_PARENT'])"
    )
    supervisor = make(spec("a", program, COLOUR="red"), spec("b", "import sys; print('oops', file=sys.stderr)"))
    assert await supervisor.run() == 0
    assert watcher.of("a") == watcher.of("b") == ["started", "finished"]
    assert supervisor.phases == {"a": "finished", "b": "finished"}
    assert (tmp_path / "a.out").read_text() == f"True True red {os.getpid()}\n"
    assert (tmp_path / "b.out").read_text() == "oops\n"
    with pytest.raises(ValueError, match="different names"):
        make(spec("a", FOREVER), spec("a", FOREVER))
    assert [exponential_backoff(n) for n in (1, 2, 3, 100)] == [0.25, 0.5, 1.0, 30.0]


async def test_what_is_killed_is_started_again(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    supervisor = make(spec("a", GENTLE))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        first = await watcher.see("a", "started")
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        died = await watcher.see("a", "died")
        second = await watcher.see("a", "started", times=2)
        assert died.code == 128 + signal.SIGKILL
        assert second.pid != first.pid
        await printed(tmp_path / "a.out", f"up {second.pid}")  # the first may have come so far too
        await supervisor.drain()
    assert running.result() == 0
    assert watcher.of("a") == ["started", "died", "restarting", "started", "stopped"]
    assert (tmp_path / "a.out").read_text().endswith("draining\n")


async def test_a_process_that_asks_to_be_recycled_is_not_counted_and_not_kept_waiting(
    make: Make, watcher: Watcher, tmp_path: Path
) -> None:
    lives = tmp_path / "lives"
    program = (
        f"import sys, pathlib; p = pathlib.Path({str(lives)!r}); n = len(p.read_text()) if p.exists() else 0; "
        f"p.write_text('x' * (n + 1)); sys.exit(0 if n == 3 else {EXIT_RECYCLE})"
    )
    code = await make(spec("a", program), delay=1000.0, max_restarts=0).run()
    assert code == 0
    assert lives.read_text() == "xxxx"
    assert watcher.count("a", "died") == watcher.count("a", "restarting") == 0
    assert watcher.count("a", "started") == 4


async def test_too_many_deaths_fail_for_good_and_end_the_others(make: Make, watcher: Watcher) -> None:
    supervisor = make(spec("bad", "import sys; sys.exit(5)"), spec("good", FOREVER), max_restarts=2)
    async with asyncio.timeout(30):
        assert await supervisor.run() == 5
    assert watcher.of("bad") == ["started", *["died", "restarting", "started"] * 2, "died", "failed"]
    assert "3 times within 600 s" in watcher.events[[event.what for event in watcher.events].index("failed")].reason
    assert supervisor.phases == {"bad": "failed", "good": "stopped"}


async def test_deaths_outside_of_the_window_do_not_count(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    program = f"""
import pathlib, sys
path = pathlib.Path({str(tmp_path / "count")!r})
count = int(path.read_text()) + 1 if path.exists() else 1
path.write_text(str(count))
sys.exit(0 if count == 4 else 1)
"""
    supervisor = make(spec("a", program), max_restarts=1, restart_window=0.001)
    async with asyncio.timeout(30):
        assert await supervisor.run() == 0
    assert watcher.count("a", "died") == 3
    assert {event.restarts for event in watcher.events if event.what == "restarting"} == {1}


async def test_a_program_that_is_not_there_fails_with_its_name(make: Make, watcher: Watcher) -> None:
    supervisor = make(ProcessSpec(name="a", role="runner", argv=("/no/such/program",)), spec("b", FOREVER))
    async with asyncio.timeout(30):
        assert await supervisor.run() == 127
    assert "/no/such/program cannot be started" in next(
        event.reason for event in watcher.events if event.what == "failed"
    )


async def test_an_output_file_that_cannot_be_opened_is_named(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    (tmp_path / "a.out").mkdir()
    async with asyncio.timeout(30):
        assert await make(spec("a", FOREVER)).run() == EXIT_NOT_STARTED
    assert f"{tmp_path}/a.out cannot be opened: Is a directory" in watcher.events[-1].reason


class OnFullDisk(PosixPath):
    """A path on a disk that has no room for another file."""

    def open(self, *_: object, **__: object) -> NoReturn:  # type: ignore[override]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))


async def test_an_output_file_for_which_the_disk_has_no_room_is_named(watcher: Watcher, tmp_path: Path) -> None:
    supervisor = Supervisor(
        [spec("a", FOREVER)], config=SupervisorConfig(), log_dir=OnFullDisk(tmp_path), on_event=watcher
    )
    async with asyncio.timeout(30):
        assert await supervisor.run() == EXIT_DISK_FULL
    assert f"{tmp_path}/a.out: the disk is full" in watcher.events[-1].reason


@pytest.mark.parametrize("code", [EXIT_FATAL, EXIT_DISK_FULL])
async def test_what_a_restart_does_not_help_is_not_tried_again(
    make: Make, watcher: Watcher, tmp_path: Path, code: int
) -> None:
    assert await make(spec("a", f"import sys; sys.exit({code})")).run() == code
    assert watcher.of("a") == ["started", "died", "failed"]
    if code == EXIT_DISK_FULL:
        assert watcher.events[-1].reason == f"a disk is full, see `df -h {tmp_path.parent}`: make room"


async def test_restart_on_request_does_not_count(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    supervisor = make(spec("a", GENTLE), max_restarts=0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        await printed(tmp_path / "a.out", "up")
        await supervisor.restart("a")
        await watcher.see("a", "started", times=2)
        await supervisor.drain()
        await supervisor.restart("a")
    assert running.result() == 0
    assert watcher.of("a") == ["started", "stopped", "started", "stopped"]
    with pytest.raises(KeyError, match="known: a"):
        await supervisor.restart("b")


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_restart_or_a_drain_cuts_the_wait_short(make: Make, watcher: Watcher, restarts: bool) -> None:
    supervisor = make(spec("a", FOREVER), delay=3600.0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        os.kill((await watcher.see("a", "started")).pid or 0, signal.SIGKILL)
        assert (await watcher.see("a", "restarting")).delay == 3600.0
        assert supervisor.phases == {"a": "waiting"}
        if restarts:
            await supervisor.restart("a")
            await watcher.see("a", "started", times=2)
        await supervisor.drain()
    assert running.result() == 0, "a death by the signal that we sent is no failure"
    assert supervisor.phases == {"a": "stopped"}


async def test_who_does_not_drain_in_time_is_killed_and_told(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    supervisor = make(spec("deaf", STUBBORN), spec("gentle", GENTLE), grace=2.0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        await printed(tmp_path / "deaf.out", "up")
        await printed(tmp_path / "gentle.out", "up")
        await supervisor.drain("gentle")
        assert supervisor.phases == {"deaf": "running", "gentle": "stopped"}
        await supervisor.drain()
    assert running.result() == 128 + signal.SIGKILL
    assert watcher.of("deaf") == ["started", "killed"]
    assert watcher.of("gentle") == ["started", "stopped"]


async def test_drain_while_starting(make: Make) -> None:
    supervisor = make(spec("a", FOREVER))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        await asyncio.sleep(0)  # the spawn has begun, no process is known yet
        await supervisor.drain()
    assert running.result() == 0
    assert supervisor.phases == {"a": "stopped"}


async def test_cancelled_it_leaves_nobody_behind(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    supervisor = make(spec("a", STUBBORN), spec("b", STUBBORN))
    running = asyncio.ensure_future(supervisor.run())
    async with asyncio.timeout(30):
        await printed(tmp_path / "a.out", "up")
        await printed(tmp_path / "b.out", "up")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    for event in watcher.events:
        if event.what == "started":
            with pytest.raises(ProcessLookupError):
                os.kill(event.pid or 0, 0)


async def test_kill_ends_at_once(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    supervisor = make(spec("a", STUBBORN), grace=3600.0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(supervisor.run())
        await printed(tmp_path / "a.out", "up")
        draining = group.create_task(supervisor.drain())
        await asyncio.sleep(0)
        supervisor.kill()
        await draining
    assert running.result() == 128 + signal.SIGKILL
    assert watcher.of("a") == ["started", "killed"]


async def test_the_last_line_of_a_process_that_died_is_reported(make: Make, watcher: Watcher, tmp_path: Path) -> None:
    (tmp_path / "a.out").write_text("a line of an earlier start\n")
    program = "import sys; print('one'); print('the disk is full', file=sys.stderr); print(); sys.exit(78)"
    await make(spec("a", program)).run()
    assert [event.output for event in watcher.events if event.what == "failed"] == ["the disk is full"]
    await make(spec("a", "import sys; sys.exit(78)")).run()
    assert [event.output for event in watcher.events if event.what == "failed"] == ["the disk is full", ""]


# -- why a process ended, from what it printed


BAR = "\rLoading weights:  42%|████▏     | 122/290 [00:01<00:02, 77.3it/s, Materializing param=model.norm]"
ENDLESS = "\r1021it [00:03, 340.1it/s]"
LIBRARY = sysconfig.get_path("stdlib")
TRACEBACK = f"""Traceback (most recent call last):
  File "{LIBRARY}/asyncio/runners.py", line 118, in run
    return self._loop.run_until_complete(task)
  File "/users/me/my_reward.py", line 17, in judge
    return truths[answer]
           ~~~~~~^^^^^^^^
KeyError: 'answer'
"""
STACKS = f"""Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/users/me/other.py", line 3 in wait
  File "{LIBRARY}/threading.py", line 982 in run

Current thread 0x00007f2 (most recent call first):
  File "{LIBRARY}/ctypes/__init__.py", line 519 in string_at
  File "/users/me/my_operator.py", line 8 in process
  File "/users/me/main.py", line 1 in main

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""

BLOCKED = f"""Current thread 0x00007f2 (most recent call first):
  File "{LIBRARY}/threading.py", line 982 in run

Thread 0x00007f1 (most recent call first):
  File "{LIBRARY}/ssl.py", line 1166 in read
  File "/users/me/my_workflow.py", line 5 in run_async
"""


@pytest.mark.parametrize(
    ("printed", "code", "said"),
    [
        ("one\nthe disk is full\n\n", 1, "the disk is full"),
        ("x1" * 16_000, 1, "x1" * 1000),
        (BAR, 1, ""),
        (f"no room on the device\n{BAR}{BAR}\n", 1, "no room on the device"),
        (f"no room on the device\n{ENDLESS}", 1, "no room on the device"),
        ("no room\nMap \x1b[31m━━━━━━━━\x1b[0m 40% 0:00:01", 1, "no room"),
        (f"{BAR}no room on the device\n{BAR}", 1, "no room on the device"),
        (TRACEBACK, 1, "KeyError: 'answer' (my_reward.py:17)"),
        (f"{BAR}{TRACEBACK}{BAR}\n", 1, "KeyError: 'answer' (my_reward.py:17)"),
        (
            f"{TRACEBACK}trainer: ValueError: 3 (my.py:4) (agent_ends agent=t code=1)\n{BAR}\nwarning: 1 leaked\n",
            1,
            "trainer: ValueError: 3 (my.py:4) (agent_ends agent=t code=1)",
        ),
        (f"runner: event_loop_blocked\n{BLOCKED}", 75, "runner: event_loop_blocked (my_workflow.py:5)"),
    ],
)
def test_what_a_process_said_last(printed: str, code: int, said: str) -> None:
    assert exit_reason(printed, code) == said


def test_a_signal_is_named_before_all_else() -> None:
    killed = exit_reason(BAR, 128 + signal.SIGKILL)
    assert killed.startswith("killed by SIGKILL: ")
    assert "%" not in killed
    assert exit_reason("", 128 + signal.SIGABRT) == "killed by SIGABRT"
    said = "killed by SIGSEGV; its last output: Fatal Python error: Segmentation fault (my_operator.py:8)"
    assert exit_reason(STACKS, 128 + signal.SIGSEGV) == said


def test_a_real_crash_and_a_real_traceback(tmp_path: Path) -> None:
    """As this Python and this tqdm write them."""
    bar = "import faulthandler, os, tqdm\nfaulthandler.enable()\nbar = tqdm.tqdm(total=3)\n"
    bar += "bar.update(1) or bar.refresh()\n"
    for name, last, said in (
        ("crash.py", "os.abort()", "killed by SIGABRT; its last output: Fatal Python error: Aborted (crash.py:5)"),
        ("wrong.py", "{}['answer']", "KeyError: 'answer' (wrong.py:5)"),
    ):
        (tmp_path / name).write_text(f"{bar}{last}\n")
        done = subprocess.run([sys.executable, tmp_path / name], stderr=subprocess.PIPE, text=True, check=False)
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        assert "33%" in done.stderr
        assert exit_reason(done.stderr, code) == said

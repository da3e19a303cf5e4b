from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from trinity_mq.cli.run import PRELOADED
from trinity_mq.runtime.processes.fork_server import ForkRequest
from trinity_mq.runtime.processes.fork_server_process import ForkServer
from trinity_mq.runtime.processes.forking import ForkedProcess, NotForkedError, adopted_orphans, fork, start_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

PROGRAM = """
import ctypes, heavy, json, os, sys, threading
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv[1:], "orig": sys.orig_argv[1:], "cwd": os.getcwd(), "sid": os.getsid(0), "pid": os.getpid(),
        "ppid": os.getppid(), "env": dict(os.environ), "imported_by": heavy.PID, "random": heavy.random.random(),
        "tasks": len(os.listdir("/proc/self/task")), "name": __name__, "stdin": sys.stdin.read(),
        "in_c": (getenv(b"WITH") or b"").decode(),
    }))
    print("an error", file=sys.stderr)
    sys.exit(7)
"""
HEAVY = "import os, random\nPID = os.getpid()\n"
WAITS = """
import os, signal, sys
print("up", os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = {"heavy": HEAVY, "program": PROGRAM, "waits": WAITS, "threads": THREADS, "leaves": LEAVES, "fds": FDS}
    modules |= {"pretended_gpu": PRETENDED_GPU, "looks": LOOKS, "flash_attn": ""}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    with ForkServer.start(["heavy"]) as started:
        yield started


def environment(**more: str) -> Mapping[str, str]:
    return {**os.environ, **more}


async def started(server: ForkServer, output: Path, *words: str, **env: str) -> ForkedProcess:
    with output.open("ab") as file:
        process = await start_forked(server)((sys.executable, "-m", *words), environment(**env), file)
    assert isinstance(process, ForkedProcess), output.read_text()
    return process


async def said(output: Path, text: str) -> str:
    async with asyncio.timeout(20):
        while text not in output.read_text():  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(0.01)
    return output.read_text()


async def test_it_is_what_its_command_line_makes_it(server: ForkServer, folder: Path) -> None:
    output = folder / "out"
    process = await started(server, output, "program", "--id", "a b", WITH="value")
    assert await process.wait() == process.returncode == 7
    first, error = output.read_text().splitlines()
    seen = json.loads(first)
    assert seen["argv"] == ["--id", "a b"]
    assert seen["orig"] == ["-m", "program", "--id", "a b"]
    assert (seen["cwd"], seen["name"], seen["stdin"], error) == (os.getcwd(), "__main__", "", "an error")
    assert seen["pid"] == seen["sid"] == process.pid
    assert seen["ppid"] == os.getpid(), "as with a child that was started"
    assert {name: value for name, value in seen["env"].items() if name != "PWD"} == {
        name: value for name, value in environment(WITH="value").items() if name != "PWD"
    }
    assert seen["in_c"] == "value", "libraries in C such as CUDA see it too"
    assert seen["tasks"] == 1
    assert seen["imported_by"] == server.pid, "nothing was imported anew"
    await (await started(server, folder / "other", "program")).wait()
    assert json.loads((folder / "other").read_text().splitlines()[0])["random"] != seen["random"], "its own numbers"
    with (folder / "plain").open("ab") as file:
        plain = await start_forked(server)((sys.executable, "-c", "print('plain')"), environment(), file)
        with pytest.raises(FileNotFoundError):
            await start_forked(server)(("/no/such/program",), environment(), file)
    assert await plain.wait() == 0
    assert (folder / "plain").read_text() == "plain\n", "what is no module is started as it is"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_ps_shows_its_command_line_and_signals_end_it(server: ForkServer, folder: Path, number: int) -> None:
    process = await started(server, folder / "out", "waits", "--id", "mine")
    await said(folder / "out", "up")
    assert " ".join(psutil.Process(process.pid).cmdline()).rstrip() == f"{sys.executable} -m waits --id mine"
    process.send_signal(number)
    assert await process.wait() in ({1, -signal.SIGINT} if number == signal.SIGINT else {-signal.SIGTERM})
    assert ("KeyboardInterrupt" in (folder / "out").read_text()) == (number == signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # it has ended: of no effect


async def test_a_killed_server_ends_nothing_that_it_has_started(server: ForkServer, folder: Path) -> None:
    process = await started(server, folder / "out", "waits")
    await said(folder / "out", "up")
    server.close()
    assert process.returncode is None
    assert psutil.Process(process.pid).ppid() == os.getpid()
    with (folder / "second").open("ab") as file:
        second = await start_forked(server)((sys.executable, "-m", "waits"), environment(), file)
    assert not isinstance(second, ForkedProcess), "started with its command line"
    await said(folder / "second", "up")
    for one in (process, second):
        one.send_signal(signal.SIGKILL)
        assert await one.wait() == -signal.SIGKILL


THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


async def test_a_server_with_threads_refuses_and_a_module_that_is_missing_is_left_to_who_needs_it(folder: Path) -> None:
    with ForkServer.start(["threads"]) as server, (folder / "out").open("wb") as null:
        command = (sys.executable, "-m", "waits")
        with pytest.raises(NotForkedError, match="2 threads, wanted 1"):
            await fork(server.path, command, env=environment(), output=null.fileno(), adopted=True)
    with ForkServer.start(["no_such_module", "heavy"]) as server:
        process = await started(server, folder / "out", "no_such_module")
        assert await process.wait() == 1
        assert "no_such_module" in (folder / "out").read_text()


SLOW = """
import os, pathlib, time
while not pathlib.Path(os.environ["GATE"]).exists():
    time.sleep(0.01)
"""


async def test_who_needs_no_more_is_forked_while_the_rest_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "slow.py").write_text(SLOW)
    (folder / "next.py").write_text(SLOW.replace("GATE", "SECOND_GATE"))
    for name in ("GATE", "SECOND_GATE"):
        monkeypatch.setenv(name, str(folder / name))
    with ForkServer.start(["heavy=early", "slow", "next"]) as server:
        late = asyncio.create_task(started(server, folder / "late", "program", "late"))
        early = asyncio.create_task(started(server, folder / "early", "program", "early"))
        await asyncio.sleep(0.5)
        (folder / "GATE").touch()
        assert await (await early).wait() == 7
        assert not late.done()
        (folder / "SECOND_GATE").touch()
        assert await (await late).wait() == 7
    seen = [json.loads((folder / name).read_text().splitlines()[0]) for name in ("early", "late")]
    assert seen[0]["imported_by"] == seen[1]["imported_by"] == server.pid
    assert [one["argv"] for one in seen] == [["early"], ["late"]]


ENDS = """
import atexit, sys, threading, time
class Held:
    def __del__(self):
        print("visited by the interpreter", flush=True)
held = Held()
atexit.register(print, "at exit")
def work():
    time.sleep(0.2)
    print("thread done")
threading.Thread(target=work).start()
sys.exit({"none": None, "number": 5, "text": "a reason"}[sys.argv[1]])
"""


@pytest.mark.parametrize(("how", "code"), [("none", 0), ("number", 5), ("text", 1)])
async def test_it_ends_as_a_program_does(server: ForkServer, folder: Path, how: str, code: int) -> None:
    (folder / "ends.py").write_text(ENDS)
    process = await started(server, folder / "out", "ends", how)
    assert await process.wait() == code
    lines = (folder / "out").read_text().splitlines()
    assert {"thread done", "at exit"} <= set(lines)
    assert lines.index("thread done") < lines.index("at exit")
    assert ("a reason" in lines) == (how == "text")
    if how != "text":
        assert "visited by the interpreter" not in lines, "that would copy every page that is shared with the server"


async def test_rubbish_costs_one_connection(server: ForkServer, folder: Path) -> None:
    for packet in (b"", b"rubbish", b"{}", b'{"module": 1}', b"[" * 1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(server.path))
            if packet:
                connection.send(packet)
                assert b"error" in connection.recv(1 << 16)
    assert await (await started(server, folder / "out", "program")).wait() == 7


@pytest.mark.parametrize("number", range(3, 9))
async def test_descriptors_get_their_numbers_and_what_is_not_adopted_leaves_no_zombie(
    server: ForkServer, folder: Path, number: int
) -> None:
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, (folder / "out").open("wb") as out:
        fds = [1, 2, number]
        request = ForkRequest(
            module="fds", words=[str(number)], env=dict(os.environ), cwd=str(folder), fds=fds, adopted=False
        )
        connection.connect(str(server.path))
        socket.send_fds(connection, [request.encode()], [out.fileno(), out.fileno(), writer])
        pid = json.loads(connection.recv(1 << 16))["pid"]
        connection.send(b"go")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert await asyncio.to_thread(pipe.read) == b"through the pipe", (folder / "out").read_text()
    async with asyncio.timeout(20):
        while psutil.pid_exists(pid):  # noqa: ASYNC110  # not our child
            await asyncio.sleep(0.01)


async def test_one_that_nobody_waits_for_any_more_does_nothing(server: ForkServer, folder: Path) -> None:
    marker = folder / "marker"
    (folder / "marks.py").write_text(f"open({str(marker)!r}, 'w').close()")
    request = ForkRequest(module="marks", words=[], env=dict(os.environ), cwd=str(folder), fds=[], adopted=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(server.path))
        connection.send(request.encode())
        pid = json.loads(connection.recv(1 << 16))["pid"]
    assert await ForkedProcess(pid).wait() == 1
    assert not marker.exists()
    assert await (await started(server, folder / "out", "marks")).wait() == 0
    assert marker.exists()


LEAVES = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; print('child', flush=True); signal.pause()"])
signal.pause()
"""


async def test_orphans_of_a_killed_process_are_buried(server: ForkServer, folder: Path) -> None:
    process = await started(server, folder / "out", "leaves")
    await said(folder / "out", "child")
    [left] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    [orphan] = adopted_orphans(process.pid)
    assert orphan.pid == left.pid
    orphan.send_signal(signal.SIGTERM)
    assert await orphan.wait() == -signal.SIGTERM
    assert not psutil.pid_exists(left.pid)


FDS = """
import os, sys
os.write(int(sys.argv[1]), b"through the pipe")
"""


def test_the_server_ends_with_who_started_it_and_leaves_no_folder(folder: Path) -> None:
    program = """
        import os, sys
        from trinity_mq.runtime.processes.fork_server_process import ForkServer
        server = ForkServer.start([])
        print(server.pid, server.path, flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), 9)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid, path = parent.stdout.readline().split()
        server = psutil.Process(int(pid))
        assert Path(path).is_socket()
        parent.stdin.close()
        parent.wait()
        server.wait(20)
        assert not Path(path).parent.exists()


PRETENDED_GPU = """
import sys, traceback
import torch
POISONED, LOOKED = [], []
def runtime():
    POISONED.append("".join(traceback.format_stack(limit=8)))
    return 1
def nvml():
    LOOKED.append("nvml")
    return 1
torch._C._cuda_getDeviceCount = runtime  # its presence means: built with CUDA
torch._C._cuda_getCurrentRawStream = runtime
torch.cuda._lazy_init = runtime
torch.cuda._device_count_nvml = nvml
"""
LOOKS = """
import json, sys
import pretended_gpu
if __name__ == "__main__":
    missing = [name for name in sys.argv[1:] if name not in sys.modules]
    print(json.dumps({"poisoned": pretended_gpu.POISONED, "looked": pretended_gpu.LOOKED, "missing": missing}))
"""


async def test_children_of_the_preloaded_server_can_use_cuda_although_flash_attn_is_installed(folder: Path) -> None:
    """Once a process has asked the CUDA runtime, its forked children raise "Cannot re-initialize CUDA in forked
    subprocess".
    """
    distribution = folder / "flash_attn-2.8.3.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (distribution / "top_level.txt").write_text("flash_attn\n")
    with ForkServer.start(["pretended_gpu", *PRELOADED]) as server:
        process = await started(server, folder / "out", "looks", *(name.partition("=")[0] for name in PRELOADED))
        assert await process.wait() == 0
    seen = json.loads((folder / "out").read_text().splitlines()[-1])
    assert seen["missing"] == []
    assert seen["poisoned"] == []
    assert seen["looked"], "transformers has looked for GPUs, since flash-attn is installed"

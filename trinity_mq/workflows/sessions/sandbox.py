"""A sandbox of Linux namespaces, made by bubblewrap (``bwrap``), for programs that must not be trusted.

Over the network a program reaches only the gateway of its session. It sees its own processes and environment variables.
Of the files of the host it sees programs, libraries and the folders that the configuration names.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from trinity_mq.workflows.errors import SandboxFailed
from trinity_mq.workflows.sessions.children import INSTALL

log = structlog.get_logger(__name__)

WORK, HOME = "/agent/files", "/agent/home"
"""Working directory and home of the agent in the sandbox."""
SOCKET, ENTRY_INSIDE = "/agent/gateway", "/agent/entry.py"
ENTRY = Path(__file__).with_name("sandbox_entry.py")
PATH = "/usr/local/bin:/usr/bin:/bin"
SYSTEM = ("/usr", "/etc/alternatives", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/ld.so.cache")
"""Paths of the host that every program needs. They hold no secrets."""
LINKED = ("/bin", "/sbin", "/lib", "/lib64")
"""Links into ``/usr`` on most systems."""
KERNEL = ("/proc/sys", "/proc/sysrq-trigger", "/proc/fs", "/proc/bus", "/proc/irq")
"""Kernel files that an agent could write if its runner is root, although the sandbox has no capabilities: a process
that writes ``core_pattern`` leaves the sandbox. Container runtimes make the same paths read-only.
"""
USER_ID = 1000
ACCOUNTS = f"agent:x:{USER_ID}:{USER_ID}::{HOME}:/bin/bash\n"
HOSTS = "127.0.0.1 localhost\n"
TAIL_BYTES = 4000
"""Bytes from the end of the agent's output that are kept."""
NOBODY = 65534
"""Id of the user and group of an agent whose runner is root, because the kernel does not limit the number of root's
processes.
"""
CHECK_SECONDS = 30.0
"""Time limit in seconds for an empty command in a sandbox."""
END_SECONDS = 30.0
"""Maximum seconds from the kill of a sandbox to the end of its last process."""


def interpreter() -> str:
    """Return the runner's Python without its virtual environment. A sandbox has it at the same path."""
    return f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and last output of an agent."""

    code: int | None
    """Exit code. None: the agent was killed at its time limit."""
    output: str
    """The last :data:`TAIL_BYTES` of the agent's output and errors."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox, with its folders on the host.

    Args:
        folder: Empty folder of this sandbox.
        visible: Further files and folders of the host that the agent may read, at the same paths.
        memory_bytes: Size of each of the file systems in memory, ``/tmp`` and ``/dev/shm``.
        file_bytes: Maximum size of each file that the agent writes.
        cpu_seconds: Maximum processor time of each process.
        processes: Maximum number of processes and threads.
    """

    folder: Path
    visible: Sequence[str] = ()
    memory_bytes: int = 1 << 28
    file_bytes: int = 1 << 28
    cpu_seconds: int = 3600
    processes: int = 1024

    @property
    def work(self) -> Path:
        """Working directory of the agent, as a path of the host."""
        return self.folder / "work"

    @property
    def home(self) -> Path:
        """Home of the agent, as a path of the host."""
        return self.folder / "home"

    @property
    def socket(self) -> Path:
        """Socket of the gateway, as a path of the host."""
        return self.folder / "gateway"

    def prepare(self, files: Mapping[str, str]) -> None:
        """Make the folders, and write the agent's first files.

        Args:
            files: Text by path. A path that begins with ``~/`` is in the agent's home, others are in ``work``.

        Raises:
            ValueError: A path leads out of these folders.
        """
        self.work.mkdir()
        self.home.mkdir()
        (self.folder / "passwd").write_text(ACCOUNTS)
        (self.folder / "hosts").write_text(HOSTS)
        for name, text in files.items():
            root = self.home if name.startswith("~/") else self.work
            path = root / name.removeprefix("~/")
            if not path.resolve().is_relative_to(root.resolve()):
                raise ValueError(f"the file {name!r} leads out of the sandbox; give a relative path, or one behind ~/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def arguments(self) -> list[str]:
        """Return the arguments of ``bwrap`` that run the first process in this sandbox, ``sandbox_entry.py``."""
        arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        arguments += ["--unshare-user", "--disable-userns", "--uid", str(USER_ID), "--gid", str(USER_ID)]
        for path in SYSTEM:
            arguments += ["--ro-bind-try", path, path]
        for path in LINKED:
            target = os.readlink(path) if os.path.islink(path) else ""
            arguments += ["--symlink", target, path] if target else ["--ro-bind-try", path, path]
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        for path in ("/tmp", "/dev/shm"):
            arguments += ["--size", str(self.memory_bytes), "--tmpfs", path]
        for path in KERNEL:
            arguments += ["--ro-bind-try", path, path]
        arguments += ["--ro-bind", str(self.folder / "passwd"), "/etc/passwd"]
        arguments += ["--ro-bind", str(self.folder / "hosts"), "/etc/hosts"]
        arguments += ["--ro-bind", sys.base_prefix, sys.base_prefix, "--ro-bind", str(ENTRY), ENTRY_INSIDE]
        for path in self.visible:
            arguments += ["--ro-bind", path, path]
        arguments += ["--bind", str(self.work), WORK, "--bind", str(self.home), HOME]
        arguments += ["--ro-bind", str(self.socket), SOCKET, "--chdir", WORK]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [*arguments, "--", interpreter(), "-I", "-S", ENTRY_INSIDE]

    async def run(self, command: Sequence[str], env: Mapping[str, str], port: int, seconds: float) -> Ended:
        """Run an agent until it ends or its time is over. All its processes are gone afterwards.

        If the runner is root, the agent runs as the user nobody, or as root with a warning if nobody cannot make a
        sandbox.

        Args:
            command: The agent and its arguments.
            env: Environment variables of the agent. ``HOME`` is always the sandbox's; ``PATH`` and ``LANG`` have
                defaults.
            port: Port of the gateway. The agent reaches it at ``127.0.0.1`` as on the host.
            seconds: Time limit in seconds.

        Raises:
            SandboxFailed: ``bwrap`` is not installed, a visible path does not exist, or a process did not end.
        """
        if missing := missing_paths(self.visible):
            raise SandboxFailed(missing[0], kind="sandbox")
        if shutil.which("bwrap", path=os.environ.get("PATH")) is None:
            raise SandboxFailed("bwrap is not installed; install the package bubblewrap", kind="sandbox")
        user = NOBODY if os.getuid() == 0 else None
        if user is not None and (reason := await self._refused(user)):
            _warn_of_root(reason)
            user = None
            await asyncio.to_thread(self._give_to, 0)
        return await self._run_as(user, command, env, port, seconds)

    async def _refused(self, user: int) -> str:
        """Give the folders to ``user``. Return the reason if this user cannot make a sandbox with them, else an empty
        text.
        """
        try:
            await asyncio.to_thread(self._give_to, user)
            checked = await self._run_as(user, ["true"], {}, 0, CHECK_SECONDS)
        except OSError as error:  # the root of a container may lack the user, or the right to become it
            return str(error)
        return "" if checked.code == 0 else checked.output.strip() or f"it ended with {checked.code}"

    def _give_to(self, user: int) -> None:
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)

    async def _run_as(
        self, user: int | None, command: Sequence[str], env: Mapping[str, str], port: int, seconds: float
    ) -> Ended:
        entry = {
            "socket": SOCKET,
            "port": port,
            "limits": {
                "RLIMIT_FSIZE": self.file_bytes,
                "RLIMIT_CPU": self.cpu_seconds,
                "RLIMIT_NPROC": self.processes,
                "RLIMIT_CORE": 0,
            },
            "command": list(command),
            "env": {"PATH": PATH, "LANG": "C.UTF-8", **env, "HOME": HOME},
        }
        account: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": ()}
        info, info_inside = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *("bwrap", "--info-fd", str(info_inside), *self.arguments()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # bwrap is a process of the sandbox: the agent can read its environment
                env={"PATH": os.environ.get("PATH", PATH)},
                start_new_session=True,
                pass_fds=(info_inside,),
                **account,
            )
        except BaseException:
            os.close(info)
            raise
        finally:
            os.close(info_inside)
        first = asyncio.create_task(asyncio.to_thread(_open_first, info), name="first process of a sandbox")
        assert process.stdin is not None
        assert process.stdout is not None
        # all users of the host can read the arguments of a process; the variables hold the key of the session
        process.stdin.write(json.dumps(entry).encode())
        process.stdin.close()
        tail = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while chunk := await process.stdout.read(1 << 16):
                    tail = (tail + chunk)[-TAIL_BYTES:]
                code: int | None = await process.wait()
        except TimeoutError:
            code = None
        finally:
            await asyncio.shield(_end(process, first))
        return Ended(code, tail.decode(errors="replace"))

    async def remove(self) -> None:
        """Remove the folders. The agent may have made them unreadable or very deep, so two programs do it."""
        for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            process = await asyncio.create_subprocess_exec(
                *command, "--", str(self.folder), stderr=asyncio.subprocess.DEVNULL
            )
            await process.wait()
        if self.folder.exists():
            log.warning("sandbox_not_removed", folder=str(self.folder))


@functools.cache
def _warn_of_root(reason: str) -> None:
    """Warn once for each reason."""
    log.warning("sandbox_of_root", reason=reason, consequence="the number of processes of an agent is not limited")


def _open_first(info: int) -> int | None:
    """Return a descriptor (pidfd) of the first process in a sandbox, which ``bwrap`` writes to ``info``. None: the
    process has ended, or never began.
    """
    with os.fdopen(info) as file, contextlib.suppress(ValueError, ProcessLookupError):
        return os.pidfd_open(json.load(file)["child-pid"])
    return None


async def _end(process: asyncio.subprocess.Process, first: asyncio.Task[int | None]) -> None:
    """Kill a sandbox, and wait for its last process.

    ``bwrap`` may end before the processes in the sandbox. The kernel reports the end of the first process in the
    sandbox after the end of all other processes in it.

    Raises:
        SandboxFailed: A process did not end.
    """
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    descriptor = await first
    if descriptor is None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(END_SECONDS):
            await ended.wait()
    except TimeoutError as error:
        raise SandboxFailed(f"a process of the agent still ran {END_SECONDS:g} s after its kill") from error
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def read_text(folder: Path, name: str, max_bytes: int = 1 << 20) -> str | None:
    """Return the text of a file that an agent wrote. None: ``folder`` has no such regular file.

    An agent may leave links to files of the host, pipes and other special files. They are not read.
    """
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(max_bytes).decode(errors="replace")
    except (OSError, RuntimeError):  # unreadable, or a link to itself
        return None


def missing_paths(visible: Sequence[str]) -> list[str]:
    """Return a sentence for each of these paths that this machine does not have."""
    return [f"visible: there is no {path!r} on this machine; {INSTALL}" for path in visible if not Path(path).exists()]

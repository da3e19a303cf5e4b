"""An agent of another project as a workflow: it runs unchanged in a sandbox, and its work is judged afterwards.

The sandbox consists of namespaces of Linux, made by bubblewrap (``bwrap``). Over the network the agent reaches only the
gateway of its session. It sees its own processes and environment variables. Of the files of the host it sees programs,
libraries and the folders that the configuration names.

The judge runs outside of the sandbox after all processes of the agent have ended, so that no command of the model can
change the reward.
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
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import structlog
from pydantic import BaseModel, Field

from trinity_mq.experience import Experience
from trinity_mq.gateway.local import LocalSession
from trinity_mq.workflows.errors import SandboxFailed
from trinity_mq.workflows.sessions.children import INSTALL, Program, make_program, missing_program
from trinity_mq.workflows.sessions.program import ProgramWorkflow, RecordedArguments, environment_of

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
"""Files of the kernel that a runner of root's could write although the sandbox has no capabilities: a process that
writes ``core_pattern`` leaves the sandbox. Container runtimes make the same paths read-only.
"""
USER_ID = 1000
ACCOUNTS = f"agent:x:{USER_ID}:{USER_ID}::{HOME}:/bin/bash\n"
HOSTS = "127.0.0.1 localhost\n"
TAIL_BYTES = 4000
"""Bytes from the end of the agent's output that are kept."""
NOBODY = 65534
"""User and group of root's agents, because the kernel does not limit the number of root's processes."""
CHECK_SECONDS = 30.0
"""Time limit for an empty command in a sandbox."""
END_SECONDS = 30.0
"""Seconds from the kill of a sandbox to the end of its last process."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent ended."""

    code: int | None
    """Exit code. None: it was killed at its time limit."""
    output: str
    """End of its output and errors."""


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
        python = Path(sys.base_prefix)
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
        arguments += ["--ro-bind", str(python), str(python), "--ro-bind", str(ENTRY), ENTRY_INSIDE]
        for path in self.visible:
            arguments += ["--ro-bind", path, path]
        arguments += ["--bind", str(self.work), WORK, "--bind", str(self.home), HOME]
        arguments += ["--ro-bind", str(self.socket), SOCKET, "--chdir", WORK]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
        interpreter = python / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        return [*arguments, "--", str(interpreter), "-I", "-S", ENTRY_INSIDE]

    async def run(self, command: Sequence[str], env: Mapping[str, str], port: int, seconds: float) -> Ended:
        """Run an agent until it ends or its time is over. All its processes are gone afterwards.

        Root's agents run as nobody. Where nobody can make no sandbox, they run as root, with a warning.

        Args:
            command: The agent and its arguments.
            env: All environment variables of the agent except ``HOME`` and, unless it is set here, ``PATH``.
            port: Port of the gateway. The agent reaches it at ``127.0.0.1`` as on the host.
            seconds: Time limit.

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
        """Give the folders to a user. Return why the user can make no sandbox of them. Empty: it can."""
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
    """Return a descriptor (pidfd) of the first process in a sandbox, which ``bwrap`` writes to ``info``. None: it has
    ended, or never began.
    """
    with os.fdopen(info) as file, contextlib.suppress(ValueError, ProcessLookupError):
        return os.pidfd_open(json.load(file)["child-pid"])
    return None


async def _end(process: asyncio.subprocess.Process, first: asyncio.Task[int | None]) -> None:
    """Kill a sandbox, and wait for its last process.

    ``bwrap`` may end before the processes in the sandbox. The kernel reports the end of the first of them after the
    end of all others.

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


class SandboxedAgentArguments(RecordedArguments):
    """Arguments of :class:`SandboxedAgentWorkflow`."""

    command: list[str] = Field(min_length=1)
    """The agent and its first arguments. It is set only by the configuration, never by a task."""
    visible: list[str] = Field(default_factory=list)
    """Files and folders of the host that the agent may read, at the same paths, such as the folder where it is
    installed. ``/usr`` is always visible.
    """
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent. It gets none of the runner's variables."""
    seconds: float = Field(default=600.0, gt=0)
    """Time limit of the agent. What it has done until then is judged."""
    file_bytes: int = Field(default=1 << 28, gt=0)
    """Maximum size of each file that the agent writes."""

    def missing(self) -> list[str]:
        """Paths in the sandbox's own folders are not compared."""
        reasons = missing_paths(self.visible)
        name = self.command[0]
        if "/" not in name or (name.startswith("/") and not name.startswith(f"{Path(WORK).parent}/")):
            reasons.append(missing_program(name, path=self.env.get("PATH", PATH)))
        return [reason for reason in reasons if reason]


def missing_paths(visible: Sequence[str]) -> list[str]:
    """Return a sentence for each of these paths that this machine does not have."""
    return [f"visible: there is no {path!r} on this machine; {INSTALL}" for path in visible if not Path(path).exists()]


class Judged(BaseModel):
    """Judgement of the work of an agent."""

    reward: float = Field(allow_inf_nan=False)
    metrics: dict[str, float] = Field(default_factory=dict)


class SandboxedAgentWorkflow(ProgramWorkflow):
    """Runs an agent in a sandbox with ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and
    ``ANTHROPIC_API_KEY`` set, and judges the files that it leaves. Subclasses give the judge.
    """

    arguments_kind: ClassVar[type[RecordedArguments]] = SandboxedAgentArguments

    def prompt(self) -> str:
        """Return the text for the agent, its last argument."""
        return str(self.task.task_desc or "")

    def files(self, session: LocalSession) -> Mapping[str, str]:
        """Return the first files of the agent: text by path, ``~/`` for its home. Default: none."""
        return {}

    def judge(self, work: Path) -> Judged:
        """Judge the files in the working directory of the agent. Read them with
        :func:`read_text`; run nothing of them outside of a sandbox.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method judge(work)")

    def program(self) -> Program:
        """Return the agent's command without the sandbox."""
        return make_program([*self.arguments.command, self.prompt()], self.arguments.env, None)

    async def run_async(self) -> list[Experience]:
        """Run the agent once; return the recorded answers with rewards.

        Raises:
            EngineLost: The engine did not answer the agent.
            SandboxFailed: The agent could not be started, or ended before it asked the model.
            RunFailedError: No answer could be rewarded.
        """
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="trinity-mq-agent-"))
        sandbox = Sandbox(folder, self.arguments.visible, file_bytes=self.arguments.file_bytes)
        try:
            return await self._recorded(lambda session: self._run(sandbox, session), sandbox.socket)
        finally:
            await asyncio.shield(sandbox.remove())

    async def _run(self, sandbox: Sandbox, session: LocalSession) -> dict[str, Any]:
        await asyncio.to_thread(sandbox.prepare, self.files(session))
        program, env = self.program(), {**environment_of(session), **self.arguments.env}
        ended = await sandbox.run(program.command, env, session.port, self.arguments.seconds)
        if not session.session.calls and not session.engine.is_lost:
            if ended.code is None:
                raise SandboxFailed(
                    f"{program.name} got no answer within {self.arguments.seconds:g} s: raise workflow_args.seconds, "
                    f"or use a faster engine: {ended.output}"
                )
            raise SandboxFailed(f"{program.name} ended with {ended.code} before it asked the model: {ended.output}")
        judged = await asyncio.to_thread(self.judge, sandbox.work)
        ending = {"agent_timed_out": float(ended.code is None), "agent_failed": float(bool(ended.code))}
        return {"reward": judged.reward, "metrics": ending | judged.metrics}

"""A private RabbitMQ node: a child process on loopback with its own data, ports, cookie and password."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from trinity_mq.local_broker.base import LocalNode, NodeOptions
from trinity_mq.local_broker.node_files import (
    BEFORE_BOOT,
    PLUGIN_LISTENERS,
    PLUGINS_VARIABLE,
    POLL_SECONDS,
    NodeError,
    NodeState,
    boot_script,
    failure_excerpt,
    server_config,
    server_environment,
    server_user,
)
from trinity_mq.local_broker.ports import LOOPBACK, accepts_connections, is_free
from trinity_mq.runtime.process import write_atomic

__all__ = ["ClusterMembership", "NodeError", "PrivateNode", "epmd_command", "find_rabbitmq"]

HOMES = (
    "/usr/lib/rabbitmq/lib/rabbitmq_server-*",
    "/usr/local/lib/rabbitmq/lib/rabbitmq_server-*",
    "/opt/homebrew/opt/rabbitmq",
    "/usr/local/opt/rabbitmq",
    "/opt/rabbitmq",
)
EPMD_FOLDERS = ("/usr/bin", "/usr/lib/erlang/bin", "/usr/lib/erlang/erts-*/bin", "/usr/lib64/erlang/bin")
NOT_INSTALLED = (
    "RabbitMQ is not installed: `apt-get install rabbitmq-server` (Debian, Ubuntu) or `brew install rabbitmq` (macOS), "
    "or start Docker, or set broker.url to a broker that runs elsewhere"
)
STOP_TIMEOUT = 20.0
EPMD_TIMEOUT = 10.0


UNLESS_ORPHANED = ("sh", "-c", '[ "$PPID" = "$1" ] && shift && exec "$@"', "sh")
"""Shell prefix before a parent's process id and a command. It runs the command unless that parent has already ended.
The kernel does not send the parent-death signal if the parent ends before its child requests it."""


def find_rabbitmq() -> Path | None:
    """Return the ``rabbitmq-server`` script of an installed RabbitMQ; None if it is not installed.

    ``RABBITMQ_HOME``, a folder with ``sbin/rabbitmq-server`` and ``sbin/rabbitmqctl``, is searched before the usual
    places. Of several releases in a place, the newest is returned. Debian's wrapper on the path is never returned,
    because it changes user and folder.
    """
    places = [os.environ["RABBITMQ_HOME"]] if "RABBITMQ_HOME" in os.environ else []
    for pattern in (*places, *HOMES):
        for home in sorted(Path("/").glob(pattern.lstrip("/")), key=_release, reverse=True):
            if os.access(home / "sbin" / "rabbitmq-server", os.X_OK):
                return home / "sbin" / "rabbitmq-server"
    on_path = shutil.which("rabbitmq-server")
    script = Path(on_path).resolve() if on_path else None
    return script if script and (script.parent / "rabbitmq-env").exists() else None


def _release(home: Path) -> tuple[list[int], bool]:
    """Return the sort key of a folder ``rabbitmq_server-4.1.0``: its numbers, then prereleases before the release."""
    version, _, prerelease = home.name.rpartition("server-")[2].partition("-")
    return [int(number) for number in re.findall(r"\d+", version)], not prerelease


def epmd_command(*arguments: str) -> list[str]:
    """Return the command that runs epmd, Erlang's port mapper, with ``arguments``.

    Raises:
        NodeError: epmd is not installed.
    """
    if on_path := shutil.which("epmd"):
        return [on_path, *arguments]
    for folder in EPMD_FOLDERS:
        for path in Path("/").glob(f"{folder.lstrip('/')}/epmd"):
            return [str(path), *arguments]
    raise NodeError(
        "epmd, a part of Erlang, is not on the path: install Erlang completely (Debian: `apt-get install erlang-base`)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMembership:
    """Settings shared by the nodes of one cluster. All nodes must start together: on RabbitMQ 4 each node waits for the
    others.
    """

    cookie: str
    epmd_port: int
    """Port of an epmd process that the caller starts and stops."""


class PrivateNode(LocalNode):
    """A RabbitMQ node that runs the installed server as a child process; takes the arguments of its base class.

    Data, Erlang cookie and password are stored in ``base``. The node has a separate epmd process. If ``setpriv`` is
    installed, the node dies with the process that started it, even if that process is killed.

    Args:
        cluster: Settings shared with the other nodes of its cluster; None: a single node.
    """

    def __init__(self, base: Path, *, cluster: ClusterMembership | None = None, **options: Unpack[NodeOptions]) -> None:
        super().__init__(base, **options)
        self._cluster = cluster
        self._node = f"{self._name}@localhost"
        self._epmd: subprocess.Popen[bytes] | None = None

    async def _launch_server(self) -> None:
        script = _script()
        # a cluster elects leaders without help
        self._recovers = (self.base / "data").exists() and self._cluster is None
        environment = await self._prepare()
        if self._cluster is None:
            epmd = epmd_command("-port", environment["ERL_EPMD_PORT"], "-address", LOOPBACK)
            self._epmd = self._spawn(epmd, environment)
            await self._wait_for_epmd()
        self._process = self._spawn([str(script)], environment, pass_fds=(self._lock.fd,))
        self._lock.note(self._process.pid)

    async def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_TIMEOUT)
        await self.kill()

    async def kill(self) -> None:
        for process in (self._process, self._epmd):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)
        self._process = self._epmd = None
        self._lock.free()

    async def ctl(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(_script().with_name("rabbitmqctl")), "-q", "-n", self._node, *arguments,
            env=server_environment(self.base, self._node, self._known_state()),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed = (await process.communicate())[0].decode(errors="replace")
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode:
            raise NodeError(f"rabbitmqctl {' '.join(arguments)}: exit code {process.returncode}\n{printed.strip()}")
        return printed

    async def _prepare(self) -> dict[str, str]:
        """Write the folder's files and return the server's environment variables."""
        state_file = self.base / "node.json"
        state = NodeState.load(state_file, self._user, self._password)
        if self._cluster is None and (left_over := state.ports.get("epmd")) and not is_free(left_over):
            # the epmd of an earlier start; an epmd that still serves a node refuses to end and keeps its port
            await asyncio.to_thread(
                subprocess.run, epmd_command("-port", str(left_over), "-kill"), capture_output=True, check=False
            )
        names = ("amqp", "dist", "epmd", *(plugin for plugin in self.plugins if plugin in PLUGIN_LISTENERS))
        state.choose_ports(names, {} if self._port is None else {"amqp": self._port})
        if self._cluster is not None:
            state.ports["epmd"] = self._cluster.epmd_port
        state.save(state_file)
        self._state = state
        (self.base / "home").mkdir(exist_ok=True)
        cookie = self.base / "home" / ".erlang.cookie"
        if not cookie.exists():
            write_atomic(
                cookie, (self._cluster.cookie if self._cluster else secrets.token_hex(16)).encode(), mode=0o400
            )
        files = {
            "rabbitmq.conf": server_config(state, self.plugins, self.config),
            "advanced.config": server_user(state),
            "enabled_plugins": f"[{','.join(self.plugins)}].\n",
            "console.log": "",
            "env.conf": "",  # without this file, /etc/rabbitmq/rabbitmq-env.conf is read
            BEFORE_BOOT: boot_script(rabbit_only=not self.plugins),
        }
        for name, text in files.items():
            write_atomic(self.base / name, text.encode(), mode=0o600)
        environment = server_environment(self.base, self._node, state) | {
            "ERL_AFLAGS": f"-eval file:eval({BEFORE_BOOT})."
        }
        if not self.plugins:
            plugin_folder = self.base / "plugins"
            shutil.rmtree(plugin_folder, ignore_errors=True)  # an earlier start may have linked another release
            plugin_folder.mkdir()
            environment[PLUGINS_VARIABLE] = str(plugin_folder)
        return environment

    async def _wait_for_epmd(self) -> None:
        """Wait until epmd answers. Otherwise the server would start another epmd that is never stopped."""
        port = self._known_state().ports["epmd"]
        try:
            async with asyncio.timeout(EPMD_TIMEOUT):
                while self._epmd is not None and self._epmd.poll() is None:
                    if await accepts_connections(port):
                        return
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise NodeError(f"epmd did not answer on port {port} in {EPMD_TIMEOUT:g} s") from None
        raise NodeError(f"epmd did not start on port {port}\n{failure_excerpt(self.base)}")

    def _spawn(
        self, command: list[str], environment: dict[str, str], pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        # The kernel sends the parent-death signal when the forking thread ends, so request it from the main thread
        # only.
        guard = shutil.which("setpriv") if threading.current_thread() is threading.main_thread() else None
        with (self.base / "console.log").open("ab") as console:
            return subprocess.Popen(
                [guard, "--pdeathsig", "KILL", *UNLESS_ORPHANED, str(os.getpid()), *command] if guard else command,
                env=environment, cwd=self.base, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=pass_fds, umask=0o077,
            )  # fmt: skip

    async def _failure(self) -> str:
        code = self._process.poll() if self._process is not None else None
        ended = f"died (exit code {code})" if self.pid is None else "is not ready"
        return f"RabbitMQ in {self.base} {ended}\n{failure_excerpt(self.base)}"


def _script() -> Path:
    script = find_rabbitmq()
    if script is None:
        raise NodeError(NOT_INSTALLED)
    return script

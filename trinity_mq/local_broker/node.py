"""A private RabbitMQ node: a child process of ours with its own data, ports, cookie and password, on loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.node_files import (
    PLUGIN_LISTENERS,
    POLL_SECONDS,
    NodeError,
    NodeState,
    failure_excerpt,
    server_config,
    server_environment,
    server_user,
    write_private,
)
from trinity_mq.local_broker.node_root import WANTED, ServerRoot
from trinity_mq.local_broker.ports import LOOPBACK, accepts, is_free, speaks_amqp

__all__ = ["Mates", "NodeError", "PrivateNode", "epmd_command", "find_rabbitmq"]

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
READY_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
EPMD_TIMEOUT = 10.0


def find_rabbitmq(root: Path | None = None) -> Path | None:
    """Return the ``rabbitmq-server`` script of an installed RabbitMQ, None where there is none.

    Never the wrapper that Debian puts on the path: it changes user and folder. Where ``root`` or
    ``TRINITY_MQ_RABBITMQ_ROOT`` names a root folder, the script of the RabbitMQ in there, as its own programs see it.

    Raises:
        NodeError: There is none below that folder, or it cannot be run here.
    """
    if other := ServerRoot.chosen(root):
        return _in_root(other, [home for home in HOMES if home.startswith("/usr/")], "sbin/rabbitmq-server")
    places = [os.environ["RABBITMQ_HOME"]] if "RABBITMQ_HOME" in os.environ else []
    for pattern in (*places, *HOMES):
        for home in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if os.access(home / "sbin" / "rabbitmq-server", os.X_OK):
                return home / "sbin" / "rabbitmq-server"
    on_path = shutil.which("rabbitmq-server")
    script = Path(on_path).resolve() if on_path else None
    return script if script and (script.parent / "rabbitmq-env").exists() else None


def _in_root(root: ServerRoot, places: Sequence[str], name: str) -> Path:
    for place in places:
        for found in root.inside(f"{place}/{name}"):
            return found
    raise NodeError(f"there is no {name} below {root.folder} in {', '.join(places)}: {WANTED}")


UNLESS_ORPHANED = ("sh", "-c", '[ "$PPID" = "$1" ] && shift && exec "$@"', "sh")
"""Before a parent's process id and a command: runs the command, unless the parent has ended by now. A parent that ends
before its child has asked for the signal sends none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mates:
    """What the nodes of one cluster share. They start at once: on RabbitMQ 4 each waits for the others."""

    cookie: str
    epmd_port: int
    """Of an epmd that is somebody else's to start and to stop."""


class PrivateNode(LocalNode):
    """A server process of our own, from the RabbitMQ that is installed here; takes the arguments of its base class.

    It has its own data, ports, epmd, Erlang cookie and password, all of them in ``base``. Where ``setpriv`` exists it
    dies with the process that started it, also when that is killed.

    Args:
        root: A root folder whose RabbitMQ is run instead of the installed one, None for ``TRINITY_MQ_RABBITMQ_ROOT``.
        mates: What it shares with the other nodes of its cluster, None for a node on its own.
    """

    def __init__(
        self,
        base: Path,
        *,
        name: str = "tmq",
        port: int | None = None,
        user: str = "tmq",
        password: str | None = None,
        plugins: Sequence[str] = (),
        config: str = "",
        root: Path | None = None,
        mates: Mates | None = None,
    ) -> None:
        super().__init__(base, name=name, port=port, user=user, password=password, plugins=plugins, config=config)
        self._root, self._mates = root, mates
        self._node = f"{name}@localhost"
        self._server: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id, None when it does not run."""
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    async def start(self) -> None:
        """Launch the server; :meth:`wait_ready` tells when it can be used.

        Raises:
            NodeError: Not installed, the folder is in use, or the port is.
        """
        script = self._script()
        if self._server is not None and self._server.poll() is not None:
            await self.kill()  # it died by itself: clear what is left of it
        self.base.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._lock.take()
        try:
            self._recovers = (self.base / "data").exists() and self._mates is None  # mates elect among themselves
            environment = await self._prepare()
            if self._mates is None:
                self._epmd = self._spawn(
                    epmd_command("-port", environment["ERL_EPMD_PORT"], "-address", LOOPBACK, root=self._root),
                    environment,
                )
                await self._wait_for_epmd()
            self._server = self._spawn(self._inside([str(script)]), environment, pass_fds=(self._lock.fd,))
            self._lock.note(self._server.pid)
        except BaseException:
            await self.kill()
            raise

    async def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Return when the broker accepts connections.

        Raises:
            NodeError: The server died or was not ready in time; carries the end of its log.
        """
        port = self._known_state().ports["amqp"]
        try:
            async with asyncio.timeout(timeout):
                while not await speaks_amqp(port):
                    if self.pid is None:
                        code = self._server.returncode if self._server else None
                        raise NodeError(
                            f"RabbitMQ in {self.base} died (exit code {code})\n{failure_excerpt(self.base)}"
                        )
                    await asyncio.sleep(POLL_SECONDS)  # nothing tells when a listener opens
                if self._recovers:
                    await self._elect()
        except TimeoutError:
            raise NodeError(
                f"RabbitMQ in {self.base} was not ready in {timeout:g} s\n{failure_excerpt(self.base)}"
            ) from None

    async def stop(self) -> None:
        """Stop cleanly, so that everything is on disk; kill what does not stop in time."""
        if self._server is not None and self._server.poll() is None:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._server.wait, STOP_TIMEOUT)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the server and all that it started: a crash. Its data stays."""
        for process in (self._server, self._epmd):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)
        self._server = self._epmd = None
        self._lock.free()

    async def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on this node and return what it prints (0.5 to 1 s a call).

        Raises:
            NodeError: It failed; carries its output.
        """
        process = await asyncio.create_subprocess_exec(
            *self._inside([str(self._script().with_name("rabbitmqctl")), "-q", "-n", self._node, *arguments]),
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
        """Write the folder's files and return the server's environment."""
        state_file = self.base / "node.json"
        state = NodeState.load(state_file, self._user, self._password)
        if self._mates is None and (left_over := state.ports.get("epmd")) and not is_free(left_over):
            await self._end_left_over_epmd(left_over)
        names = ("amqp", "dist", "epmd", *(plugin for plugin in self.plugins if plugin in PLUGIN_LISTENERS))
        state.choose_ports(names, {} if self._port is None else {"amqp": self._port})
        if self._mates is not None:
            state.ports["epmd"] = self._mates.epmd_port
        state.save(state_file)
        self._state = state
        (self.base / "home").mkdir(exist_ok=True)
        cookie = self.base / "home" / ".erlang.cookie"
        if not cookie.exists():
            write_private(cookie, self._mates.cookie if self._mates else secrets.token_hex(16), 0o400)
        write_private(self.base / "rabbitmq.conf", server_config(state, self.plugins, self.config))
        write_private(self.base / "advanced.config", server_user(state))
        write_private(self.base / "enabled_plugins", f"[{','.join(self.plugins)}].\n")
        write_private(self.base / "console.log", "")
        write_private(self.base / "env.conf", "")  # else /etc/rabbitmq/rabbitmq-env.conf is read
        return server_environment(self.base, self._node, state)

    async def _end_left_over_epmd(self, port: int) -> None:
        """Ask the epmd of an earlier start to end. One that still serves a node refuses, and we take another port."""
        process = await asyncio.create_subprocess_exec(
            *epmd_command("-port", str(port), "-kill", root=self._root),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        await process.wait()

    async def _wait_for_epmd(self) -> None:
        """The server would start one of its own, which nobody stops, if ours did not answer yet."""
        port = self._known_state().ports["epmd"]
        try:
            async with asyncio.timeout(EPMD_TIMEOUT):
                while self._epmd is not None and self._epmd.poll() is None:
                    if await accepts(port):
                        return
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise NodeError(f"epmd did not answer on port {port} in {EPMD_TIMEOUT:g} s") from None
        raise NodeError(f"epmd did not start on port {port}\n{failure_excerpt(self.base)}")

    def _spawn(
        self, command: list[str], environment: dict[str, str], pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        # The parent-death signal follows the thread that forked: only one that lives as long as we do may ask for it.
        guard = shutil.which("setpriv") if threading.current_thread() is threading.main_thread() else None
        with (self.base / "console.log").open("ab") as console:
            return subprocess.Popen(
                [guard, "--pdeathsig", "KILL", *UNLESS_ORPHANED, str(os.getpid()), *command] if guard else command,
                env=environment, cwd=self.base, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=pass_fds, umask=0o077,
            )  # fmt: skip

    def _script(self) -> Path:
        script = find_rabbitmq(self._root)
        if script is None:
            raise NodeError(NOT_INSTALLED)
        return script

    def _inside(self, command: list[str]) -> list[str]:
        root = ServerRoot.chosen(self._root)
        return root.command(command) if root else command


def epmd_command(*arguments: str, root: Path | None = None) -> list[str]:
    """Return what runs epmd, Erlang's port mapper; ``root`` as for :func:`find_rabbitmq`.

    Raises:
        NodeError: There is none.
    """
    if other := ServerRoot.chosen(root):
        return other.command([str(_in_root(other, EPMD_FOLDERS, "epmd")), *arguments])
    if on_path := shutil.which("epmd"):
        return [on_path, *arguments]
    for folder in EPMD_FOLDERS:
        for path in Path("/").glob(f"{folder.lstrip('/')}/epmd"):
            return [str(path), *arguments]
    raise NodeError(
        "epmd, a part of Erlang, is not on the path: install Erlang completely (Debian: `apt-get install erlang-base`)"
    )

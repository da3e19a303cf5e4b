"""RabbitMQ in a container of ours, by the ``docker`` command line, where it is not installed but Docker is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trinity_mq.bus._local_node import LocalNode
from trinity_mq.bus._node_files import POLL_SECONDS, NodeError, NodeState, write_private
from trinity_mq.bus._ports import LOOPBACK, speaks_amqp

IMAGE_VARIABLE = "TRINITY_MQ_RABBITMQ_IMAGE"
DEFAULT_IMAGE = "rabbitmq:4-management"
LABEL = "trinity-mq.broker"
ANSWER_TIMEOUT = 10.0
READY_TIMEOUT = 180.0
STOP_SECONDS = 20


async def docker_answers() -> bool:
    """Return whether there is a ``docker`` command and an engine behind it."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            await _docker("info")
    except (NodeError, TimeoutError):
        return False
    return True


class DockerNode(LocalNode):
    """A container of our own; takes the arguments of its base class, and an image.

    Its port is published on loopback only. The container is removed when stopped; its data is in a volume whose name is
    kept in ``base``.

    Args:
        image: None for ``TRINITY_MQ_RABBITMQ_IMAGE``, else the official image.
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
        image: str | None = None,
    ) -> None:
        super().__init__(base, name=name, port=port, user=user, password=password, plugins=plugins, config=config)
        self.image = image or os.environ.get(IMAGE_VARIABLE) or DEFAULT_IMAGE
        self._container: str | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the container's first process, as the engine's host counts; None when it does not run."""
        return self._pid

    async def start(self) -> None:
        """Create and start the container.

        Raises:
            NodeError: The folder or the port is in use, or Docker refuses; carries what it said.
        """
        self.base.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._lock.take()
        try:
            self._lock.note(None)
            state_file = self.base / "docker.json"
            state = NodeState.load(state_file, self._user, self._password)
            state.choose_ports(("amqp",), {} if self._port is None else {"amqp": self._port})
            state.save(state_file)
            self._state = state
            self._container = f"{self._name}-{state.identity}"
            await self._remove()  # of a start that was killed: the lock says that nobody uses it
            await _docker("run", *self._options(state), self.image)
            self._pid = int(await _docker("inspect", "--format", "{{.State.Pid}}", self._container)) or None
        except BaseException:
            await self.kill()
            raise

    async def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Return when the broker accepts connections.

        Raises:
            NodeError: The container ended or was not ready in time; carries the end of its log.
        """
        port = self._known_state().ports["amqp"]
        container = self._container or ""
        try:
            async with asyncio.timeout(timeout):
                while not await speaks_amqp(port):
                    if await _docker("inspect", "--format", "{{.State.Running}}", container) != "true":
                        raise NodeError(f"container {container} of {self.image} ended\n{await self._log_tail()}")
                    await asyncio.sleep(POLL_SECONDS)  # nothing tells when a listener opens
        except TimeoutError:
            tail = await self._log_tail()
            raise NodeError(f"container {container} of {self.image} was not ready in {timeout:g} s\n{tail}") from None

    async def stop(self) -> None:
        """Stop cleanly and remove the container; its volume stays."""
        if self._container is not None:
            with contextlib.suppress(NodeError):  # one that ended by itself cannot be stopped, only removed
                await _docker("stop", "--time", str(STOP_SECONDS), self._container)
        await self.kill()

    async def kill(self) -> None:
        """Remove the container as it runs: a crash. Its volume stays."""
        await self._remove()
        self._container = self._pid = None
        self._lock.free()

    async def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` in the container and return what it prints.

        Raises:
            NodeError: It failed; carries its output.
        """
        # Not as root: before the server wrote its cookie, that would leave one which the server cannot read.
        return await _docker("exec", "--user", "rabbitmq", self._container or "", "rabbitmqctl", "-q", *arguments)

    def _options(self, state: NodeState) -> list[str]:
        secrets_file, config = self.base / "container.env", self.base / "extra.conf"
        write_private(secrets_file, f"RABBITMQ_DEFAULT_USER={state.user}\nRABBITMQ_DEFAULT_PASS={state.password}\n")
        options = [
            "--detach",
            f"--name={self._container}",
            f"--label={LABEL}={self.base}",
            "--hostname=tmq",  # part of the node's name, by which it finds its data again
            f"--publish={LOOPBACK}:{state.ports['amqp']}:5672",
            f"--env-file={secrets_file}",  # not on the command line, which everyone can read
            f"--volume={self._name}-{state.identity}:/var/lib/rabbitmq",
        ]
        if self.config:
            config.write_text(self.config)
            options.append(f"--volume={config}:/etc/rabbitmq/conf.d/90-extra.conf:ro")
        if self.plugins:
            enabled = self.base / "enabled_plugins"
            enabled.write_text(f"[{','.join(self.plugins)}].\n")
            options.append(f"--volume={enabled}:/etc/rabbitmq/enabled_plugins:ro")
        return options

    async def _remove(self) -> None:
        if self._container is not None:
            with contextlib.suppress(NodeError):  # none of that name is fine
                await _docker("rm", "--force", self._container)

    async def _log_tail(self) -> str:
        try:
            return await _docker("logs", "--tail", "20", self._container or "")
        except NodeError as error:
            return str(error)


async def _docker(*arguments: str) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            "docker", *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except FileNotFoundError as error:
        raise NodeError("there is no `docker` command on the path") from error
    try:
        printed = (await process.communicate())[0].decode(errors="replace").strip()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise NodeError(f"docker {arguments[0]}: exit code {process.returncode}: {printed}")
    return printed

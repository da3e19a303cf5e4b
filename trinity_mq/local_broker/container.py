"""RabbitMQ in a container of ours, by the ``docker`` command line, where it is not installed but Docker is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from trinity_mq.local_broker.base import LocalNode
from trinity_mq.local_broker.docker_command import Owned, docker
from trinity_mq.local_broker.node_files import (
    EXCERPT_LINES,
    LOG_PREFIX,
    POLL_SECONDS,
    NodeError,
    NodeState,
    write_private,
)
from trinity_mq.local_broker.ports import LOOPBACK, speaks_amqp

IMAGE_VARIABLE = "TRINITY_MQ_RABBITMQ_IMAGE"
DEFAULT_IMAGE = "rabbitmq:4-management"
LABEL = "trinity-mq.broker"
ANSWER_TIMEOUT = 10.0
READY_TIMEOUT = 180.0
STOP_SECONDS = 20
LOG_LINES = 200
COLOUR = re.compile(r"\x1b\[[\d;]*m")
HOME = "/var/lib/rabbitmq"
LIMITS = "nofile=16384:16384"
"""Erlang makes a table as long as the number of files it may open, which some engines set to a thousand million."""
ERLANG = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
"""Two schedulers that sleep when idle: the cores belong to the model."""


async def docker_answers() -> bool:
    """Return whether there is a ``docker`` command and an engine behind it."""
    try:
        await docker("version", "--format", "{{.Server.Version}}", timeout=ANSWER_TIMEOUT)
    except NodeError:
        return False
    return True


class DockerNode(LocalNode):
    """A container of our own; takes the arguments of its base class, and an image.

    Its port is published on loopback only. It is removed when stopped, and when the process that started it ends, also
    when that is killed. Its data is in a volume, which stays: its name is that of the container, its label
    ``trinity-mq.broker`` says whose it is.

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
        self._made = False
        self._owned: Owned | None = None

    @property
    def pid(self) -> int | None:
        """Process id of a watcher that ends when the container does; None when it does not run."""
        return self._owned.pid if self._owned is not None else None

    @property
    def container(self) -> str:
        """Name of the container, and of the volume with its data. Only once started."""
        return f"{self._name}-{self._known_state().identity}"

    async def start(self) -> None:
        """Create and start the container; its image is pulled where it is not there.

        Raises:
            NodeError: The folder or the port is in use, the image cannot be had, or Docker refuses; says what it said.
        """
        if self._owned is not None and self._owned.pid is None:
            await self.kill()  # it ended by itself: clear what is left of it
        self.base.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._lock.take()
        try:
            self._lock.note(None)
            await self._require_image()
            state_file = self.base / "docker.json"
            self._recovers = state_file.exists()
            state = NodeState.load(state_file, self._user, self._password)
            state.choose_ports(("amqp",), {} if self._port is None else {"amqp": self._port})
            state.save(state_file)
            self._state, self._made = state, True
            await self._remove()  # of a start that was killed: the lock says that nobody uses it
            await docker("volume", "create", f"--label={LABEL}={self.base}", self.container)
            await docker("create", *self._options(state), self.image)
            for file, place in self._files():
                await docker("cp", str(file), f"{self.container}:{place}")
            await docker("start", self.container)
            self._owned = Owned(self.container)
        except BaseException:
            await self.kill()
            raise

    async def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Return when the broker accepts connections.

        Raises:
            NodeError: The container ended or was not ready in time; carries the end of its log.
        """
        port = self._known_state().ports["amqp"]
        what = f"container {self.container} of {self.image}"
        try:
            async with asyncio.timeout(timeout):
                while not await speaks_amqp(port):
                    if self.pid is None:
                        raise NodeError(f"{what} ended\n{await self._log_tail()}")
                    await asyncio.sleep(POLL_SECONDS)  # nothing tells when a listener opens
                if self._recovers:
                    await self._elect()
        except TimeoutError:
            raise NodeError(f"{what} was not ready in {timeout:g} s\n{await self._log_tail()}") from None

    async def stop(self) -> None:
        """Stop cleanly and remove the container; its volume stays."""
        if self._owned is not None:
            with contextlib.suppress(NodeError):  # one that ended by itself cannot be stopped, only removed
                await docker("stop", "-t", str(STOP_SECONDS), self.container)
        await self.kill()

    async def kill(self) -> None:
        """Remove the container as it runs: a crash. Its volume stays."""
        if self._made:  # else it may be that of another process, to whom we left the folder
            await self._remove()
            self._made = False
        if self._owned is not None:
            await self._owned.release()
            self._owned = None
        self._lock.free()

    async def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` in the container and return what it prints.

        Raises:
            NodeError: It failed; carries its output.
        """
        # Not as root: before the server wrote its cookie, that would leave one which the server cannot read.
        return await docker("exec", "--user", "rabbitmq", self.container, "rabbitmqctl", "-q", *arguments)

    async def _require_image(self) -> None:
        host = os.environ.get("DOCKER_HOST", "")
        if urlsplit(host).hostname not in {None, "localhost", LOOPBACK}:
            raise NodeError(
                f"the Docker engine of DOCKER_HOST={host} is on another machine, and the broker would listen there: "
                "start a broker on it, and set broker.url"
            )
        await docker("version", "--format", "{{.Server.Version}}", timeout=ANSWER_TIMEOUT)
        try:
            await docker("image", "inspect", "--format", "{{.Id}}", self.image)
        except NodeError:
            try:
                await docker("pull", "--quiet", self.image, timeout=None)
            except NodeError as error:
                raise NodeError(
                    f"the Docker engine has no image {self.image}, and cannot fetch it ({error}): "
                    f"set {IMAGE_VARIABLE} to a RabbitMQ image that is there, or install rabbitmq-server"
                ) from error

    def _options(self, state: NodeState) -> list[str]:
        secrets_file = self.base / "container.env"
        write_private(secrets_file, f"RABBITMQ_DEFAULT_USER={state.user}\nRABBITMQ_DEFAULT_PASS={state.password}\n")
        return [
            "--pull=never",
            f"--name={self.container}",
            f"--label={LABEL}={self.base}",
            "--hostname=tmq",  # part of the node's name, by which it finds its data again
            f"--publish={LOOPBACK}:{state.ports['amqp']}:5672",
            f"--env-file={secrets_file}",  # not on the command line, which everyone can read
            f"--env=RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS={ERLANG}",
            f"--ulimit={LIMITS}",
            f"--volume={self.container}:{HOME}",
        ]

    def _files(self) -> list[tuple[Path, str]]:
        """Write what the container is given, readable by its user, and return where it goes."""
        given = []
        if self.config:
            given.append((self.base / "extra.conf", "/etc/rabbitmq/conf.d/90-extra.conf", self.config))
        if self.plugins:
            given.append(
                (self.base / "enabled_plugins", "/etc/rabbitmq/enabled_plugins", f"[{','.join(self.plugins)}].\n")
            )
        for file, _, text in given:
            write_private(file, text, 0o644)
            file.chmod(0o644)  # whatever the umask is
        return [(file, place) for file, place, _ in given]

    async def _remove(self) -> None:
        with contextlib.suppress(NodeError):  # none of that name is fine
            await docker("rm", "--force", self.container)

    async def _log_tail(self) -> str:
        """The part of its log that says why it did not start, else the end of it."""
        try:
            log = await docker("logs", "--tail", str(LOG_LINES), self.container)
        except NodeError as error:
            return str(error)
        lines = [line for raw in log.splitlines() if (line := LOG_PREFIX.sub("", COLOUR.sub("", raw)).rstrip())]
        if "BOOT FAILED" in lines:
            at = lines.index("BOOT FAILED")
            return "\n".join(lines[max(0, at - EXCERPT_LINES // 2) : at + EXCERPT_LINES])
        return "\n".join(lines[-EXCERPT_LINES:])

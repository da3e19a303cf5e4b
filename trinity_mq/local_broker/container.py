"""RabbitMQ in a Docker container, for machines without an installed server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack
from urllib.parse import urlsplit

from trinity_mq.local_broker.base import LocalNode, NodeOptions
from trinity_mq.local_broker.node_files import CONSUMER_TIMEOUT, EXCERPT_LINES, NodeError, NodeState, boot_failure
from trinity_mq.local_broker.ports import LOOPBACK

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

T = TypeVar("T")

IMAGE_VARIABLE = "TRINITY_MQ_RABBITMQ_IMAGE"
DEFAULT_IMAGE = "rabbitmq:4-management"
LABEL = "trinity-mq.broker"
ENGINE_TIMEOUT = 60.0
"""Maximum seconds for a request to the Docker engine."""
STOP_SECONDS = 20
LOG_LINES = 200
COLOUR = re.compile(r"\x1b\[[\d;]*m")
HOME = "/var/lib/rabbitmq"
OPEN_FILES = 16384
"""Limit of open files. Erlang allocates a table of this size, and some engines allow 1,000,000,000 files."""
ERLANG = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
"""Erlang arguments: two schedulers that sleep when idle, to leave the cores to the model."""
GUARD = """
import os, sys, threading
from trinity_mq.local_broker.container import connect
container = connect(timeout=None).containers.get(sys.argv[1])
threading.Thread(target=lambda: (container.wait(), os._exit(0)), daemon=True).start()
if sys.stdin.read() != "released":
    container.remove(force=True, v=True)
os._exit(0)
"""
"""Program of the guard process. It ends with the container. If the owner's end of the pipe closes without the text
``released``, the guard removes the container."""


async def is_docker_available() -> bool:
    """Return whether a Docker engine answers."""
    try:
        await asyncio.to_thread(lambda: connect().close())
    except NodeError:
        return False
    return True


class DockerNode(LocalNode):
    """A RabbitMQ node in a Docker container; takes the arguments of its base class and an image.

    The port is published on loopback only. The container is removed when it is stopped and when the process that
    started it ends, even if that process is killed. The data is in a persistent volume with the container's name. The
    label ``trinity-mq.broker`` of the volume is the folder ``base``.

    Args:
        image: Image name. None: ``TRINITY_MQ_RABBITMQ_IMAGE`` if set, else the official image.
    """

    def __init__(self, base: Path, *, image: str | None = None, **options: Unpack[NodeOptions]) -> None:
        super().__init__(base, **options)
        self.image = image or os.environ.get(IMAGE_VARIABLE) or DEFAULT_IMAGE
        self._engine: DockerClient | None = None
        self._cancelled = threading.Event()

    @property
    def container(self) -> str:
        """Name of the container and of the volume with its data. Available after the start."""
        return f"{self._name}-{self._known_state().identity}"

    async def _launch_server(self) -> None:
        """Start the container and its guard. The container's own processes may belong to a virtual machine or another
        namespace, so their ids are not valid here.
        """
        self._lock.note(None)
        self._cancelled.clear()
        await self._require_image()
        state_file = self.base / "docker.json"
        self._recovers = state_file.exists()
        state = NodeState.load(state_file, self._user, self._password)
        state.choose_ports(("amqp",), {} if self._port is None else {"amqp": self._port})
        state.save(state_file)
        self._state = state
        await self._remove()  # a container here is left by a killed start, because this process holds the lock
        await self._request("create", self._create)
        await self._request("start", lambda engine: self._container_of(engine).start())
        self._process = _start_guard(self.container)

    async def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(NodeError):  # a container that has already ended can only be removed
                await self._request("stop", lambda engine: self._container_of(engine).stop(timeout=STOP_SECONDS))
        await self.kill()

    async def kill(self) -> None:
        if self._engine is not None:  # otherwise the container may belong to another process that holds the folder
            if self._state is not None:
                await self._remove()
            await asyncio.to_thread(self._engine.close)
            self._engine = None
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):  # the guard has ended with the container
                await asyncio.to_thread(self._process.communicate, b"released")
            self._process = None
        self._lock.free()

    async def ctl(self, *arguments: str) -> str:
        # Not as root: before the server writes its cookie, root would create a cookie that the server cannot read.
        command = ["rabbitmqctl", "-q", *arguments]
        code, output = await self._request(
            "exec", lambda engine: self._container_of(engine).exec_run(command, user="rabbitmq")
        )
        printed: str = output.decode(errors="replace")
        if code:
            raise NodeError(f"rabbitmqctl {' '.join(arguments)}: exit code {code}\n{printed.strip()}")
        return printed

    async def _require_image(self) -> None:
        host = os.environ.get("DOCKER_HOST", "")
        if urlsplit(host).hostname not in {None, "localhost", LOOPBACK}:
            raise NodeError(
                f"the Docker engine of DOCKER_HOST={host} is on another machine, and the broker would listen there: "
                "start a broker on it, and set broker.url"
            )
        self._engine = await asyncio.to_thread(connect)
        try:
            await self._request("inspect", lambda engine: engine.images.get(self.image))
        except NodeError:
            try:
                await self._request("pull", self._pull)
            except NodeError as error:
                raise NodeError(
                    f"the Docker engine has no image {self.image}, and cannot fetch it ({error}): "
                    f"set {IMAGE_VARIABLE} to a RabbitMQ image that is there, or install rabbitmq-server"
                ) from error

    def _pull(self, engine: DockerClient) -> None:
        from docker.errors import ImageNotFound
        from docker.utils import parse_repository_tag

        repository, tag = parse_repository_tag(self.image)
        for line in engine.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            if self._cancelled.is_set():
                return
            if "error" in line:
                raise ImageNotFound(line["error"])

    def _create(self, engine: DockerClient) -> None:
        from docker.types import Ulimit

        state, labels = self._known_state(), {LABEL: str(self.base)}
        engine.volumes.create(self.container, labels=labels)
        container = engine.containers.create(
            self.image,
            name=self.container,
            labels=labels,
            hostname="tmq",  # part of the node's name, which locates the node's data after a restart
            ports={"5672/tcp": (LOOPBACK, state.ports["amqp"])},
            environment={
                "RABBITMQ_DEFAULT_USER": state.user,
                "RABBITMQ_DEFAULT_PASS": state.password,
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG,
            },
            ulimits=[Ulimit(name="nofile", soft=OPEN_FILES, hard=OPEN_FILES)],
            volumes={self.container: {"bind": HOME, "mode": "rw"}},
        )
        files = {"conf.d/90-extra.conf": f"{CONSUMER_TIMEOUT}\n{self.config}"}
        if self.plugins:
            files["enabled_plugins"] = f"[{','.join(self.plugins)}].\n"
        container.put_archive("/etc/rabbitmq", _archive(files))

    def _container_of(self, engine: DockerClient) -> Container:
        return engine.containers.get(self.container)

    async def _remove(self) -> None:
        from docker.errors import NotFound

        def remove(engine: DockerClient) -> None:
            with contextlib.suppress(NotFound):
                self._container_of(engine).remove(force=True)

        with contextlib.suppress(NodeError):
            await self._request("remove", remove)

    async def _failure(self) -> str:
        ended = "ended" if self.pid is None else "is not ready"
        return f"container {self.container} of {self.image} {ended}\n{await self._log_tail()}"

    async def _log_tail(self) -> str:
        """Return the part of the log that explains why the server did not start, else the end of the log."""
        try:
            log = await self._request("logs", lambda engine: self._container_of(engine).logs(tail=LOG_LINES))
        except NodeError as error:
            return str(error)
        lines = COLOUR.sub("", log.decode(errors="replace")).splitlines()
        return "\n".join(boot_failure(lines) or lines[-EXCERPT_LINES:])

    async def _request(self, action: str, work: Callable[[DockerClient], T]) -> T:
        """Run requests to the engine in a thread. A cancelled call waits until the requests end.

        Raises:
            NodeError: The engine refused or did not answer; the message contains its answer.
        """
        if self._engine is None:
            raise NodeError(f"the broker in {self.base} was not started")
        request = asyncio.ensure_future(asyncio.to_thread(work, self._engine))
        with _engine_errors(action):
            try:
                return await asyncio.shield(request)
            except asyncio.CancelledError:
                self._cancelled.set()
                await asyncio.wait([request])
                raise


def connect(timeout: float | None = ENGINE_TIMEOUT) -> DockerClient:
    """Connect to the engine of ``DOCKER_HOST``, else of Docker's current context; ``timeout`` is in seconds per
    request.

    Raises:
        NodeError: No engine answers.
    """
    import docker
    from docker.context import ContextAPI

    host = os.environ.get("DOCKER_HOST") or ContextAPI.get_current_context().Host
    if host.startswith("unix://") and not Path(host.removeprefix("unix://")).is_socket():
        raise NodeError(f"no Docker engine answers at {host}: there is no such socket")
    try:
        return docker.from_env(environment={**os.environ, "DOCKER_HOST": host}, timeout=timeout)
    except docker.errors.DockerException as error:
        raise NodeError(f"no Docker engine answers at {host}: {error}") from error


def _start_guard(container: str) -> subprocess.Popen[bytes]:
    silent = subprocess.DEVNULL
    command = [sys.executable, "-c", GUARD, container]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True)


def _archive(files: dict[str, str]) -> bytes:
    """Return a tar archive of ``files`` by name, readable by everyone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in files.items():
            body = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(body), 0o644
            archive.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


@contextlib.contextmanager
def _engine_errors(action: str) -> Iterator[None]:
    """Translate the errors of the Docker client into NodeError."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        raise NodeError(f"docker {action}: {error}") from error

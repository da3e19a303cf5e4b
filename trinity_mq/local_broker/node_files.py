"""Files of a broker's folder: state with ports and password, configuration, environment, lock."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from trinity_mq.bus.base import BusError
from trinity_mq.local_broker.ports import LOOPBACK, free_ports, is_free
from trinity_mq.runtime.process import write_atomic

PLUGIN_LISTENERS: Mapping[str, Sequence[str]] = {
    "rabbitmq_management": ("management.tcp.ip = {host}", "management.tcp.port = {port}"),
    "rabbitmq_prometheus": ("prometheus.tcp.ip = {host}", "prometheus.tcp.port = {port}"),
    "rabbitmq_stream": (
        "stream.listeners.tcp.1 = {host}:{port}",
        "stream.advertised_host = {host}",
        "stream.advertised_port = {port}",
    ),
}
"""Plugins that listen on all interfaces unless told otherwise."""

CONSUMER_TIMEOUT = f"consumer_timeout = {7 * 24 * 3600 * 1000}"
"""Line of ``rabbitmq.conf``: a week, in milliseconds. The agents end what takes too long themselves."""
PLUGINS_VARIABLE = "RABBITMQ_PLUGINS_DIR"
BEFORE_BOOT = "before_boot"
"""File in the server's working folder, named as an Erlang atom: quotes would not outlive the shells on its way."""
SEARCHED_FIRST = (
    *("kernel", "stdlib", "rabbit", "ssl", "rabbit_common", "inets", "compiler", "ra", "xmerl", "mnesia", "cuttlefish"),
    *("rabbitmq_prelaunch", "sasl", "ranch", "tools", "osiris", "khepri", "observer_cli", "public_key", "syslog"),
    *("syntax_tools", "jsx", "os_mon"),
)
"""Erlang applications that RabbitMQ always loads, those with the most modules first."""
HELPERS_END_SECONDS = 5.0
POLL_SECONDS = 0.05
LOG_PREFIX = re.compile(r"^\S+ \S+ \[\w+\] <[\d.]+> ?")
EXCERPT_LINES = 16


class NodeError(BusError):
    """A broker could not be started; the message says why and what to do."""


@dataclass(slots=True, kw_only=True)
class NodeState:
    """Remembered between starts on the same folder, readable by the owner only."""

    user: str
    password: str
    ports: dict[str, int] = field(default_factory=dict)
    identity: str = field(default_factory=lambda: secrets.token_hex(6))
    """Tells the broker of this folder from those of others, where they share a name space."""

    @classmethod
    def load(cls, path: Path, user: str, password: str | None) -> NodeState:
        """Return what ``path`` remembers, else a new state with a random password.

        Raises:
            NodeError: The broker in this folder was made with another user or password.
        """
        try:
            known = cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls(user=user, password=password or secrets.token_hex(16))
        except (ValueError, TypeError) as error:
            raise NodeError(f"{path} cannot be read ({error}): remove {path.parent} to start afresh") from error
        if known.user != user or password not in {None, known.password}:
            raise NodeError(
                f"the broker in {path.parent} was made with user {known.user!r} and its own password: "
                "start it with the same, or remove the folder to start afresh"
            )
        return known

    def save(self, path: Path) -> None:
        """Write atomically, mode 0600."""
        write_atomic(path, json.dumps(asdict(self)).encode(), mode=0o600)

    def choose_ports(self, names: Sequence[str], fixed: Mapping[str, int]) -> None:
        """Give each name a free port: the fixed one, else the remembered one where it is free, else a new one.

        Raises:
            NodeError: A fixed port is in use.
        """
        for wanted in fixed.values():
            if not is_free(wanted):
                raise NodeError(f"port {wanted} is in use by another program: choose another, or leave the port out")
        kept = {name: port for name in names if (port := self.ports.get(name)) and is_free(port)} | dict(fixed)
        fresh = iter(free_ports(sum(name not in kept for name in names)))
        self.ports = {name: kept[name] if name in kept else next(fresh) for name in names}


class FolderLock:
    """An advisory lock on a node's folder, inherited by the server: it is free only when both of us are gone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The descriptor to pass on. Only while taken."""
        if self._fd is None:
            raise RuntimeError("the lock is not taken")
        return self._fd

    async def take(self) -> None:
        """Lock, or raise NodeError that names the holder."""
        if self._fd is not None:
            raise NodeError(f"the broker in {self._path.parent} is already started by this process")
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            async with asyncio.timeout(HELPERS_END_SECONDS):
                while not _lock(fd):
                    holder = self._path.read_text().strip()
                    if holder.isdigit() and psutil.pid_exists(int(holder)):
                        raise NodeError(
                            f"a broker already runs in {self._path.parent} (process {holder}): "
                            "stop it, or use another folder"
                        )
                    await asyncio.sleep(POLL_SECONDS)  # a killed server's helpers share the lock a moment longer
        except BaseException as error:
            os.close(fd)
            if isinstance(error, TimeoutError):
                raise NodeError(f"another process is starting or ending a broker in {self._path.parent}") from error
            raise
        self._fd = fd

    def note(self, pid: int | None) -> None:
        """Write the server's pid into the file, for the message of the next one."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{pid or os.getpid()}\n".encode(), 0)

    def free(self) -> None:
        """Release the lock; a server that still runs keeps its inherited descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def boot_failure(lines: Sequence[str]) -> list[str]:
    """Return the lines of a server's output that say why it did not start; none where it does not say that."""
    bare = [LOG_PREFIX.sub("", line).rstrip() for line in lines]
    if "BOOT FAILED" not in bare:
        return []
    at = bare.index("BOOT FAILED")
    return [line for line in bare[max(0, at - EXCERPT_LINES // 2) : at + EXCERPT_LINES] if line]


def failure_excerpt(base: Path) -> str:
    """Return the part of a server's output that says why it did not start, else the ends of its output and logs."""
    console = base / "console.log"
    logs = sorted((base / "log").glob("*.log"), key=lambda path: path.stat().st_mtime)
    ends = [line for path in (console, *logs) for line in _lines(path)[-EXCERPT_LINES:] if line.strip()]
    return "\n".join([*(boot_failure(_lines(console)) or ends), f"(all of it: {console}, {base / 'log'})"])


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def server_config(state: NodeState, plugins: Sequence[str], extra: str) -> str:
    """Return ``rabbitmq.conf``: loopback only, small."""
    lines = [
        f"listeners.tcp.1 = {LOOPBACK}:{state.ports['amqp']}",
        "loopback_users.guest = true",
        "default_vhost = /",
        "vm_memory_high_watermark.relative = 0.4",
        "disk_free_limit.absolute = 50MB",
        # quorum queues keep in memory what is in their write-ahead log, up to three times its size: 512 MiB by default
        "raft.wal_max_size_bytes = 67108864",
        "log.file.level = info",
        "log.console = false",
        CONSUMER_TIMEOUT,
    ]
    for plugin in plugins:
        lines += [line.format(host=LOOPBACK, port=state.ports[plugin]) for line in PLUGIN_LISTENERS.get(plugin, ())]
    return "\n".join([*lines, extra, ""])


def server_user(state: NodeState) -> str:
    """Return ``advanced.config`` with our own user: ``rabbitmq.conf`` of 4.0 takes what is before a colon for a tag."""
    values = {"default_user": state.user, "default_pass": state.password}
    terms = [f"{{{name},<<{','.join(map(str, value.encode()))}>>}}" for name, value in values.items()]
    return f"[{{rabbit,[{','.join(terms)}]}}].\n"


def before_boot(*, rabbit_only: bool) -> str:
    """Return Erlang expressions that the server evaluates before RabbitMQ boots: they halve the processor time of that.

    Erlang looks for each of a thousand modules in one folder after the other, about a hundred of them, most of plugins
    that nobody enables. So the folders of what is always loaded come first, and from Erlang 26 on it remembers what is
    in them. RabbitMQ puts its plugins' folders before them again: with ``rabbit_only`` its folder of plugins holds a
    link to RabbitMQ itself, whose settings are described there, and nothing else.
    """
    lines = [
        f"Applications = [{', '.join(SEARCHED_FIRST)}].",
        "Found = [filename:join(Folder, ebin) || A <- Applications, Folder <- [code:lib_dir(A)], is_list(Folder)].",
        "code:add_pathsa(lists:reverse(Found)).",
        "catch code:set_path(code:get_path(), cache).",
    ]
    if rabbit_only:
        variable = f'"{PLUGINS_VARIABLE}"'
        lines += [
            f"Plugins = os:getenv({variable}).",
            "Rabbit = code:lib_dir(rabbit).",
            "Linked = is_list(Rabbit) andalso ok =:= file:make_symlink(",
            "    Rabbit, filename:join(Plugins, filename:basename(Rabbit))).",
            f"Linked orelse os:unsetenv({variable}).",
        ]
    return "\n".join([*lines, ""])


def server_environment(base: Path, node: str, state: NodeState) -> dict[str, str]:
    """Return the environment of the server and its tools: all paths below ``base``, nothing of a system-wide broker."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(base / "home"),
        "RABBITMQ_NODENAME": node,
        "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
        "RABBITMQ_NODE_PORT": str(state.ports["amqp"]),
        "RABBITMQ_DIST_PORT": str(state.ports["dist"]),
        "RABBITMQ_BASE": str(base),
        "RABBITMQ_MNESIA_BASE": str(base / "data"),
        "RABBITMQ_LOG_BASE": str(base / "log"),
        "RABBITMQ_CONFIG_FILE": str(base / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(base / "advanced.config"),
        "RABBITMQ_CONFIG_FILES": str(base / "conf.d"),
        "RABBITMQ_CONF_ENV_FILE": str(base / "env.conf"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(base / "generated"),
        "RABBITMQ_SCHEMA_DIR": str(base / "schema"),
        "RABBITMQ_FEATURE_FLAGS_FILE": str(base / "feature_flags"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(base / "enabled_plugins"),
        "RABBITMQ_PID_FILE": str(base / "server.pid"),
        "ERL_CRASH_DUMP": str(base / "erl_crash.dump"),
        "ERL_EPMD_PORT": str(state.ports["epmd"]),
        "ERL_EPMD_ADDRESS": LOOPBACK,
        # Two schedulers that sleep when idle and are not pinned: the cores belong to the model.
        "RABBITMQ_SCHEDULER_BIND_TYPE": "u",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1} "
            "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
        ),
        "RABBITMQ_CTL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
        # The start script then becomes the server instead of waiting for it: our child is the broker itself.
        "RUNNING_UNDER_SYSTEMD": "true",
    }

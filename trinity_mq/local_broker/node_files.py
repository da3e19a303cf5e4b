"""Files of a broker's folder: state with ports and password, configuration, environment, lock."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from trinity_mq.bus.base import BusError
from trinity_mq.file_lock import try_lock
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
"""Listener settings of plugins that listen on all interfaces by default."""

CONSUMER_TIMEOUT = f"consumer_timeout = {7 * 24 * 3600 * 1000}"
"""Line of ``rabbitmq.conf``: one week, in milliseconds. The agents have their own timeouts."""
PLUGINS_VARIABLE = "RABBITMQ_PLUGINS_DIR"
BEFORE_BOOT = "before_boot"
"""Name of the file of Erlang expressions in the server's working folder that the server evaluates before it boots. The
name is an Erlang atom that needs no quotes, because the shells that start the server would remove quotes.
"""
SEARCHED_FIRST = (
    *("kernel", "stdlib", "rabbit", "ssl", "rabbit_common", "inets", "compiler", "ra", "xmerl", "mnesia", "cuttlefish"),
    *("rabbitmq_prelaunch", "sasl", "ranch", "tools", "osiris", "khepri", "observer_cli", "public_key", "syslog"),
    *("syntax_tools", "jsx", "os_mon"),
)
"""Erlang applications that RabbitMQ always loads, applications with the most modules first."""
HELPERS_END_SECONDS = 5.0
POLL_SECONDS = 0.05
LOG_PREFIX = re.compile(r"^\S+ \S+ \[\w+\] <[\d.]+> ?")
EXCERPT_LINES = 16


class NodeError(BusError):
    """A broker could not be started; the message gives the reason and a remedy."""


@dataclass(slots=True, kw_only=True)
class NodeState:
    """State stored between starts in the same folder, readable by the owner only."""

    user: str
    password: str
    ports: dict[str, int] = field(default_factory=dict)
    identity: str = field(default_factory=lambda: secrets.token_hex(6))
    """Distinguishes the broker of this folder from other brokers in a shared namespace."""

    @classmethod
    def load(cls, path: Path, user: str, password: str | None) -> NodeState:
        """Return the state stored in ``path``, else a new state with ``password`` or a random password.

        Raises:
            NodeError: The broker in this folder was created with another user or password, or the file is not readable.
        """
        try:
            state = cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls(user=user, password=password or secrets.token_hex(16))
        except (ValueError, TypeError) as error:
            raise NodeError(f"{path} cannot be read ({error}): remove {path.parent} to start afresh") from error
        if state.user != user or password not in {None, state.password}:
            raise NodeError(
                f"the broker in {path.parent} was made with user {state.user!r} and its own password: "
                "start it with the same, or remove the folder to start afresh"
            )
        return state

    def save(self, path: Path) -> None:
        """Write atomically, mode 0600."""
        write_atomic(path, json.dumps(asdict(self)).encode(), mode=0o600)

    def choose_ports(self, names: Sequence[str], fixed: Mapping[str, int]) -> None:
        """Assign each name a free port: the fixed port, else the stored port if it is free, else a new port.

        Raises:
            NodeError: A fixed port is in use.
        """
        for fixed_port in fixed.values():
            if not is_free(fixed_port):
                raise NodeError(
                    f"port {fixed_port} is in use by another program: choose another, or leave the port out"
                )
        usable = {name: port for name in names if (port := self.ports.get(name)) and is_free(port)} | dict(fixed)
        fresh = iter(free_ports(sum(name not in usable for name in names)))
        self.ports = {name: usable[name] if name in usable else next(fresh) for name in names}


class FolderLock:
    """An advisory lock on a node's folder, inherited by the server. It is free when both this process and the server
    have ended or closed it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The file descriptor to pass to the server. Available while the lock is taken."""
        if self._fd is None:
            raise RuntimeError("the lock is not taken")
        return self._fd

    async def take(self) -> None:
        """Take the lock.

        Raises:
            NodeError: A broker runs in the folder, or is starting or ending there.
        """
        if self._fd is not None:
            raise NodeError(f"the broker in {self._path.parent} is already started by this process")
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            async with asyncio.timeout(HELPERS_END_SECONDS):
                while not try_lock(fd):
                    holder = self._path.read_text().strip()
                    if holder.isdigit() and psutil.pid_exists(int(holder)):
                        raise NodeError(
                            f"a broker already runs in {self._path.parent} (process {holder}): "
                            "stop it, or use another folder"
                        )
                    # helper processes of a killed server hold the lock a moment longer
                    await asyncio.sleep(POLL_SECONDS)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, TimeoutError):
                raise NodeError(f"another process is starting or ending a broker in {self._path.parent}") from error
            raise
        self._fd = fd

    def note(self, pid: int | None) -> None:
        """Write the server's process id into the file, for the error message of a later :meth:`take`. None: write the
        id of this process.
        """
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{pid or os.getpid()}\n".encode(), 0)

    def free(self) -> None:
        """Release the lock; a server that still runs keeps its inherited descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def boot_failure(lines: Sequence[str]) -> list[str]:
    """Return the lines of a server's output that explain why it did not start; empty if the output does not contain
    them.
    """
    bare = [LOG_PREFIX.sub("", line).rstrip() for line in lines]
    if "BOOT FAILED" not in bare:
        return []
    at = bare.index("BOOT FAILED")
    return [line for line in bare[max(0, at - EXCERPT_LINES // 2) : at + EXCERPT_LINES] if line]


def failure_excerpt(base: Path) -> str:
    """Return the part of a server's output that explains why it did not start, else the ends of its output and logs."""
    console = base / "console.log"
    logs = sorted((base / "log").glob("*.log"), key=lambda path: path.stat().st_mtime)
    ends = [line for path in (console, *logs) for line in _lines(path)[-EXCERPT_LINES:] if line.strip()]
    return "\n".join([*(boot_failure(_lines(console)) or ends), f"(all of it: {console}, {base / 'log'})"])


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def server_config(state: NodeState, plugins: Sequence[str], extra: str) -> str:
    """Return ``rabbitmq.conf``: loopback only, low memory use."""
    lines = [
        f"listeners.tcp.1 = {LOOPBACK}:{state.ports['amqp']}",
        "loopback_users.guest = true",
        "default_vhost = /",
        "vm_memory_high_watermark.relative = 0.4",
        "disk_free_limit.absolute = 50MB",
        # quorum queues keep the content of their write-ahead log in memory, up to three times its size; the default
        # size is 512 MiB
        "raft.wal_max_size_bytes = 67108864",
        "log.file.level = info",
        "log.console = false",
        CONSUMER_TIMEOUT,
    ]
    for plugin in plugins:
        lines += [line.format(host=LOOPBACK, port=state.ports[plugin]) for line in PLUGIN_LISTENERS.get(plugin, ())]
    return "\n".join([*lines, extra, ""])


def server_user(state: NodeState) -> str:
    """Return ``advanced.config`` with the broker's user and password. In ``rabbitmq.conf``, RabbitMQ 4.0 would treat
    text before a colon in a value as a tag.
    """
    values = {"default_user": state.user, "default_pass": state.password}
    terms = [f"{{{name},<<{','.join(map(str, value.encode()))}>>}}" for name, value in values.items()]
    return f"[{{rabbit,[{','.join(terms)}]}}].\n"


def boot_script(*, rabbit_only: bool) -> str:
    """Return Erlang expressions that the server evaluates before RabbitMQ boots. They halve the processor time of the
    boot.

    Erlang searches about a hundred folders in order for each of a thousand modules, and most folders belong to disabled
    plugins. So the expressions put the folders of always loaded applications first. From Erlang 26 on, they also cache
    the folders' contents. RabbitMQ later puts its plugins' folders first again. So with ``rabbit_only`` the plugin
    folder holds only a link to RabbitMQ itself, which contains the schema of its settings.
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
    """Return the environment variables of the server and its tools. All paths are below ``base``, separate from a
    system-wide broker.
    """
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
        # Two schedulers that sleep when idle and are not pinned, to leave the cores to the model.
        "RABBITMQ_SCHEDULER_BIND_TYPE": "u",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1} "
            "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
        ),
        "RABBITMQ_CTL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
        # The start script then execs the server instead of waiting for it, so the child process is the broker itself.
        "RUNNING_UNDER_SYSTEMD": "true",
    }

"""Containers of docker compose and pods of Kubernetes as targets, by their labels."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.cli.chaos.targets.base import NotOursError, Victim
from trinity_mq.cli.errors import CommandError

COMMAND_SECONDS = 60.0
"""Seconds that ``docker`` or ``kubectl`` may take."""
AGENT_ROLES = ("explorer", "runner", "operator", "trainer", "gateway")
PROJECT_LABEL, SERVICE_LABEL = "com.docker.compose.project", "com.docker.compose.service"
SHORT_ID = 12
"""Digits of a container's id in its host name, which is in the ids of its agents."""
COMPONENT_LABEL = "app.kubernetes.io/component"
SELECTORS = ("app.kubernetes.io/part-of=trinity-mq", "app.kubernetes.io/component=rabbitmq")
"""Pods of the agents, and those that RabbitMQ's cluster operator makes."""
COMPONENTS = {**{role: role for role in AGENT_ROLES}, "engines": "engine", "rabbitmq": "broker"}
"""Roles by the component of a pod's label: ``engines`` hosts engines beside the explorer."""
SIGNAL_ALL = """\
signalled=
for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] || ! kill -s "$1" "$pid" 2>/dev/null || signalled=yes
done
[ -n "$signalled" ] || { echo "process 1 of a container, which no signal from inside stops" >&2; exit 1; }
"""
"""A pod's processes but the first, which a kernel lets nobody inside stop."""


async def output_of(*command: str) -> str:
    """Return what a command prints.

    Raises:
        CommandError: There is none, it failed, or took too long; carries what it said.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise CommandError(f"there is no `{command[0]}` command on the path") from error
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            out, errors = await process.communicate()
    except TimeoutError:
        raise CommandError(f"`{' '.join(command[:4])} ...` gave no answer in {COMMAND_SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = " ".join(errors.decode(errors="replace").split())
        raise CommandError(f"`{' '.join(command[:4])} ...`: exit code {process.returncode}: {said}")
    return out.decode(errors="replace")


class ComposeTargets:
    """The containers of one project of docker compose whose services are named as in docker-compose.yml.

    A killed container is started again by us: after ``docker kill`` Docker itself takes it for stopped by a person.

    Args:
        project: The project's name.
    """

    is_local = False

    def __init__(self, project: str) -> None:
        self.where = f"compose project {project}"
        self._project = project
        self._networks: dict[str, dict[str, Any]] = {}
        """By container, the networks that it was taken off."""

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        """By role, the kinds of faults."""
        return dict.fromkeys((*AGENT_ROLES, "broker"), ("kill", "freeze", "cut", "restart"))

    async def find(self, role: str) -> list[Victim]:
        """Return the running containers of a service."""
        rows = await self._listed(role, "--filter", "status=running", "--filter", "status=paused")
        return sorted(
            (Victim(role, name, container, f"{role}-{container[:SHORT_ID]}") for container, name, _ in rows),
            key=lambda victim: victim.name,
        )

    async def strike(self, victim: Victim, kind: str) -> None:
        """Do a fault to a container that is still of the project."""
        await self._verify(victim)
        match kind:
            case "kill":
                await output_of("docker", "kill", victim.identity)
                await output_of("docker", "start", victim.identity)
            case "freeze":
                await output_of("docker", "pause", victim.identity)
            case "restart":
                await output_of("docker", "restart", victim.identity)
            case "cut":
                await self._cut(victim)

    async def relieve(self, victim: Victim, kind: str) -> None:
        """Let a container go on, or put it back on its networks under its names there."""
        if kind == "freeze":
            with contextlib.suppress(CommandError):  # it was killed meanwhile
                await output_of("docker", "unpause", victim.identity)
        left = self._networks.get(victim.identity, {})
        for network, settings in tuple(left.items()):
            aliases = [word for alias in settings.get("Aliases") or () for word in ("--alias", alias)]
            await output_of("docker", "network", "connect", *aliases, network, victim.identity)
            del left[network]

    async def left_over(self) -> list[str] | None:
        """Return the agents' containers that still run."""
        rows = [(role, row) for role in AGENT_ROLES for row in await self._listed(role, "--filter", "status=running")]
        return [f"container {name} ({role}): {status}" for role, (_, name, status) in rows]

    async def _listed(self, role: str, *filters: str) -> list[tuple[str, str, str]]:
        """Return id, name and status of the containers of a service."""
        printed = await output_of(
            "docker", "ps", "--all", "--no-trunc",
            "--filter", f"label={PROJECT_LABEL}={self._project}",
            "--filter", f"label={SERVICE_LABEL}={role}",
            *filters,
            "--format", "{{.ID}}\t{{.Names}}\t{{.Status}}",
        )  # fmt: skip
        lines = (line.split("\t") for line in printed.splitlines() if line.strip())
        return [(container, name, status) for container, name, status in lines]

    async def _inspected(self, victim: Victim) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = json.loads(await output_of("docker", "inspect", victim.identity))
        return found[0]

    async def _verify(self, victim: Victim) -> None:
        try:
            seen = await self._inspected(victim)
        except CommandError as error:
            raise NotOursError(f"container {victim.name} is gone: {error}") from error
        labels = seen["Config"]["Labels"] or {}
        if (labels.get(PROJECT_LABEL), labels.get(SERVICE_LABEL)) != (self._project, victim.role):
            raise NotOursError(f"container {victim.name} is not {victim.role} of {self.where}: nothing was done to it")
        if not seen["State"]["Running"]:
            raise NotOursError(f"container {victim.name} does not run")

    async def _cut(self, victim: Victim) -> None:
        networks = (await self._inspected(victim))["NetworkSettings"]["Networks"]
        taken_off = self._networks[victim.identity] = {}
        for network, settings in networks.items():
            await output_of("docker", "network", "disconnect", network, victim.identity)
            taken_off[network] = settings


class KubernetesTargets:
    """The pods of a namespace whose label ``app.kubernetes.io/component`` is a role, or RabbitMQ's.

    A pod is killed by deleting it without grace, restarted by deleting it with; what it belongs to makes another one.

    Args:
        namespace: The pods' namespace.
        selectors: Label selectors of agents and broker.
    """

    is_local = False

    def __init__(self, namespace: str, selectors: Sequence[str] = SELECTORS) -> None:
        self.where = f"pods of namespace {namespace}"
        self._kubectl = ("kubectl", "--namespace", namespace)
        self._selectors = selectors

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        """By role, the kinds of faults."""
        return dict.fromkeys((*AGENT_ROLES, "engine", "broker"), ("kill", "freeze", "restart"))

    async def find(self, role: str) -> list[Victim]:
        """Return the running pods of a role."""
        pods = [pod for pod in await self._pods() if _role_of(pod) == role and _runs(pod)]
        return sorted((_victim(role, pod) for pod in pods), key=lambda victim: victim.name)

    async def strike(self, victim: Victim, kind: str) -> None:
        """Do a fault to a pod that is still the same one."""
        await self._verify(victim)
        match kind:
            case "kill":
                words = ("--grace-period=0", "--force", "--wait=false")
                await output_of(*self._kubectl, "delete", "pod", victim.name, *words)
            case "restart":
                await output_of(*self._kubectl, "delete", "pod", victim.name, "--wait=false")
            case "freeze":
                await self._signal(victim, "STOP")

    async def relieve(self, victim: Victim, kind: str) -> None:
        """Let a pod go on."""
        if kind == "freeze":
            with contextlib.suppress(NotOursError):  # it was replaced meanwhile
                await self._verify(victim)
                await self._signal(victim, "CONT")

    async def left_over(self) -> list[str] | None:
        """Return the agents' pods that still run."""
        pods = [pod for pod in await self._pods() if _role_of(pod) in (*AGENT_ROLES, "engine") and _runs(pod)]
        return [f"pod {pod['metadata']['name']} ({_role_of(pod)}) still runs" for pod in pods]

    async def _pods(self) -> list[Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for selector in self._selectors:
            printed = await output_of(*self._kubectl, "get", "pods", "--selector", selector, "--output", "json")
            found |= {pod["metadata"]["uid"]: pod for pod in json.loads(printed)["items"]}
        return list(found.values())

    async def _verify(self, victim: Victim) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in await self._pods()}
        pod = pods.get(victim.identity)
        if pod is None or _role_of(pod) != victim.role or not _runs(pod):
            raise NotOursError(f"pod {victim.name} is gone, or is another one by now: nothing was done to it")

    async def _signal(self, victim: Victim, number: str) -> None:
        command = ("exec", victim.name, "--", "sh", "-c", SIGNAL_ALL, "sh", number)
        await output_of(*self._kubectl, *command)


def _role_of(pod: Mapping[str, Any]) -> str | None:
    return COMPONENTS.get((pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))


def _runs(pod: Mapping[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def _victim(role: str, pod: Mapping[str, Any]) -> Victim:
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    return Victim(role, name, uid, f"{role}-{name}")

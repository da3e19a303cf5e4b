"""Containers of docker compose and pods of Kubernetes as targets, selected by their labels."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.targets.base import Victim, VictimGoneError
from trinity_mq.roles import COMMAND_ROLES

COMMAND_SECONDS = 60.0
"""Maximum seconds for a ``docker`` or ``kubectl`` command."""
PROJECT_LABEL, SERVICE_LABEL = "com.docker.compose.project", "com.docker.compose.service"
SHORT_ID = 12
"""Number of leading digits of a container's id that form its host name, and so a part of its agents' ids."""
COMPONENT_LABEL = "app.kubernetes.io/component"
SELECTORS = ("app.kubernetes.io/part-of=trinity-mq", "app.kubernetes.io/component=rabbitmq")
"""Selectors of the agents' pods and of the pods that RabbitMQ's cluster operator creates."""
COMPONENTS = {**{role: role for role in COMMAND_ROLES}, "engines": "engine", "rabbitmq": "broker"}
"""Roles by the component label of a pod. Pods labelled ``engines`` host engines in addition to the explorer's engines.
"""
SIGNAL_ALL = """\
signalled=
for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] || ! kill -s "$1" "$pid" 2>/dev/null || signalled=yes
done
[ -n "$signalled" ] || { echo "process 1 of a container ignores signals from inside the container" >&2; exit 1; }
"""
"""Shell script that signals all processes of a pod except process 1, which the kernel protects against signals from
inside."""


async def output_of(*command: str) -> str:
    """Return the output of a command.

    Raises:
        CommandError: The command does not exist, failed, or took too long; the message contains its error output.
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
        error_text = " ".join(errors.decode(errors="replace").split())
        raise CommandError(f"`{' '.join(command[:4])} ...`: exit code {process.returncode}: {error_text}")
    return out.decode(errors="replace")


class ComposeTargets:
    """Finds the containers of one docker compose project with the service names of docker-compose.yml, and injects
    faults into them.

    A killed container is started again here, because Docker treats ``docker kill`` as a stop by a person.

    Args:
        project: The project's name.
    """

    is_local = False

    def __init__(self, project: str) -> None:
        self.where = f"compose project {project}"
        self._project = project
        self._networks: dict[str, dict[str, Any]] = {}
        """Disconnected networks by container id."""

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        """Possible kinds of faults by role."""
        return dict.fromkeys((*COMMAND_ROLES, "broker"), ("kill", "freeze", "cut", "restart"))

    async def find(self, role: str) -> list[Victim]:
        """Return the running and the paused containers of a service, sorted by name."""
        rows = await self._listed(role, "--filter", "status=running", "--filter", "status=paused")
        return sorted(
            (Victim(role, name, container, f"{role}-{container[:SHORT_ID]}") for container, name, _ in rows),
            key=lambda victim: victim.name,
        )

    async def strike(self, victim: Victim, kind: str) -> None:
        """Inject a fault into a container that still belongs to the project."""
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
        """Resume a frozen container, and reconnect its disconnected networks with its aliases."""
        if kind == "freeze":
            with contextlib.suppress(CommandError):  # the container was killed in the meantime
                await output_of("docker", "unpause", victim.identity)
        networks = self._networks.get(victim.identity, {})
        for network, settings in tuple(networks.items()):
            aliases = [word for alias in settings.get("Aliases") or () for word in ("--alias", alias)]
            await output_of("docker", "network", "connect", *aliases, network, victim.identity)
            del networks[network]

    async def left_over(self) -> list[str] | None:
        """Return the agents' containers that still run."""
        rows = [(role, row) for role in COMMAND_ROLES for row in await self._listed(role, "--filter", "status=running")]
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
        reports: list[Mapping[str, Any]] = json.loads(await output_of("docker", "inspect", victim.identity))
        return reports[0]

    async def _verify(self, victim: Victim) -> None:
        try:
            report = await self._inspected(victim)
        except CommandError as error:
            raise VictimGoneError(f"container {victim.name} is gone: {error}") from error
        labels = report["Config"]["Labels"] or {}
        if (labels.get(PROJECT_LABEL), labels.get(SERVICE_LABEL)) != (self._project, victim.role):
            raise VictimGoneError(
                f"container {victim.name} is not {victim.role} of {self.where}: nothing was done to it"
            )
        if not report["State"]["Running"]:
            raise VictimGoneError(f"container {victim.name} does not run")

    async def _cut(self, victim: Victim) -> None:
        networks = (await self._inspected(victim))["NetworkSettings"]["Networks"]
        taken_off = self._networks[victim.identity] = {}
        for network, settings in networks.items():
            await output_of("docker", "network", "disconnect", network, victim.identity)
            taken_off[network] = settings


class KubernetesTargets:
    """Finds the pods of a namespace whose label ``app.kubernetes.io/component`` is in :data:`COMPONENTS`, and injects
    faults into them.

    A pod is killed by deletion without a grace period, and restarted by deletion with a grace period. Its controller
    creates a new pod.

    Args:
        namespace: The pods' namespace.
    """

    is_local = False

    def __init__(self, namespace: str) -> None:
        self.where = f"pods of namespace {namespace}"
        self._kubectl = ("kubectl", "--namespace", namespace)

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        """Possible kinds of faults by role."""
        return dict.fromkeys((*COMMAND_ROLES, "engine", "broker"), ("kill", "freeze", "restart"))

    async def find(self, role: str) -> list[Victim]:
        """Return the running pods of a role, sorted by name."""
        pods = [pod for pod in await self._pods() if _role_of(pod) == role and _runs(pod)]
        return sorted((_victim(role, pod) for pod in pods), key=lambda victim: victim.name)

    async def strike(self, victim: Victim, kind: str) -> None:
        """Inject a fault into a pod that was not replaced."""
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
        """Resume a pod."""
        if kind == "freeze":
            with contextlib.suppress(VictimGoneError):  # the pod was replaced in the meantime
                await self._verify(victim)
                await self._signal(victim, "CONT")

    async def left_over(self) -> list[str] | None:
        """Return the agents' pods that still run."""
        pods = [pod for pod in await self._pods() if _role_of(pod) in (*COMMAND_ROLES, "engine") and _runs(pod)]
        return [f"pod {pod['metadata']['name']} ({_role_of(pod)}) still runs" for pod in pods]

    async def _pods(self) -> list[Mapping[str, Any]]:
        pods_by_uid: dict[str, Mapping[str, Any]] = {}
        for selector in SELECTORS:
            printed = await output_of(*self._kubectl, "get", "pods", "--selector", selector, "--output", "json")
            pods_by_uid |= {pod["metadata"]["uid"]: pod for pod in json.loads(printed)["items"]}
        return list(pods_by_uid.values())

    async def _verify(self, victim: Victim) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in await self._pods()}
        pod = pods.get(victim.identity)
        if pod is None or _role_of(pod) != victim.role or not _runs(pod):
            raise VictimGoneError(f"pod {victim.name} is gone, or is another one by now: nothing was done to it")

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

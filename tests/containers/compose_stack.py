"""The project's docker-compose.yml brought up for a test: containers killed, the run folder read, all taken away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trinity_mq.telemetry import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]
PREPARE = ROOT / "scripts" / "compose-demo"
CANNOT = 69
"""Exit code of a script that cannot do its work on this machine."""
AGENTS = ("explorer", "runner", "operator", "trainer")
LOOK_AGAIN = 1.0
"""Seconds between looks at what containers write and tell nobody."""
PROJECT = "trinity-mq-test-compose-"
"""Followed by the process id of whose it is."""


def say(text: str) -> None:
    """Add a line to what pytest shows of a test that failed."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class StackError(Exception):
    """A command failed; the message has its output."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


async def output_of(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Return what a command says that runs in a folder, the checkout.

    Raises:
        StackError: It failed.
    """
    pipe, environment = asyncio.subprocess.PIPE, {**os.environ, **(env or {})}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment, cwd=cwd
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        said = (out + errors).decode(errors="replace").strip()
        raise StackError(f"{' '.join(map(str, command))}: exit code {process.returncode}: {said}", process.returncode)
    return out.decode(errors="replace")


async def prepared() -> dict[str, str]:
    """Have engine, compose and images ready; return the environment that names them.

    Raises:
        StackError: They cannot be had here.
    """
    told = await output_of(PREPARE, "--prepare")
    words = [shlex.split(line) for line in told.splitlines()]
    return dict(word[1].split("=", 1) for word in words if len(word) == 2 and word[0] == "export")


class ComposeStack:
    """One project of docker compose, of the images that ``environment`` names.

    Args:
        environment: As :func:`prepared` returns it.
        settings: Over those of the example.
        example: The configuration, of the folder examples/.
    """

    def __init__(self, environment: Mapping[str, str], settings: Sequence[str] = (), example: str = "smoke") -> None:
        configuration = {"TRINITY_MQ_SETTINGS": " ".join(settings), "TRINITY_MQ_CONFIG": f"examples/{example}.yaml"}
        self._env = {**environment, **configuration}
        self._compose = environment["TRINITY_MQ_COMPOSE"].split()
        self.project = f"{PROJECT}{os.getpid()}"
        self._copy = Path(tempfile.mkdtemp(prefix="tmq-compose-"))
        self.run_dir = self._copy / example
        self._run = f"/srv/trinity-mq/runs/{example}"
        """A copy of the run's folder, once :meth:`fetch` has made it."""

    async def __aenter__(self) -> Self:
        """Take away what an earlier test left behind that was killed."""
        every = await self.docker("ps", "--all", "--format", '{{.Label "com.docker.compose.project"}}')
        for name in sorted(set(every.split())):
            owner = re.fullmatch(f"{PROJECT}([0-9]+)", name)
            if owner and not Path("/proc", owner[1]).exists():
                await self._down(name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take everything away; what an unhappy end leaves to say is printed before."""
        if error is not None:
            with contextlib.suppress(StackError):
                say(await self.compose("ps", "--all"))
                say(await self.compose("logs", "--tail", "20", *AGENTS))
        await self._down(self.project)
        shutil.rmtree(self._copy, ignore_errors=True)

    async def _down(self, project: str) -> None:
        words = ("--project-name", project, "down", "--volumes", "--remove-orphans", "--timeout", "5")
        await output_of(*self._compose, *words, env=self._env)

    async def compose(self, *words: str) -> str:
        """Return what ``docker compose`` says about our project."""
        return await output_of(*self._compose, "--project-name", self.project, *words, env=self._env)

    async def docker(self, *words: str) -> str:
        """Return what ``docker`` says."""
        return await output_of("docker", *words, env=self._env)

    async def read(self, service: str, path: str) -> str:
        """Return the text of a file in a service's first container."""
        return await self.docker("exec", (await self.containers(service))[0], "cat", path)

    async def up(self, *services: str, **scale: int) -> None:
        """Start ``services`` (default: all), so many containers of each."""
        words = [word for name, number in scale.items() for word in ("--scale", f"{name}={number}")]
        await self.compose("up", "--detach", "--no-build", *words, *services)

    async def port(self, service: str, inside: int) -> str:
        """Return where a service's port is reached from here: host and port."""
        return (await self.compose("port", service, str(inside))).strip()

    async def containers(self, *services: str) -> list[str]:
        """Return the ids of the containers of services, ended ones too."""
        return (await self.compose("ps", "--all", "--quiet", *services)).split()

    async def healthy(self, service: str) -> list[str]:
        """Return the ids of a service's containers whose agents are at work."""
        states = {one: await self.state(one) for one in await self.containers(service)}
        return [one for one, state in states.items() if state.get("Health", {}).get("Status") == "healthy"]

    async def state(self, container: str) -> dict[str, Any]:
        """Return how a container is: ``Status``, ``ExitCode`` and others."""
        state: dict[str, Any] = json.loads(await self.docker("inspect", container))[0]["State"]
        return state

    async def preempt(self, container: str, notice: int) -> int:
        """End an agent as a node that is taken away does: SIGTERM, and SIGKILL after ``notice`` seconds.

        Its container is removed, so that :meth:`up` starts another one in its place.

        Returns:
            The exit code; 137: it was killed.
        """
        await self.docker("stop", "--time", str(notice), container)
        code = int((await self.state(container))["ExitCode"])
        await self.docker("rm", container)
        return code

    async def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics written so far."""
        explorer = (await self.containers("explorer"))[0]
        try:
            await self.docker("cp", f"{explorer}:{self._run}/{METRICS_FILE}", str(self._copy))
        except StackError as error:
            if "Could not find the file" in str(error) or "No such container:path" in str(error):
                return []  # nothing is written yet
            raise
        return read_metrics(self._copy / METRICS_FILE)

    async def fetch(self) -> Path:
        """Copy the run's folder here and return where it is."""
        explorer = (await self.containers("explorer"))[0]
        await self.docker("cp", f"{explorer}:{self._run}", str(self._copy))
        return self.run_dir

    async def until_progress(self, progress: int, seconds: float) -> None:
        """Return once the trainer has consumed batch ``progress``.

        Raises:
            TimeoutError: It has not within ``seconds``.
        """
        async with asyncio.timeout(seconds):
            while True:
                if any(line.get("trainer/step", 0) >= progress for line in await self.metrics()):
                    return
                await asyncio.sleep(LOOK_AGAIN)

    async def ended(self, seconds: float) -> None:
        """Return once every agent has ended with 0, however often it was started before.

        Raises:
            TimeoutError: One has not within ``seconds``.
        """
        async with asyncio.timeout(seconds):
            for container in await self.containers(*AGENTS):
                while True:
                    await self.docker("wait", container)
                    state = await self.state(container)
                    if state["Status"] == "exited" and state["ExitCode"] == 0:
                        break
                    await asyncio.sleep(LOOK_AGAIN)  # it is about to be started again

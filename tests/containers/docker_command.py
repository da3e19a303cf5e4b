"""The ``docker`` command line: a command with a deadline, and a container that ends with the process that owns it."""

from __future__ import annotations

import asyncio
import subprocess

from trinity_mq.local_broker.node_files import NodeError

COMMAND_TIMEOUT = 60.0
"""Seconds that a command may take which moves no data."""

UNLESS_RELEASED = 'read -r word; [ "$word" = released ] || exec docker rm --force --volumes "$1"'
"""Reads to the end of a pipe that only the owner holds open: however that dies, the container is removed."""


async def docker(*arguments: str, timeout: float | None = COMMAND_TIMEOUT) -> str:
    """Run ``docker`` and return what it prints, without the white space around it.

    Args:
        arguments: The words behind ``docker``.
        timeout: In seconds; None for a command that fetches an image.

    Raises:
        NodeError: There is no such command, it failed, or took too long; carries what it said.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            "docker", *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except FileNotFoundError as error:
        raise NodeError("there is no `docker` command on the path") from error
    try:
        async with asyncio.timeout(timeout):
            printed = (await process.communicate())[0].decode(errors="replace").strip()
    except (asyncio.CancelledError, TimeoutError) as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise NodeError(f"docker {arguments[0]}: the engine gave no answer in {timeout:g} s") from None
        raise
    if process.returncode:
        raise NodeError(f"docker {arguments[0]}: exit code {process.returncode}: {printed}")
    return printed


class Owned:
    """A running container that is watched, and removed when this process ends without having let go of it.

    Args:
        container: Its name or id.
    """

    def __init__(self, container: str) -> None:
        silent = subprocess.DEVNULL
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", UNLESS_RELEASED, "sh", container],
            stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True,
        )  # fmt: skip
        self._watch = subprocess.Popen(["docker", "wait", container], stdin=silent, stdout=silent, stderr=silent)

    @property
    def pid(self) -> int | None:
        """A process of this machine that ends when the container does; None once it has.

        The container's own processes may be those of a virtual machine or a name space, where their ids say nothing.
        """
        return self._watch.pid if self._watch.poll() is None else None

    async def release(self) -> None:
        """Let go of it, once it is removed."""
        await asyncio.to_thread(self._guard.communicate, b"released\n")
        if self._watch.poll() is None:
            self._watch.kill()
        await asyncio.to_thread(self._watch.wait)

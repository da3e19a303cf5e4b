"""First process in a sandbox: sets limits, passes connections on to the gateway, and runs the agent.

The sandbox has no network. The agent connects to the gateway's address on the loopback of the sandbox. Connections are
passed on to the gateway's Unix socket, which is the only way out. This file is run alone, with the standard library.

Its standard input is JSON with ``socket``, ``port``, ``limits`` (by name of the constant in ``resource``), ``command``
and ``env``.
"""

import asyncio
import contextlib
import json
import resource
import sys
from typing import Any

CHUNK_BYTES = 1 << 16
NOT_STARTED = 127
"""Exit code for an agent that cannot be started, as in shells."""


async def main(settings: dict[str, Any]) -> int:
    """Run the agent to its end; return its exit code."""
    socket = settings["socket"]
    server = await asyncio.start_server(lambda *ends: _pass_on(socket, *ends), "127.0.0.1", settings["port"])
    for name, limit in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    try:
        agent = await asyncio.create_subprocess_exec(
            *settings["command"], stdin=asyncio.subprocess.DEVNULL, env=settings["env"]
        )
    except OSError as error:
        sys.stderr.write(f"{settings['command'][0]} cannot be started: {error}\n")
        return NOT_STARTED
    code = await agent.wait()
    server.close()
    return code


async def _pass_on(socket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect an accepted connection to the gateway until either end closes."""
    with contextlib.suppress(OSError):  # a broken connection is closed, which the agent and the gateway notice
        gateway_reader, gateway_writer = await asyncio.open_unix_connection(socket)
        await asyncio.gather(_copy(reader, gateway_writer), _copy(gateway_reader, writer))
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    finally:
        writer.close()


if __name__ == "__main__":
    code = asyncio.run(main(json.load(sys.stdin)))
    sys.exit(code if code >= 0 else 128 - code)  # for an agent that a signal ended, the exit code of shells

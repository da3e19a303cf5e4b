"""A stand-in for a Docker engine: the HTTP requests that a container of ours makes, and a listener in its place."""

from __future__ import annotations

import io
import json
import re
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Listener:
    """Greets as a broker does, until it is closed."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client:
                if client.recv(8):
                    client.sendall(b"\x01")

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class FakeEngine:
    """What the engine holds and what it was asked: at most one container."""

    def __init__(self) -> None:
        self.has_image = True
        self.created: list[dict[str, Any]] = []
        self.volumes: set[str] = set()
        self.stops = 0
        self.files: dict[str, tuple[str, int]] = {}
        """Text and mode of each file that was put into the container."""
        self.removed = threading.Event()
        self._name: str | None = None
        self._listener: Listener | None = None
        self._ended = threading.Event()

    def end(self) -> None:
        """End the container by itself."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._ended.set()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes]:
        for pattern, handler in self._routes().items():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                status, said = handler(query, body, *found.groups())
                return status, said if isinstance(said, bytes) else json.dumps(said).encode()
        raise AssertionError(f"the stand-in knows nothing of {method} {path}")

    def _routes(self) -> dict[str, Callable[..., tuple[int, Any]]]:
        none = 404, {"message": "No such container"}
        image = (200, {"Id": "sha256:1"}) if self.has_image else (404, {"message": "No such image"})
        return {
            r"GET /version": lambda *_: (200, {"ApiVersion": "1.45"}),
            r"GET /images/.+/json": lambda *_: image,
            r"POST /images/create": lambda *_: (200, {"error": "dial tcp: no such host"}),
            r"POST /volumes/create": self._make_volume,
            r"POST /containers/create": self._create,
            r"GET /containers/([^/]+)/json": lambda _query, _body, name: (
                (200, {"Id": name, "Config": {"Tty": True}}) if name == self._name else none
            ),
            r"PUT /containers/[^/]+/archive": self._put,
            r"POST /containers/[^/]+/start": self._start,
            r"POST /containers/[^/]+/wait": self._wait,
            r"POST /containers/[^/]+/stop": self._stop,
            r"DELETE /containers/[^/]+": self._remove,
            r"GET /containers/[^/]+/logs": lambda *_: (200, b"the end of its log\n"),
            r"POST /containers/[^/]+/exec": lambda *_: (201, {"Id": "1"}),
            r"POST /exec/1/start": lambda *_: (200, b"\1\0\0\0\0\0\0\6status"),
            r"GET /exec/1/json": lambda *_: (200, {"ExitCode": 0}),
        }

    def _make_volume(self, _query: object, body: bytes) -> tuple[int, Any]:
        self.volumes.add(json.loads(body)["Name"])
        return 201, json.loads(body)

    def _create(self, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        self._name = query["name"][0]
        self.created.append(json.loads(body))
        self._ended.clear()
        return 201, {"Id": self._name}

    def _put(self, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            for entry in archive:
                file = archive.extractfile(entry)
                assert file is not None
                self.files[f"{query['path'][0]}/{entry.name}"] = file.read().decode(), entry.mode
        return 200, b""

    def _start(self, *_: object) -> tuple[int, Any]:
        (bound,) = self.created[-1]["HostConfig"]["PortBindings"]["5672/tcp"]
        self._listener = Listener(int(bound["HostPort"]))
        return 204, b""

    def _wait(self, *_: object) -> tuple[int, Any]:
        self._ended.wait()
        return 200, {"StatusCode": 0}

    def _stop(self, *_: object) -> tuple[int, Any]:
        self.stops += 1
        self.end()
        return 204, b""

    def _remove(self, *_: object) -> tuple[int, Any]:
        self._name = None
        self.end()
        self.removed.set()
        return 204, b""


def until_read(port: int) -> None:
    """Return once the process with the loopback socket ``port`` has read all that was sent to it.

    The docker package reads a command's output past the buffer into which it reads the headers, so output that comes
    along with them would be lost; a real command takes its time. The kernel tells no sender, so it is asked.
    """
    local = f"0100007F:{port:04X}"
    while True:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if not any(row[1] == local and not row[4].endswith(":00000000") for row in rows):
            return
        time.sleep(0.005)


@contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Serve ``engine`` on loopback, and give the value of DOCKER_HOST for it."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = re.sub(r"^/v[\d.]+(?=/)", "", url.path)
            status, said = engine.answer(self.command, path, parse_qs(url.query), body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if not url.path.endswith("/start"):
                self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            if "/exec/" in url.path:
                until_read(self.client_address[1])
            self.wfile.write(said)

        do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - the names that the base class looks for

        def log_message(self, format: str, *args: object) -> None:
            """Keep what is served out of the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.server_port}"
    finally:
        engine.end()
        server.shutdown()
        server.server_close()
        thread.join()

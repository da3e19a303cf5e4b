"""Child processes that answer requests: silent, stuck in the middle of an answer, deaf to a request."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from trinity_mq.runtime.processes.children import ChildServer, ChildTimeoutError

CHILD = """
import os, sys, time
from multiprocessing.connection import Connection

pipe = Connection(os.dup(0))
pipe.send_bytes(b"ready")
if sys.argv[1] == "deaf":
    time.sleep(600)
request = pipe.recv_bytes()
if sys.argv[1] == "stuck":
    os.write(pipe.fileno(), (100).to_bytes(4, "big") + b"half an answer")
    time.sleep(600)
pipe.send_bytes(request.upper())
time.sleep(600)
"""


@pytest.mark.parametrize(("kind", "request_size"), [("stuck", 10), ("deaf", 10), ("deaf", 10_000_000)])
def test_a_child_that_stops_anywhere_is_killed(tmp_path: Path, kind: str, request_size: int) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    server = ChildServer(tmp_path / "child.py", kind, silence=1.0)
    with pytest.raises(ChildTimeoutError, match="no answer in 1 s"):
        server.ask(b"x" * request_size)
    assert server.pid is None
    commands = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]


def test_what_it_answers_is_returned(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    server = ChildServer(tmp_path / "child.py", "answers", silence=30.0)
    assert server.ask(b"yes") == b"YES"
    server.close()

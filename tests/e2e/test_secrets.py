"""Secrets come from the environment or files, and come out nowhere: logs, metrics, errors, command lines, letters."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import trustme
import yaml

from tests.processes import command, descendants
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.local_broker.ports import LOOPBACK, free_ports
from trinity_mq.testing.runs import LocalRun

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(500),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
PASSWORD = f"pw{secrets.token_hex(12)}"
KEY_PASSWORD = f"kp{secrets.token_hex(12)}"
RUNNERS = f"rn{secrets.token_hex(12)}"
"""A key that workflows are handed by ``runner.env``."""
PLANTED = {"password": PASSWORD, "key password": KEY_PASSWORD, "runner.env": RUNNERS}
HOLDERS = {
    "broker.url": {"password"},
    "config.yaml": {"runner.env"},
    "explorer-0-engine.config.json": {"runner.env"},
    "explorer-0-engine.ready.json": {"engine token"},
}
"""Files of the run folder that must hold a secret: other commands, agents and the engine's host read it there, and
nobody else: mode 0600."""


class Broker:
    """A private node with TLS too, whose password is planted."""

    def __init__(self, folder: Path) -> None:
        ca = trustme.CA()
        self.other_ca = folder / "other-ca.pem"
        trustme.CA().cert_pem.write_to_path(str(self.other_ca))
        ca.cert_pem.write_to_path(str(folder / "ca.pem"))
        ca.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
        self.tls_port = free_ports(1)[0]
        lines = [f"ssl_options.{name} = {folder / 'both.pem'}" for name in ("certfile", "keyfile")]
        lines += [f"ssl_options.cacertfile = {folder / 'ca.pem'}", f"listeners.ssl.1 = {LOOPBACK}:{self.tls_port}"]
        self.node = PrivateNode(folder / "broker", password=PASSWORD, config="\n".join(lines))

    @property
    def place(self) -> str:
        return f"{LOOPBACK}:{urlsplit(self.node.url).port}"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    folder = Path(tempfile.mkdtemp(prefix="tmq-"))
    made = Broker(folder)
    try:
        asyncio.run(made.node.launch())
        yield made
    finally:
        asyncio.run(made.node.kill())
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)
    monkeypatch.setenv("TRINITY_MQ_BROKER_KEY_PASSWORD", KEY_PASSWORD)
    monkeypatch.setenv("TEST_RUNNERS_KEY", RUNNERS)


def shown(text: str, token: str = "") -> list[str]:
    secret = PLANTED | ({"engine token": token} if token else {})
    return [name for name, word in secret.items() if word in text]


def leaks(folder: Path, token: str = "") -> list[str]:
    """Return files below ``folder`` that hold a secret and must not, or hold one open to others."""
    found = []
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        held = set(shown(path.read_bytes().decode(errors="replace"), token))
        if held - HOLDERS.get(path.name, set()):
            found.append(f"{path} holds {held}")
        elif held and stat.S_IMODE(path.stat().st_mode) != 0o600:
            found.append(f"{path} is open to others")
    return found


async def printed(*words: str, **environment: str) -> tuple[int, str]:
    """Run ``trinity-mq`` and return its exit code and all that it prints."""
    code, out, errors = await command(*words, env={**os.environ, **environment})
    return code, out + errors


def configuration(folder: Path, run: str, **broker: object) -> Path:
    """Write the smoke example with secrets in it, as a user would: by the name of a variable."""
    data = yaml.safe_load(SMOKE.read_text())
    data |= {"name": run, "run_dir": str(folder / "run"), "broker": broker, "monitor": {"log_level": "debug"}}
    data["runner"] = {"env": {"JUDGE_KEY": "${env:TEST_RUNNERS_KEY}"}}
    data["buffer"]["total_steps"] = 500
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


async def dead_letters(url: str, topology: Topology) -> list[str]:
    bus = RabbitBus(url, topology, config=BrokerConfig(), name="test")
    await bus.connect()
    try:
        count = await bus.depth(topology.dead.name) or 0
        async with await bus.consume(topology.dead) as feed:
            letters = [await anext(feed) for _ in range(count)]
            return [f"{letter.headers} {letter.body!r}" for letter in letters]
    finally:
        await bus.close()


async def test_a_run_shows_none(
    broker: Broker, topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run at log level debug, looked at while it goes; its connections are cut."""
    config, run = configuration(tmp_path, topology.run), topology.run
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", broker.node.url)
    async with LocalRun(config, tmp_path / "run") as going:
        await going.until_progress(2, 120.0)
        assert going.process is not None
        ready = next((tmp_path / "run" / "engines").glob("*.ready.json"))
        token = json.loads(ready.read_text())["token"]
        family = [psutil.Process(going.process.pid).cmdline(), *(one for _, one in descendants(going.process.pid))]
        lines = [" ".join(words) for words in family]
        assert len(lines) > 4
        assert [line for line in lines if shown(line, token)] == []
        assert leaks(tmp_path / "run", token) == []
        told = await asyncio.gather(
            printed("submit", run, "--task", "not JSON"),
            printed(
                "submit", str(config), "--task", '{"raw_task": {"question": "3,7=", "answer": "7"}, "workflow": "none"}'
            ),
            printed("status", str(config), "--seconds", "2"),
            printed("dead", "list", str(config)),
        )
        await broker.node.ctl("close_all_connections", "maintenance")
        await going.until_progress(max(step for step, _ in going.values("trainer/step")) + 2, 90.0)
        going.process.send_signal(signal.SIGINT)
        code, output = await going.ended(60.0)
        assert code == 130, output
    assert shown(output + "".join(text for _, text in told), token) == []
    assert "lost" in "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.jsonl"))
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0
    assert leaks(tmp_path / "run", token) == []
    letters = await dead_letters(broker.node.url, topology)
    assert [letter for letter in letters if shown(letter, token)] == []


WRONG = {
    "nobody there": ("amqp://tmq:{pw}@{lost}/%2F", "no RabbitMQ at"),
    "wrong password": ("amqp://tmq:{pw}x@{place}/%2F", "wrong user name or password"),
    "wrong virtual host": ("amqp://tmq:{pw}@{place}/nowhere", "does not open virtual host 'nowhere'"),
    "not trusted": ("amqps://tmq:{pw}@localhost:{tls}/%2F", "does not come from a trusted authority"),
    "plain to TLS": ("amqp://tmq:{pw}@localhost:{tls}/%2F", "speaks TLS"),
    "TLS to plain": ("amqps://tmq:{pw}@{place}/%2F", "does not speak TLS"),
    "no number": ("amqp://tmq:{pw}@localhost:port/%2F", "is not a URL"),
    "not encoded": ("amqp://tmq:a/{pw}@localhost:1/%2F", "percent-encoded"),
    "other scheme": ("http://tmq:{pw}@localhost/", "begins with 'http'"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("way", ["run", "status"])
async def test_a_failing_start_shows_none(
    broker: Broker, topology: Topology, tmp_path: Path, what: str, way: str
) -> None:
    form, said = WRONG[what]
    url = form.format(pw=PASSWORD, place=broker.place, tls=broker.tls_port, lost=f"{LOOPBACK}:{free_ports(1)[0]}")
    config = configuration(tmp_path, topology.run, connect_timeout=2.0)
    words = ("run", str(config)) if way == "run" else ("status", str(config), "--seconds", "0.1")
    code, output = await printed(*words, TRINITY_MQ_BROKER_URL=url)
    assert code not in {0, -signal.SIGKILL}
    assert said in output
    assert "Traceback" not in output
    assert shown(output) == []
    assert leaks(tmp_path) == []


async def test_files_that_hold_secrets_are_named_and_not_quoted(
    broker: Broker, topology: Topology, tmp_path: Path
) -> None:
    """A password from a file is in no file of the run folder at all."""
    (tmp_path / "secret").mkdir(mode=0o700)
    password, own = tmp_path / "secret" / "broker.url", tmp_path / "secret" / "own.pem"
    password.write_text(PASSWORD)
    password.chmod(0o600)
    own.write_text(f"-----BEGIN {KEY_PASSWORD}")
    url = f"amqps://tmq@localhost:{broker.tls_port}/%2F"
    config = configuration(
        tmp_path, topology.run, url=url, password_file=str(password), tls={"cert_file": str(own)}, connect_timeout=2.0
    )
    code, output = await printed("run", str(config))
    assert code != 0
    assert re.search(r"broker\.tls\.cert_file.*own\.pem.*wanted PEM", output)
    assert shown(output) == []
    own.unlink()
    assert leaks(tmp_path) == []

"""scripts/docker-engine in a network of the test's own: what the machine had before is what it has afterwards. Also the
messages of the scripts that prepare containers for tests.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.postgresql import SHARED

SCRIPT = Path(__file__).parents[2] / "scripts" / "docker-engine"
PREPARE = Path(__file__).parent / "prepare"
BUILD = PREPARE.with_name("build-images")
NEEDED = ("dockerd", "docker", "iptables", "nft", "ip", "unshare", "nsenter")
SETTINGS = ("ip_forward", "conf/all/forwarding", "conf/all/accept_redirects")
PLACES = ("/run/docker", "/run/containerd", "/opt/containerd", "/etc/docker/key.json")

pytestmark = pytest.mark.timeout(180)
can_run = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in NEEDED),
    reason=f"needs root and {', '.join(NEEDED)}",
)


class Machine:
    """A network name space with nothing but its own loopback: engines in there meet no other engine's rules."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"
        self.folder = Path(tempfile.mkdtemp(prefix="tmq-"))  # a socket's path has to be short

    def run(self, *words: object, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("DOCKER", "TRINITY"))}
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", *map(str, words)],
            env=environment | settings, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done

    def engine(self, verb: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        return self.run(SCRIPT, verb, self.folder / "e", check=check, **settings)

    def docker(self, *words: str) -> str:
        return self.run("docker", *words, DOCKER_HOST=f"unix://{self.folder}/e/docker.sock").stdout.strip()

    def state(self) -> list[str]:
        asked = (
            ("nft", "list", "ruleset"), ("iptables-save", "-t", "filter"), ("ip", "-o", "address"), ("ip", "route"),
            ("head", *(f"/proc/sys/net/ipv4/{name}" for name in SETTINGS)),
        )  # fmt: skip
        said = [re.sub(r"(?m)packets \d+ bytes \d+|\[\d+:\d+\]|^#.*", "", self.run(*words).stdout) for words in asked]
        said += [place for place in PLACES if os.path.exists(place)]
        mounts = Path("/proc/mounts").read_text().splitlines()
        living = psutil.process_iter(["cmdline", "status"])
        processes = [
            " ".join(one.info["cmdline"] or []) for one in living if one.info["status"] != psutil.STATUS_ZOMBIE
        ]
        return [*said, *(line for line in (*mounts, *processes) if str(self.folder) in line)]

    def use(self) -> None:
        """An image, two containers with published ports, a network and a volume: all that leaves traces."""
        root = self.folder / "root"
        listed = subprocess.run(["ldd", "/bin/sleep"], capture_output=True, text=True, check=True).stdout
        for name in ("/bin/sleep", *re.findall(r"/\S+", listed)):
            place = root / name.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, place)
        packed = shutil.make_archive(str(self.folder / "image"), "tar", root)
        self.docker("import", packed, "tmq-test-sleep")
        self.docker("network", "create", "tmq-test")
        options = ("--detach", "--publish=127.0.0.1::7777", "--volume=tmq-test:/data")
        self.docker("run", *options, "tmq-test-sleep", "/bin/sleep", "600")
        self.docker("run", *options, "--network=tmq-test", "tmq-test-sleep", "/bin/sleep", "600")
        assert len(self.docker("ps", "--quiet").split()) == 2

    def close(self) -> None:
        if (self.folder / "e" / "before").exists():
            self.engine("stop")
        self._holder.communicate("", timeout=10)
        shutil.rmtree(self.folder)


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


@pytest.mark.extended
@can_run
@pytest.mark.parametrize("killed", [False, True])
def test_stop_puts_back_what_was_there(machine: Machine, killed: bool) -> None:
    """Of an engine that was killed too; images stay."""
    machine.run("iptables", "-A", "INPUT", "-s", "192.0.2.9", "-j", "DROP")
    before = machine.state()
    told = machine.engine("start")
    assert told.stdout == f"export DOCKER_HOST=unix://{machine.folder}/e/docker.sock\n"
    assert machine.engine("start").stdout == told.stdout
    assert machine.engine("status").stdout == told.stdout
    machine.use()
    assert machine.state() != before
    if killed:
        os.kill(int((machine.folder / "e" / "pid").read_text().split()[0]), signal.SIGKILL)
    else:
        machine.engine("stop")
        assert machine.state() == before
        assert machine.engine("status", check=False).returncode == 1
    machine.engine("start")
    assert machine.docker("image", "ls", "--quiet", "tmq-test-sleep")
    assert not machine.docker("ps", "--all", "--quiet")
    assert killed or not machine.docker("volume", "ls", "--quiet")
    machine.engine("stop")
    assert machine.state() == before


@pytest.mark.extended
@can_run
def test_an_engine_that_answers_is_used_and_left_alone(machine: Machine) -> None:
    host = machine.engine("start").stdout.strip().partition("=")[2]
    second = machine.folder / "second"
    assert machine.run(SCRIPT, "start", second, DOCKER_HOST=host).stdout == f"export DOCKER_HOST={host}\n"
    assert machine.run(SCRIPT, "ours", second, check=False, DOCKER_HOST=host).returncode == 1
    assert machine.engine("ours").returncode == 0
    machine.run(SCRIPT, "stop", second, DOCKER_HOST=host)
    assert machine.docker("version")
    refused = machine.run(SCRIPT, "start", second, check=False)
    assert (refused.returncode, refused.stdout) == (69, "")
    assert "docker0" in refused.stderr


@pytest.fixture
def public() -> Iterator[Path]:
    """A copy of the script that every user can read and run: the checkout may be its owner's alone."""
    folder = Path(tempfile.mkdtemp(prefix="tmq-", dir=SHARED))
    folder.chmod(0o755)
    for path in (SCRIPT, SCRIPT.with_name("_failures.sh")):
        shutil.copyfile(path, folder / path.name)
        (folder / path.name).chmod(0o755)
    yield folder / SCRIPT.name
    shutil.rmtree(folder)


def test_where_it_cannot_run_it_says_why(public: Path) -> None:
    """As nobody, without a Docker of its own: an exit code of its own, and one line."""
    program = "import os, sys; os.geteuid() or os.setuid(65534); os.execv(sys.argv[1], sys.argv[1:])"
    environment = {"PATH": os.environ["PATH"], "DOCKER_HOST": "unix:///nowhere.sock"}
    done = subprocess.run(
        [sys.executable, "-c", program, public, "start", "/tmp/nowhere"],
        env=environment, cwd=public.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr == "no Docker engine: not root: start Docker yourself and set DOCKER_HOST\n"


def test_wrong_words_are_told_and_nothing_is_prepared_where_no_docker_is_wanted() -> None:
    done = subprocess.run([SCRIPT, "restart"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "scripts/docker-engine start" in done.stderr
    settings = os.environ | {"TRINITY_MQ_TEST_BROKER": "node", "TRINITY_MQ_TEST_BROKER_URL": ""}
    done = subprocess.run([PREPARE], capture_output=True, text=True, check=False, env=settings)
    said = "no Docker wanted: TRINITY_MQ_TEST_BROKER=node\n"
    assert (done.returncode, done.stdout, done.stderr) == (69, "", said)


def test_wrong_names_and_no_engine_are_told(tmp_path: Path) -> None:
    settings = os.environ | {"DOCKER_HOST": "unix:///nowhere.sock", "TRINITY_MQ_DOCKER_FOLDER": str(tmp_path)}

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run([BUILD, *words], capture_output=True, text=True, check=False, env=settings)
        return done.returncode, done.stderr.splitlines()[-1]

    assert said("--only", "rabbitmq:5") == (
        2,
        "no image is called rabbitmq:5: one of python:3.11-slim rabbitmq:3.10 rabbitmq:4.0",
    )
    code, why = said()
    assert code == 69
    assert "no Docker engine answers" in why

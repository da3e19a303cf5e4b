"""The systemd units as they are shipped: systemd reads them without a word, and they fit what the agents do."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from trinity_mq.cli import main as cli
from trinity_mq.config.agents import RunnerConfig
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.roles import COMMAND_ROLES
from trinity_mq.runtime.errors import EXIT_FATAL, EXIT_RECYCLE, EXIT_RESTART
from trinity_mq.runtime.serve import EXTENSION, INTERVAL

UNITS = Path(__file__).parents[3] / "deploy" / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
SYSTEM = Path("/lib/systemd/system")
EXPOSED_AT_MOST = 20
"""Of 100, by ``systemd-analyze security``; a unit without any of it has 96."""
DRAIN_MARGIN = 15.0
SECONDS = {"s": 1, "min": 60}

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with the units, and what they start, installed as their README says."""
    installed = tmp_path / "etc" / "systemd" / "system"
    shutil.copytree(UNITS, installed)
    base = tmp_path / "usr" / "lib" / "systemd" / "system"
    base.mkdir(parents=True)
    for target in SYSTEM.glob("*.target"):
        shutil.copy(target, base)
    program = tmp_path / "opt" / "trinity-mq" / "bin" / "trinity-mq"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def analyze(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", f"--root={root}", "--no-pager", *arguments], capture_output=True, text=True, check=False
    )


def an_instance(root: Path, name: str) -> str:
    """Make an instance of a template, as starting it does."""
    instance = name.replace("@.", "@smoke.")
    folder = root / "etc" / "systemd" / "system"
    if instance != name and not (folder / instance).is_symlink():
        (folder / instance).symlink_to(name)
    return instance


def settings(*names: str) -> dict[str, list[str]]:
    """All values of each key of unit files, in order."""
    found = defaultdict(list)
    for name in names:
        for line in (UNITS / name).read_text().splitlines():
            key, is_setting, value = line.partition("=")
            if is_setting and not line.startswith("#"):
                found[key].append(value)
    return found


COMMON = settings("trinity-mq-.service.d/10-common.conf")


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|min)", text)
    assert match is not None, text
    return int(match[1]) * SECONDS[match[2]]


@needs_systemd
@pytest.mark.parametrize("name", [*SERVICES, "trinity-mq@.target", "trinity-mq.target"])
def test_systemd_has_nothing_to_say(root: Path, name: str) -> None:
    done = analyze(root, "verify", "--man=no", an_instance(root, name))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    common = root / "etc" / "systemd" / "system" / "trinity-mq-.service.d" / "10-common.conf"
    common.write_text(common.read_text() + "RestartPreventExitCode=78\n")  # it would say what is wrong
    done = analyze(root, "verify", "--man=no", an_instance(root, "trinity-mq-runner@.service"))
    assert "RestartPreventExitCode" in done.stderr


@needs_systemd
@pytest.mark.parametrize("name", SERVICES)
def test_agents_are_shut_in(root: Path, name: str) -> None:
    instance = an_instance(root, name)
    done = analyze(root, "security", "--offline=true", f"--threshold={EXPOSED_AT_MOST}", instance)
    assert done.returncode == 0, done.stdout + done.stderr
    # without the common part it would not be
    shutil.rmtree(root / "etc" / "systemd" / "system" / "trinity-mq-.service.d")
    assert analyze(root, "security", "--offline=true", f"--threshold={EXPOSED_AT_MOST}", instance).returncode != 0


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd is not installed here")
def test_the_user_is_made(tmp_path: Path) -> None:
    (tmp_path / "etc" / "sysusers.d").mkdir(parents=True)
    shutil.copy(UNITS / "trinity-mq.sysusers", tmp_path / "etc" / "sysusers.d" / "trinity-mq.conf")
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}"], check=True, capture_output=True)
    (line,) = re.findall("(?m)^trinity-mq:.*$", (tmp_path / "etc" / "passwd").read_text())
    assert line.split(":")[5:] == ["/var/lib/trinity-mq", "/usr/sbin/nologin"]
    assert COMMON["User"] == ["trinity-mq"]


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_started_is_a_command_of_ours(name: str) -> None:
    unit = settings(name)
    (command,) = unit["ExecStart"]
    words = shlex.split(command.replace("%i", "smoke-2"))
    assert words[0] == "/opt/trinity-mq/bin/trinity-mq"
    given = cli.argument_parser().parse_args(words[1:])
    assert given.target == "/etc/trinity-mq/smoke-2/run.yaml"
    role = re.fullmatch(r"trinity-mq-(\w+)@\.service", name)
    assert role is not None
    assert given.command == ("explorer" if role[1] == "engines" else role[1])
    assert getattr(given, "engines_only", False) == (role[1] == "engines")
    # those of which there are many need names of their own, on every machine
    assert (given.id is None) == (role[1] in {"explorer", "trainer"})
    assert given.id is None or {"{host}", "smoke-2"} <= set(re.findall(r"\{host\}|smoke-2", given.id))
    assert unit["PartOf"] == ["trinity-mq@%i.target trinity-mq.target"]


def test_the_target_of_a_run_starts_one_agent_of_each_role() -> None:
    (wanted,) = settings("trinity-mq@.target")["Wants"]
    names = {name.replace("%i", "") for name in wanted.split()}
    assert names == set(SERVICES) - {"trinity-mq-engines@.service", "trinity-mq-gateway@.service"}
    roles = {name.removeprefix("trinity-mq-").removesuffix("@.service") for name in names}
    assert roles == set(COMMAND_ROLES) - {"gateway"}, "which only mode serve has"


def test_exit_codes_mean_what_the_agents_mean() -> None:
    assert COMMON["Restart"] == ["on-failure"]
    assert COMMON["RestartPreventExitStatus"] == [str(EXIT_FATAL)]
    assert COMMON["RestartForceExitStatus"] == COMMON["SuccessExitStatus"] == [str(EXIT_RECYCLE)]
    assert str(EXIT_RESTART) not in {*COMMON["RestartPreventExitStatus"], *COMMON["SuccessExitStatus"]}
    assert COMMON["LoadCredential"] == ["broker-url:/etc/trinity-mq/%i/broker-url"], "its password is a credential"
    assert "TRINITY_MQ_BROKER_URL_FILE=%d/broker-url" in COMMON["Environment"]


def test_times_leave_room_for_what_the_agents_do() -> None:
    window, starts = seconds(COMMON["StartLimitIntervalSec"][0]), int(COMMON["StartLimitBurst"][0])
    pause = seconds(COMMON["RestartSec"][0])
    assert window / (BrokerConfig().connect_timeout + pause) < starts / 2, "an outage never uses up the start limit"
    a_start = 5.0  # imports, and the first look at what is wrong
    assert window / (a_start + pause) > starts, "a crash at start does"
    assert seconds(COMMON["WatchdogSec"][0]) >= 10 * INTERVAL
    assert seconds(COMMON["TimeoutStopSec"][0]) > RunnerConfig().drain_timeout + DRAIN_MARGIN
    assert min(seconds(COMMON[key][0]) for key in ("TimeoutStartSec", "TimeoutStopSec")) > EXTENSION
    assert (COMMON["KillMode"], COMMON["KillSignal"]) == (["mixed"], ["SIGTERM"])

"""Commands that fail show no secret. ``broker/test_whole_run.py`` holds this for a run that works."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from yarl import URL

from trinity_mq.cli.main import main
from trinity_mq.local_broker.ports import LOOPBACK, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.broker, pytest.mark.timeout(500)]

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
KEY_PASSWORD, RUNNERS = f"kp{secrets.token_hex(12)}", f"rn{secrets.token_hex(12)}"
WRONG = {
    "nobody there": ("amqp://tmq:{pw}@{lost}/%2F", "no RabbitMQ at"),
    "wrong password": ("amqp://{user}:{pw}x@{place}/%2F", "wrong user name or password"),
    "not encoded": ("amqp://tmq:a/{pw}@localhost:1/%2F", "percent-encoded"),
    "wrong virtual host": ("amqp://{user}:{pw}@{place}/nowhere", "does not open virtual host 'nowhere'"),
    "no number": ("amqp://tmq:{pw}@localhost:port/%2F", "is not a URL"),
    "other scheme": ("http://tmq:{pw}@localhost/", "begins with 'http'"),
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_MQ_BROKER_KEY_PASSWORD", KEY_PASSWORD)
    monkeypatch.setenv("TEST_RUNNERS_KEY", RUNNERS)


def check_nothing_is_shown(output: str, folder: Path, password: str) -> None:
    """Check that no secret is in an output or in a file below ``folder``, but the runners' key in the configuration."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = {"output": output} | {str(path.relative_to(folder)): path.read_text() for path in files}
    planted = {"password": password, "key password": KEY_PASSWORD, "runner.env": RUNNERS}
    shown = {(name, secret) for name, text in texts.items() for secret, word in planted.items() if word in text}
    assert shown <= {("run/config.yaml", "runner.env")}


def configuration(folder: Path, **broker: object) -> Path:
    """Write the smoke example with a secret in it, as a user would: by the name of a variable."""
    data = yaml.safe_load(SMOKE.read_text())
    data |= {"run_dir": str(folder / "run"), "broker": {"connect_timeout": 2.0, **broker}}
    data["runner"] = {"env": {"JUDGE_KEY": "${env:TEST_RUNNERS_KEY}"}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def run(config: Path) -> tuple[int, str]:
    """Start a run that ends at once; return its exit code and all that it prints."""
    words = [sys.executable, "-m", "trinity_mq.cli.main", "run", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("way", "what"), [*(("status", what) for what in WRONG), *(("run", what) for what in list(WRONG)[:3])]
)
def test_a_command_that_fails_shows_none(
    broker_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: str,
    what: str,
) -> None:
    form, reason = WRONG[what]
    broker = URL(broker_url)
    parts = {"place": f"{broker.host}:{broker.port}", "lost": f"{LOOPBACK}:{free_ports(1)[0]}"}
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", form.format(user=broker.user, pw=broker.password, **parts))
    config = configuration(tmp_path)
    if way == "run":
        code, output = run(config)
    else:
        code, output = main(["status", str(config), "--seconds", "0.1"]), "".join(capsys.readouterr())
    assert code > 0
    assert reason in output
    assert "Traceback" not in output
    check_nothing_is_shown(output, tmp_path, str(broker.password))


def test_files_that_hold_secrets_are_named_and_not_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password from a file is in no file of the run folder at all."""
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)
    (tmp_path / "secret").mkdir(mode=0o700)
    password, own = tmp_path / "secret" / "broker.url", tmp_path / "secret" / "own.pem"
    password.write_text("pw-of-a-file")
    password.chmod(0o600)
    own.write_text(f"-----BEGIN {KEY_PASSWORD}")
    url = "amqps://tmq@localhost:1/%2F"
    code, output = run(configuration(tmp_path, url=url, password_file=str(password), tls={"cert_file": str(own)}))
    assert code != 0
    assert re.search(r"broker\.tls\.cert_file.*own\.pem.*wanted PEM", output)
    own.unlink()
    password.unlink()
    check_nothing_is_shown(output, tmp_path, "pw-of-a-file")

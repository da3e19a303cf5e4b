"""From a configuration and TLS files to a bus, or to an error that says what to write."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from trinity_mq.bus import AddressError, Topology, broker_url, create_bus
from trinity_mq.bus.addresses import Addresses, address, check_url, each, in_turn
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.tls import KEY_PASSWORD_VARIABLE, tls_context, tls_problem
from trinity_mq.config.bus import BrokerConfig, TlsConfig

TOPOLOGY = Topology("unit")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "URL_FILE", "PASSWORD_FILE"):
        monkeypatch.delenv(f"TRINITY_MQ_BROKER_{name}", raising=False)


async def test_makes_a_bus_with_the_configured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://user:secret@host:1234/%2F")
    bus = create_bus(BrokerConfig(max_message_bytes=100_000), TOPOLOGY, "test")
    assert isinstance(bus, RabbitBus)
    assert bus.max_message_bytes == 100_000
    assert not bus.usable
    assert bus.trouble == "not connected yet: call connect() first"
    await bus.close()


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://user:secret@host", "begins with 'http'"),
        ("user:secret@host:5672", "wanted amqp or amqps"),
        ("amqp://user:secret@:5672", "names no host"),
        ("amqp://user:secret@host:port", "is not a URL"),
        ("amqp://user:secret@host:99999", "is not a URL"),
        ("amqp://user:secret/word@host:5672", "a password's @ : / # must be percent-encoded"),
        ("amqp://user:12345/secret@host", "a password's @ : / # must be percent-encoded"),
        ("amqp://ok/, amqp://user:secret@:5672", "names no host"),
        ("amqps://user:secret@host/?no_verify_ssl=1", r"sets no_verify_ssl: TLS is set in broker\.tls"),
        ("", "no broker: set"),
        (None, r"set broker\.url or TRINITY_MQ_BROKER_URL to amqp://user:password@"),
    ],
)
def test_a_wrong_address_is_explained_without_its_password(url: str | None, wrong: str) -> None:
    with pytest.raises(AddressError, match=wrong) as error:
        create_bus(BrokerConfig(url=url), TOPOLOGY, "test")
    assert "secret" not in str(error.value)


def test_the_order_is_setting_file_variable_variables_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broker_url(BrokerConfig()) is None
    (tmp_path / "env").write_text("amqp://env-file/\n")
    (tmp_path / "set").write_text("amqp://set-file/\n")
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL_FILE", str(tmp_path / "env"))
    assert broker_url(BrokerConfig()) == "amqp://env-file/"
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://env/")
    assert broker_url(BrokerConfig()) == "amqp://env/"
    assert broker_url(BrokerConfig(url_file=str(tmp_path / "set"))) == "amqp://set-file/"
    assert broker_url(BrokerConfig(url="amqp://set/")) == "amqp://set/"


def test_a_password_comes_from_a_file_that_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes, whatever it holds, into the URLs that have none."""
    file = tmp_path / "password"
    file.write_text("a@b/c:d\n")
    monkeypatch.setenv("TRINITY_MQ_BROKER_PASSWORD_FILE", str(file))
    found = Addresses.of(BrokerConfig(url="amqp://u@h/v, amqp://u:own@i/v,amqp://j:1/"))
    assert found is not None
    assert found.read() == ("amqp://u:a%40b%2Fc%3Ad@h/v", "amqp://u:own@i/v", "amqp://guest:a%40b%2Fc%3Ad@j:1/")
    file.write_text("new")
    assert found.read()[0] == "amqp://u:new@h/v"
    assert "new" not in found.text()


@pytest.mark.parametrize("setting", ["url_file", "password_file"])
@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), ("\n", "is empty"), (b"\xff\xfe", "not text")])
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, setting: str, content: str | bytes | None, said: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    fields = {"url": "amqp://u@h/"} if setting == "password_file" else {}
    with pytest.raises(AddressError, match=said) as error:
        create_bus(BrokerConfig.model_validate(fields | {setting: str(file)}), TOPOLOGY, "test")
    assert str(file) in str(error.value)


def test_several_nodes_are_a_list_or_a_text() -> None:
    several = BrokerConfig.model_validate({"url": ["amqp://u:p@a/v", "amqp://u:p@b:1/v"]})
    assert several.url == "amqp://u:p@a/v,amqp://u:p@b:1/v"
    urls = ("amqp://a/", "amqp://b/", "amqp://c/")
    assert each("amqp://a/ amqp://b/\namqp://c/") == each("amqp://a/,amqp://b/, amqp://c/") == urls
    assert {in_turn(urls)[0] for _ in range(200)} == set(urls), "each is the first one at times"
    check_url(several.url)
    assert address(several.url) == "a:5672 or b:1"


def test_naming_things_needs_no_amqp_client() -> None:
    program = "import sys, trinity_mq.bus; print({'aio_pika', 'aiormq', 'torch', 'yaml'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


SECRET = "a key's password"
LOCKED = {"cert_file": "cert.pem", "key_file": "locked.pem"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued, other = ca.issue_cert("agent.example"), ca.issue_cert("other.example")
    ca.cert_pem.write_to_path(str(made / "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(str(made / "cert.pem"))
    issued.private_key_pem.write_to_path(str(made / "key.pem"))
    issued.private_key_and_cert_chain_pem.write_to_path(str(made / "both.pem"))
    other.private_key_pem.write_to_path(str(made / "other.pem"))
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(SECRET.encode()))
    (made / "locked.pem").write_bytes(locked)
    (made / "password").write_text(f"{SECRET}\n")
    (made / "wrong").write_text("another")
    (made / "empty").write_text("")
    return made


def config(folder: Path, **files: str) -> TlsConfig:
    return TlsConfig.model_validate({name: str(folder / file) for name, file in files.items()})


async def test_the_default_verifies_and_a_ca_file_replaces_what_the_system_trusts(folder: Path) -> None:
    contexts = [await tls_context(given) for given in (None, TlsConfig(), config(folder, ca_file="ca.pem"))]
    for context in contexts:
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
    assert contexts[-1].minimum_version == ssl.TLSVersion.TLSv1_2
    assert len(contexts[-1].get_ca_certs()) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"cert_file": "cert.pem", "key_file": "key.pem"},
        {"cert_file": "both.pem"},
        {"cert_file": "cert.pem", "key_file": "locked.pem", "key_password_file": "password"},
    ],
)
async def test_ways_to_give_a_certificate(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    await tls_context(config(folder, **files))
    monkeypatch.setenv(KEY_PASSWORD_VARIABLE, SECRET)
    await tls_context(config(folder, cert_file="cert.pem", key_file="locked.pem"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"ca_file": "gone.pem"}, "ca_file.*gone.pem: no such file"),
        ({"ca_file": "key.pem"}, "ca_file.*key.pem: .*wanted PEM with a CA certificate"),
        ({"cert_file": "gone.pem"}, "cert_file.*gone.pem: no such file"),
        ({"cert_file": "cert.pem", "key_file": "other.pem"}, "other.pem: key values mismatch"),
        ({"cert_file": "cert.pem"}, "cert.pem: .*wanted PEM with a certificate and its key"),
        (LOCKED, "encrypted and its password is not given"),
        ({**LOCKED, "key_password_file": "wrong"}, "is the key's password.*right"),
        ({**LOCKED, "key_password_file": "empty"}, "password is not given"),
        ({**LOCKED, "key_password_file": "gone"}, "gone cannot be read"),
    ],
)
async def test_what_cannot_be_used_is_named(
    folder: Path, files: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_PASSWORD_VARIABLE, raising=False)
    with pytest.raises(AddressError, match=said) as error:
        await tls_context(config(folder, **files))
    assert "\n" not in str(error.value)
    assert SECRET not in str(error.value)


def test_an_error_raised_from_itself_is_no_loop() -> None:
    error = OSError("reset")
    error.__cause__ = error
    assert tls_problem(error, "h:1", "h", None) is None

"""Files that TLS is set up from, where one of them cannot be used."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from trinity_mq.bus import AddressError
from trinity_mq.bus.tls import KEY_PASSWORD_VARIABLE, tls_context, tls_problem
from trinity_mq.config.bus import TlsConfig

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

"""TLS to the broker: the TLS context of a connection, and readable error messages."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from trinity_mq.bus.addresses import AddressError

if TYPE_CHECKING:
    from trinity_mq.config.bus import TlsConfig

KEY_PASSWORD_VARIABLE = "TRINITY_MQ_BROKER_KEY_PASSWORD"

_ALERT = b"\x15\x03"
"""First bytes that a TLS listener answers to a plaintext connection."""
_WANTS_CERTIFICATE = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")

log = structlog.get_logger(__name__)


async def tls_context(config: TlsConfig | None) -> ssl.SSLContext:
    """Return a TLS context from the current content of the files.

    Raises:
        AddressError: A file cannot be used.
    """
    return await asyncio.to_thread(_context, config)


def _context(config: TlsConfig | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if config is None:
        return context
    if not config.verify:
        log.warning(
            "broker_not_verified",
            reason="broker.tls.verify is false: anybody on the network path can read and change everything, "
            "including passwords; set broker.tls.ca_file instead",
        )
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif config.ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # a fresh context trusts no authority and checks host names
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(config.ca_file)
        except (OSError, ValueError) as error:
            raise AddressError(_unusable("broker.tls.ca_file", config.ca_file, error, "a CA certificate")) from None
    if config.cert_file:
        _load_own(context, config, config.cert_file)
    return context


def _load_own(context: ssl.SSLContext, config: TlsConfig, cert_file: str) -> None:
    password_used = False

    def password() -> bytes:
        nonlocal password_used
        password_used = True
        return _key_password(config.key_password_file)

    try:
        context.load_cert_chain(cert_file, config.key_file, password)
    except (OSError, ValueError) as error:
        files = cert_file if config.key_file is None else f"{cert_file} and {config.key_file}"
        expected = "a certificate and its key"
        if password_used:
            expected += f"; is the key's password in broker.tls.key_password_file or {KEY_PASSWORD_VARIABLE} right?"
        raise AddressError(_unusable("broker.tls.cert_file and key_file", files, error, expected)) from None


def _key_password(path: str | None) -> bytes:
    if path is None:
        password = os.environ.get(KEY_PASSWORD_VARIABLE, "").encode()
    else:
        try:
            password = Path(path).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise AddressError(f"broker.tls.key_password_file {path} cannot be read: {error.strerror}") from None
    if not password:
        raise AddressError(
            "the key of broker.tls is encrypted and its password is not given: set broker.tls.key_password_file or "
            f"{KEY_PASSWORD_VARIABLE}"
        )
    return password


def _unusable(setting: str, files: str, error: Exception, expected: str) -> str:
    reason = (getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or "unusable").strip()
    return f"{setting}: {files}: {reason.replace('_', ' ').lower()}; wanted PEM with {expected}"


def tls_problem(error: BaseException | None, where: str, server: str, config: TlsConfig | None) -> str | None:
    """Return the cause and remedy of a TLS error that a retry does not solve. Return None for any other error."""
    visited: set[int] = set()  # the client raises some errors from themselves, which would loop forever
    while error is not None and not isinstance(error, ssl.SSLError) and id(error) not in visited:
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    if not isinstance(error, ssl.SSLError):
        return None
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _not_verified(error, where, server, config)
    if any(word in reason for word in _NO_TLS):
        return (
            f"the server at {where} does not speak TLS, but broker.url begins with amqps: give the port for TLS "
            "(usually 5671), or write amqp:// for a broker without TLS"
        )
    if "ALERT" in reason or "CERTIFICATE" in reason:
        alert = reason.replace("_", " ").lower()
        if config is not None and config.cert_file:
            return (
                f"the broker at {where} does not accept the certificate {config.cert_file} ({alert}): it must come "
                "from an authority in the broker's ssl_options.cacertfile and be valid now"
            )
        if any(word in reason for word in _WANTS_CERTIFICATE):
            return (
                f"the broker at {where} requires a client certificate ({alert}): set broker.tls.cert_file and "
                "broker.tls.key_file"
            )
        return f"the broker at {where} refuses the TLS connection ({alert}); its log says why"
    return None


def _not_verified(error: ssl.SSLCertVerificationError, where: str, server: str, config: TlsConfig | None) -> str:
    verify_message = error.verify_message or error.reason or "not verified"
    if "ismatch" in verify_message:
        return (
            f"the certificate of the broker at {where} is for another name than {server!r} ({verify_message}): write "
            "the name that it holds into broker.url, or into broker.tls.server_name"
        )
    if "expired" in verify_message or "not yet valid" in verify_message:
        return (
            f"the certificate of the broker at {where}: {verify_message}. Renew it at the broker (or set this "
            "machine's clock); it is not accepted as it is"
        )
    ca_file = config.ca_file if config is not None else None
    trusted = f"the authorities in {ca_file}" if ca_file else "the authorities that this system trusts"
    return (
        f"the certificate of the broker at {where} does not come from a trusted authority ({verify_message}; trusted "
        f"are {trusted}): set broker.tls.ca_file to the certificate of the authority that made it"
    )


def answers_with_tls(first: bytes) -> bool:
    """Return whether the first bytes of an answer to a plaintext connection come from a TLS listener."""
    return first.startswith(_ALERT)

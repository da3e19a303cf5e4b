"""Broker URLs, taken from the configuration, the environment, or files that are read at each connect."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlsplit

from trinity_mq.bus.base import BusError

if TYPE_CHECKING:
    from trinity_mq.config.bus import BrokerConfig, TlsConfig  # pydantic takes longer to import than all of this

URL_VARIABLE = "TRINITY_MQ_BROKER_URL"
URL_FILE_VARIABLE = "TRINITY_MQ_BROKER_URL_FILE"
PASSWORD_FILE_VARIABLE = "TRINITY_MQ_BROKER_PASSWORD_FILE"
FORM = "amqp://user:password@host:port/vhost"

_BETWEEN = re.compile(r"[,\s]\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)|\s+")
_OF_THE_CLIENT = {"cafile", "capath", "cadata", "certfile", "keyfile", "no_verify_ssl"}
"""TLS settings that the AMQP client would read from a URL. ``no_verify_ssl`` disables verification."""


class AddressError(BusError):
    """No broker address is configured, or the configured address, or a file with the address, a password or TLS keys,
    cannot be used.
    """


@dataclass(frozen=True, slots=True)
class Addresses:
    """The broker's URLs or the file with them, the file with a missing password, and the TLS settings. :meth:`read`
    reads the files at each call.
    """

    url: str | None = None
    url_file: str | None = None
    password_file: str | None = None
    tls: TlsConfig | None = None

    @classmethod
    def of(cls, config: BrokerConfig, environ: Mapping[str, str] | None = None) -> Addresses | None:
        """Return the addresses of the configuration, or else of the environment. Return None if neither sets an
        address.
        """
        environment = os.environ if environ is None else environ
        url, url_file = config.url, None if config.url else config.url_file
        if not (url or url_file):
            url = environment.get(URL_VARIABLE)
            url_file = None if url else environment.get(URL_FILE_VARIABLE)
        if not (url or url_file):
            return None
        return cls(url, url_file, config.password_file or environment.get(PASSWORD_FILE_VARIABLE) or None, config.tls)

    def text(self) -> str:
        """Return the URLs as configured, separated by commas.

        Raises:
            AddressError: The file with the URLs cannot be read.
        """
        return ",".join(each(self.url or _content(self.url_file, "the broker's URL")))

    def read(self) -> tuple[str, ...]:
        """Return complete, checked URLs. It reads files, so do not call it on an event loop.

        Raises:
            AddressError: A file cannot be read, a URL is not a valid AMQP URL, or ``broker.tls`` is set for a URL that
                begins with amqp.
        """
        urls = each(self.text())
        if not urls:
            raise AddressError(f"{self.url_file or 'broker.url'} holds no URL, wanted {FORM}")
        for url in urls:
            check_url(url)
            if self.tls is not None and self.tls != type(self.tls)() and urlsplit(url).scheme == "amqp":
                raise AddressError(
                    f"broker.tls is set, but the URL of {address(url)} begins with amqp: the password would travel in "
                    "clear. Write amqps://, with the port for TLS (usually 5671), or remove broker.tls"
                )
        if not self.password_file or all(urlsplit(url).password for url in urls):
            return urls
        password = _content(self.password_file, "the broker's password")
        return tuple(url if urlsplit(url).password else _with_password(url, password) for url in urls)

    @property
    def from_file(self) -> bool:
        """True if the URL itself comes from a file."""
        return self.url is None


def broker_url(config: BrokerConfig) -> str | None:
    """Return the address of the broker from the configuration, or else from the environment. Return None if neither
    sets it.

    Several URLs are separated by commas. A URL from a file is the current content of the file. A password from a file
    is not included.

    Raises:
        AddressError: The file with the URL cannot be read.
    """
    addresses = Addresses.of(config)
    return None if addresses is None else addresses.text()


def each(text: str) -> tuple[str, ...]:
    """Return the URLs in ``text``, which are separated by commas or spaces.

    >>> each("amqp://a/x, amqps://b/y")
    ('amqp://a/x', 'amqps://b/y')
    """
    return tuple(url for url in _BETWEEN.split(text.strip()) if url)


def in_turn(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Return the URLs rotated to a random start, so that the agents of a run spread over the nodes of a cluster."""
    first = random.randrange(len(urls))
    return urls[first:] + urls[:first]


def address(url: str) -> str:
    """Return ``host:port`` of a broker URL, or of each URL if there are several."""
    parts = [urlsplit(single_url) for single_url in each(url)]
    return " or ".join(
        f"{url_parts.hostname}:{url_parts.port or (5671 if url_parts.scheme == 'amqps' else 5672)}"
        for url_parts in parts
    )


def check_url(url: str) -> None:
    """Check that the text is one or more AMQP URLs. Errors never repeat a password.

    Raises:
        AddressError: The text is not a valid URL. The message names the wrong part.
    """
    for part in each(url) or ("",):
        _check(part)


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # the library's message may repeat the text at the port's position, which may be part of a password
        raise _malformed("its port is not a number" if "ort" in str(error) else "its host is malformed") from None
    if parts.scheme not in {"amqp", "amqps"}:
        raise AddressError(f"broker.url begins with {_shown_scheme(url)}, wanted amqp or amqps: {FORM}")
    if not parts.hostname or port == 0:
        raise AddressError(f"broker.url names no host and port, wanted {FORM}")
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":
        raise _malformed("an @ follows its host")  # the apparent host and port may be part of a password
    if wrong_keys := sorted(_OF_THE_CLIENT & {key for key, _ in parse_qsl(parts.query, keep_blank_values=True)}):
        raise AddressError(
            f"broker.url of {address(url)} sets {', '.join(wrong_keys)}: TLS is set in broker.tls (ca_file, "
            "cert_file, key_file, server_name, verify); remove what follows the ?"
        )


def _malformed(wrong: str) -> AddressError:
    return AddressError(
        f"broker.url is not a URL ({wrong}; a password's @ : / # must be percent-encoded), wanted {FORM}"
    )


def _shown_scheme(url: str) -> str:
    scheme = urlsplit(url).scheme
    if not scheme:
        return "nothing"
    # the text before a lone colon may be anything, even a password
    return repr(scheme) if "://" in url else "no amqp://"


def _content(path: str | None, what: str) -> str:
    assert path is not None
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise AddressError(f"{what} cannot be read from {path}: {reason}") from None
    if not text:
        raise AddressError(f"{path} is empty, wanted {what}")
    return text


def _with_password(url: str, password: str) -> str:
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    user = user.partition(":")[0] if at else "guest"
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()

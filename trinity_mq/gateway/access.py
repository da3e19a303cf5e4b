"""Keys: admin keys, which may create and use all sessions, and the key of each session with its scopes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel

from trinity_mq.gateway.session import Session
from trinity_mq.messages.sessions import KeyScope
from trinity_mq.runtime.errors import FatalError

KEY_BEGINS = "sk-tmq-"
KEY_BYTES, ID_BYTES = 32, 16
LEAST_KEY = 16
"""Minimum characters of a key that may create sessions. Shorter keys can be guessed by trial."""
KEY_HEADERS = ("X-Session-Key", "x-api-key", "Authorization")
NO_KEYS = ("", "none", "EMPTY")
"""Values that count as no key. Clients that require a key are configured with one of these values."""
SESSION_HEADER = "X-Session-ID"
ROUTE_SCOPES: Mapping[str, KeyScope] = {
    "call": "call",
    "models": "call",
    "show": "read",
    "reward": "reward",
    "end": "end",
    "discard": "end",
}
"""Scope that every request to a session route needs, by route."""
FIELD_SCOPES: Mapping[str, Mapping[str, KeyScope]] = {
    "reward": {"final": "end"},
    "end": {"reward": "reward", "metrics": "reward", "replay": "replay"},
}
"""Additional scope by route and body field. A request needs it if the field differs from its default."""


def further_scopes(route: str, body: BaseModel) -> list[KeyScope]:
    """Return the scopes that a body needs beyond the scope of its route."""
    sent = body.model_dump(exclude_defaults=True)
    return [scope for field, scope in FIELD_SCOPES.get(route, {}).items() if field in sent]


def new_session_id() -> str:
    """Return an id that cannot be guessed."""
    return secrets.token_hex(ID_BYTES)


def new_key() -> str:
    """Return the key of a session."""
    return KEY_BEGINS + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    """Return the stored form of a key: its SHA-256 digest in hex."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()  # a header may hold any bytes


def key_from_headers(headers: Mapping[str, str]) -> str:
    """Return the key in the headers of a request. The result is empty if the request has no key."""
    values = (headers.get(name, "").strip() for name in KEY_HEADERS)
    keys = (value[len("Bearer") :].strip() if f"{value} ".startswith("Bearer ") else value for value in values)
    return next((key for key in keys if key not in NO_KEYS), "")


def read_keys(path: str | None) -> frozenset[str] | None:
    """Return the hashes of the keys in a file with one key per line. None: no file is configured, so requests without a
    key have full access.

    Raises:
        FatalError: The file cannot be read, contains no key, or one of its keys is too short.
    """
    if path is None:
        return None
    try:
        keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise FatalError(f"gateway.key_file {path} cannot be read: {reason}") from None
    if not keys or any(len(key) < LEAST_KEY for key in keys):
        raise FatalError(
            f"gateway.key_file {path} wants one key a line of at least {LEAST_KEY} characters, such as one made by "
            "`openssl rand -hex 32`"
        )
    return frozenset(map(hash_of, keys))


class Access:
    """Decides the permissions of a key.

    Args:
        keys: Hashes of the keys with full access. None: requests without a key have full access. An unknown key is
            refused even then: it is probably mistyped, and its requests would belong to no session.
    """

    def __init__(self, keys: Iterable[str] | None) -> None:
        self._keys = None if keys is None else frozenset(keys)

    def is_admin(self, key: str) -> bool:
        """Return whether a key has full access: it may create sessions and use all of them."""
        if self._keys is None:
            return not key
        key_hash = hash_of(key)
        return any(hmac.compare_digest(key_hash, admin_hash) for admin_hash in self._keys)

    @property
    def is_keyless(self) -> bool:
        """True if any client that reaches the gateway without a key has full access."""
        return self._keys is None

    def is_key_of(self, session: Session, key: str) -> bool:
        """Return whether a key is the key of this session."""
        opened = session.opened
        return opened is not None and bool(opened.key_hash) and hmac.compare_digest(opened.key_hash, hash_of(key))

    def allows(self, session: Session, key: str, scope: KeyScope) -> bool:
        """Return whether a key has a scope in a session. A key with full access has all scopes."""
        if self.is_key_of(session, key) and (opened := session.opened) is not None:
            return opened.may_replay if scope == "replay" else scope in opened.scopes
        return self.is_admin(key)

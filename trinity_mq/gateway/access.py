"""Keys: who may make sessions, who may use one, and for what."""

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
"""Characters of a key that may make sessions: shorter ones can be tried out."""
KEY_HEADERS = ("X-Session-Key", "x-api-key", "Authorization")
NO_KEYS = ("", "none", "EMPTY")
"""Values that count as no key: clients that insist on a key get one of them."""
SESSION_HEADER = "X-Session-ID"
ROUTE_SCOPES: Mapping[str, KeyScope] = {
    "call": "call",
    "models": "call",
    "show": "read",
    "reward": "reward",
    "end": "end",
    "discard": "end",
}
"""Scope that every request to a route of a session needs."""
FIELD_SCOPES: Mapping[str, Mapping[str, KeyScope]] = {
    "reward": {"final": "end"},
    "end": {"reward": "reward", "metrics": "reward", "replay": "replay"},
}
"""Further scope that a request needs by route and field, where the field differs from its default."""


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
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()  # a header may hold any bytes


def given_key(headers: Mapping[str, str]) -> str:
    """Return the key in a request's headers, empty where there is none."""
    values = (headers.get(name, "").strip() for name in KEY_HEADERS)
    keys = (value[len("Bearer") :].strip() if f"{value} ".startswith("Bearer ") else value for value in values)
    return next((key for key in keys if key not in NO_KEYS), "")


def read_keys(path: str | None) -> frozenset[str] | None:
    """Return the hashes of the keys in a file, one a line; None: anybody may.

    Raises:
        FatalError: It cannot be read, or a key in it is too short.
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
    """Decides what a key allows.

    Args:
        keys: Hashes of the keys that may do everything; None: anybody without a key may. A key that is sent and is not
            known is refused also then: it is a mistyped one, and its requests would belong to no session.
    """

    def __init__(self, keys: Iterable[str] | None) -> None:
        self._keys = None if keys is None else frozenset(keys)

    def is_admin(self, key: str) -> bool:
        """Return whether a key may make sessions and see all of them."""
        if self._keys is None:
            return not key
        given = hash_of(key)
        return any(hmac.compare_digest(given, known) for known in self._keys)

    @property
    def is_keyless(self) -> bool:
        """Anybody who reaches the gateway and sends no key may do everything."""
        return self._keys is None

    def is_key_of(self, session: Session, key: str) -> bool:
        """Return whether a key is the session's own."""
        opened = session.opened
        return opened is not None and bool(opened.key_hash) and hmac.compare_digest(opened.key_hash, hash_of(key))

    def allows(self, session: Session, key: str, scope: KeyScope) -> bool:
        """Return whether a key may do something with a session."""
        if self.is_key_of(session, key) and (opened := session.opened) is not None:
            return opened.may_replay if scope == "replay" else scope in opened.scopes
        return self.is_admin(key)

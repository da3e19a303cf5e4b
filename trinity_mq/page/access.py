"""Access to the page. Views need a key unless the server listens on a loopback address. Actions always need the key."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from trinity_mq.config.hosts import is_loopback
from trinity_mq.runtime.http import refuse_forged

KEY_PARAMETER, KEY_COOKIE, KEY_HEADER = "key", "tmq-dash", "X-TMQ-Key"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: the page does not load from, or send to, other addresses."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageAccess:
    """Checks the access of each request.

    Args:
        host: Address that the server listens on.
        operate: Whether requests may change the run.
    """

    def __init__(self, host: str, *, operate: bool) -> None:
        self.operate, self._is_local = operate, is_loopback(host)
        self.key = secrets.token_urlsafe(24)

    @property
    def needs_key(self) -> bool:
        """Whether the printed address must contain the key: actions are enabled, or views need the key."""
        return self.operate or not self._is_local

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse forbidden requests with 401 or 403. Add security headers to the responses of handlers, except to
        responses that a handler has already begun to send, and store the key of the address in a cookie.
        """
        key = request.query.get(KEY_PARAMETER) or request.cookies.get(KEY_COOKIE) or ""
        has_key = self._is_key(key)
        if self._is_local:
            refuse_forged(request)
        if not (self._is_local or has_key):
            raise web.HTTPUnauthorized(text="open the address with the key that `trinity-mq dash` printed")
        if request.method not in {"GET", "HEAD"}:
            self._may_act(request)
        response = await handler(request)
        if not response.prepared:
            _secure(response)
            if has_key and KEY_PARAMETER in request.query:
                response.set_cookie(KEY_COOKIE, self.key, httponly=True, samesite="Strict")
        return response

    def _may_act(self, request: web.Request) -> None:
        if not self.operate:
            raise web.HTTPForbidden(
                text="this page is read-only: start `trinity-mq dash` with --operate to enable actions"
            )
        if not self._is_key(request.headers.get(KEY_HEADER, "")):
            raise web.HTTPUnauthorized(text="open the address with the key that `trinity-mq dash` printed")

    def _is_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(errors="replace"), self.key.encode())


def _secure(response: web.StreamResponse) -> None:
    response.headers.setdefault("Content-Security-Policy", POLICY)
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Referrer-Policy", "no-referrer")
    response.headers.setdefault("Cache-Control", "no-store")

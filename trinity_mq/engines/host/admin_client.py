"""Client of an engine's admin routes, for the host."""

from __future__ import annotations

from typing import Any

import aiohttp

from trinity_mq.models.errors import EngineLost, EngineRefused


class ReceiveFailed(EngineRefused):
    """New weights were not applied."""

    def __init__(self, message: str, status: int, code: str | None, touched: bool) -> None:
        super().__init__(message, status, code)
        self.touched = touched
        """True if the old weights are lost: the engine serves nothing until the next commit."""


class EngineAdmin:
    """Admin calls to one engine. Every call has a time limit."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self.url = url
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"}

    async def post(self, command: str, body: dict[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """Return the answer to a command.

        Raises:
            EngineLost: The engine did not answer within ``timeout`` seconds, or no engine listens there.
            EngineRefused: The engine answered with another status than 200.
        """
        answer: dict[str, Any] = await self._call("POST", f"/admin/{command}", timeout, json=body)
        return answer

    async def state(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the engine's state; errors as :meth:`post`."""
        answer = await self._call("GET", "/admin/state", timeout)
        state: dict[str, Any] = answer["state"]
        return state

    async def weight(self, name: str, timeout: float = 300.0) -> bytes:
        """Return one weight as safetensors bytes; errors as :meth:`post`."""
        data: bytes = await self._call("GET", "/admin/weight", timeout, params={"name": name})
        return data

    async def _call(self, method: str, path: str, timeout: float, **options: Any) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(
                method, self.url + path, headers=self._headers, timeout=limit, **options
            ) as response:
                if response.status != 200:
                    raise refusal(response.status, await response.json(content_type=None), path)
                return await (response.json() if response.content_type == "application/json" else response.read())
        except TimeoutError:
            raise EngineLost(f"{method} {self.url}{path}: no answer within {timeout:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineLost(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error


def refusal(status: int, body: Any, path: str) -> EngineRefused:
    """Return the error for an answer other than 200."""
    error = body.get("error", {}) if isinstance(body, dict) else {}
    message = f"{path}: {error.get('message') or f'HTTP status {status}'}"
    code = error.get("code")
    if path == "/admin/receive":
        return ReceiveFailed(message, status, code, bool(error.get("touched")))
    return EngineRefused(message, status, code)

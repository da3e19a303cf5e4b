"""Request bodies of the admin routes."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trinity_mq.models.engines.api_errors import bad_request

B = TypeVar("B", bound=BaseModel)
Number = Annotated[int, Field(ge=0)]
PAUSE_LEASE = 120.0


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LeaseBody(_Body):
    """``/admin/lease``."""

    seconds: float = Field(gt=0)


class PauseBody(_Body):
    """``/admin/pause``."""

    timeout: float = Field(default=60.0, gt=0)
    """Seconds the running batch step has to end."""
    lease: float = Field(default=PAUSE_LEASE, gt=0)
    """Seconds after which the engine goes on by itself if it hears nothing more."""


class ReceiveBody(_Body):
    """``/admin/receive``."""

    spec: dict[str, Any]
    timeout: float = Field(default=600.0, gt=0)
    """Seconds for all tensors to arrive."""


class CommitBody(_Body):
    """``/admin/commit``."""

    version: tuple[Number, Number]
    progress: Number = 0


async def parsed(request: web.Request, body: type[B]) -> B:
    """Return the body of ``request``.

    Raises:
        ApiError: 400; says which field is wrong.
    """
    try:
        return body.model_validate(json.loads(await request.read() or b"{}"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise bad_request(f"{where or 'body'}: {first['msg']}", where or None) from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None

"""Body format of ``POST /v1/group``: many requests to an engine in one HTTP request, with a stream of answers, in
MessagePack.

A request is ``[path, headers, body]``, and a group is an array of requests. The answer is a stream of ``[number,
status, headers, body]`` in the order in which the requests finish. ``number`` is the index of the request in the group.
``body`` is binary: MessagePack that the caller of the request decodes. Paths, headers, bodies and statuses are the same
as for a request without a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

GROUP_PATH = "/v1/group"
GROUPS_HEADER = "X-TMQ-Groups"
"""Response header of engines that take groups."""
CONTENT_TYPE = "application/x-msgpack"


class GroupedRequest(NamedTuple):
    """One request of a group."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class GroupedAnswer(NamedTuple):
    """The answer to one request of a group."""

    number: int
    status: int
    headers: Mapping[str, str]
    body: bytes
    """MessagePack of the object that the answer would hold as JSON."""


_REQUESTS = TypeAdapter(
    Annotated[list[tuple[str, dict[str, str], dict[str, Any]]], Field(min_length=1)], config={"strict": True}
)
_ANSWER = TypeAdapter(tuple[int, int, dict[str, str], bytes], config={"strict": True})


def pack_request(request: GroupedRequest) -> bytes | None:
    """Return a request packed for a group; None if it holds a value without a MessagePack form, such as a number of
    more than 64 bits.
    """
    try:
        packed: bytes = msgpack.packb(request)
    except (TypeError, ValueError, OverflowError):
        return None
    return packed


def pack_group(packed: Sequence[bytes]) -> bytes:
    """Return the body of a group of packed requests."""
    head: bytes = msgpack.Packer().pack_array_header(len(packed))
    return head + b"".join(packed)


def unpack_requests(body: bytes) -> list[GroupedRequest]:
    """Return the requests of a group.

    Raises:
        ValueError: ``body`` is not a group; the message names the expected form.
    """
    try:
        return [GroupedRequest(*request) for request in _REQUESTS.validate_python(_as_tuples(msgpack.unpackb(body)))]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}; wanted an array of [path, headers, body]") from None
    except Exception as error:  # msgpack raises many kinds of errors
        raise ValueError(f"the body is not MessagePack: {type(error).__name__}: {error}") from None


def _as_tuples(rows: Any) -> Any:
    return [tuple(row) if isinstance(row, list) else row for row in rows] if isinstance(rows, list) else rows


def pack_body(body: Any) -> bytes:
    """Return the packed body of an answer, given the object that it would hold as JSON."""
    packed: bytes = msgpack.packb(body)
    return packed


def pack_answer(answer: GroupedAnswer) -> bytes:
    """Return an answer packed for the stream."""
    packed: bytes = msgpack.packb(answer)
    return packed


def unpack_body(body: bytes) -> Any:
    """Return the object in the body of an answer.

    Raises:
        ValueError: ``body`` is not MessagePack.
    """
    try:
        return msgpack.unpackb(body)
    except Exception as error:  # msgpack raises many kinds of errors
        raise ValueError(f"the body is not MessagePack: {type(error).__name__}: {error}") from error


class AnswerReader:
    """Reads the stream of answers from pieces of any size."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker()

    def feed(self, data: bytes) -> list[GroupedAnswer]:
        """Return the answers that end in ``data``.

        Raises:
            ValueError: The data is not a stream of answers.
        """
        try:
            self._unpacker.feed(data)
            return [GroupedAnswer(*_ANSWER.validate_python(tuple(row))) for row in self._unpacker]
        except Exception as error:  # msgpack raises many kinds of errors
            raise ValueError(f"not a stream of answers: {type(error).__name__}: {error}") from error

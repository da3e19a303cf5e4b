"""The engine's end of the memory channel: reads buckets from the trainer's server directly into tensors. Blocks."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import xxhash
from torch import Tensor

from trinity_mq.sync.channels.base import FETCH_TRIES, ChannelError, fetch_tries
from trinity_mq.sync.channels.buckets import SpareBuffers, entries_of, plan, raw, split

T = TypeVar("T")
SILENCE = 10.0
"""Seconds without a byte after which a connection is closed."""
CHUNK_BYTES = 2**20
"""Number of bytes read and checksummed at a time, while they are in the cache."""


class _Damaged(Exception):
    """Received bytes differ from the sent bytes."""


CONNECTION_ERRORS = (OSError, http.client.HTTPException, _Damaged)


def fetch(spec: dict[str, Any], spare: SpareBuffers) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the tensors by name, on the CPU, with every bucket verified, and the buffers that they are views of.

    Args:
        spec: ``url``, ``token``, ``bucket_bytes``, ``manifest``, ``seconds``.
        spare: Pool of buffers.

    Raises:
        ChannelError: The tensors could not be fetched within ``seconds``.
    """
    buckets = plan(entries_of(spec["manifest"]), int(spec["bucket_bytes"]))
    reader = _Reader(spec["url"], spec["token"], float(spec["seconds"]))
    flats: list[Tensor] = []
    try:
        digests = reader.checksums()
        if len(digests) != len(buckets):
            raise ChannelError(
                f"{len(digests)} checksums for {len(buckets)} buckets: the manifest belongs to other weights"
            )
        for number, (bucket, digest) in enumerate(zip(buckets, digests, strict=True)):
            flats.append(spare.take(bucket))
            reader.bucket(number, flats[-1], digest)
    finally:
        reader.close()
    pairs = zip(buckets, flats, strict=True)
    return {name: part for bucket, flat in pairs for name, part in split(bucket, flat)}, flats


class _Reader:
    """One connection, reopened after a failure."""

    def __init__(self, url: str, token: str, seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ChannelError(f"weights are streamed from an http:// URL, got {url!r}")
        self._url, self._path = url, parts.path
        self._headers = {"Authorization": f"Bearer {token}"}
        self._ends = time.monotonic() + seconds
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=min(SILENCE, seconds))

    def close(self) -> None:
        self._connection.close()

    def checksums(self) -> list[str]:

        def read() -> list[str]:
            checksums: list[str] = json.loads(self._ask("").read())["xxh3_128"]
            return checksums

        return self._with_retries(read, "the checksums")

    def bucket(self, number: int, flat: Tensor, digest: str) -> None:
        self._with_retries(lambda: self._read(number, raw(flat), digest), f"bucket {number}")

    def _with_retries(self, read: Callable[[], T], what: str) -> T:
        def once() -> T:
            try:
                self._check_time()
                return read()
            except BaseException:
                self._connection.close()
                raise

        try:
            return fetch_tries(*CONNECTION_ERRORS)(once)
        except CONNECTION_ERRORS as error:
            raise ChannelError(
                f"{what} of {self._url} did not arrive in {FETCH_TRIES} tries: {type(error).__name__}: {error}"
            ) from error

    def _ask(self, path: str) -> http.client.HTTPResponse:
        self._connection.request("GET", f"{self._path}{path}", headers=self._headers)
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise ChannelError(f"{self._url}{path}: {answer.status}, {_excerpt(answer.read())}")
        return answer

    def _read(self, number: int, into: memoryview, digest: str) -> None:
        answer = self._ask(f"/{number}")
        if answer.length != len(into):
            raise ChannelError(f"bucket {number} has {answer.length} bytes, the manifest of the sync says {len(into)}")
        checksum, at = xxhash.xxh3_128(), 0
        while at < len(into):
            read = answer.readinto(into[at : at + CHUNK_BYTES])
            if read == 0:
                raise _Damaged(f"the connection ended after {at} of {len(into)} bytes")
            checksum.update(into[at : at + read])
            at += read
            self._check_time()
        answer.read()  # finishes the response, so that the connection is free for the next request
        if checksum.hexdigest() != digest:
            raise _Damaged(f"the checksum is {checksum.hexdigest()}, wanted {digest}")

    def _check_time(self) -> None:
        if time.monotonic() > self._ends:
            raise ChannelError(f"{self._url}: not all weights arrived in time")


def _excerpt(body: bytes) -> str:
    """Return the message in the body of an error response."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")

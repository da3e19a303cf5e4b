"""Blob store for experiences that are too large for a message, and the references sent instead of them.

Names are ``batch/<ticket>/<attempt>-<part>.tmqx`` (parts, removed with the batch's queue) and
``ready/<ticket>/<op>-<n>.tmqx`` (chunks, removed by the trainer), all under ``<broker.blob_store>/<run>``.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog
from tenacity import RetryCallState

from trinity_mq.bus.retry import retrying
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import DecodeError, ExperienceReference, decode
from trinity_mq.runtime.deliveries import REFERENCE
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.process import write_atomic

log = structlog.get_logger(__name__)

T = TypeVar("T")

PARTS, CHUNKS = "batch", "ready"
"""Folders of a run: experience parts and processed chunks."""
STORE_PATIENCE = 120.0
"""Seconds for which a read or write waits for a store that does not answer. After that a delivery is returned to its
queue, and the trainer restarts."""
MARK = "store"
"""Name of a marker file in each run's folder. If a blob and this file are both missing, the store is unavailable and
the blob is not lost."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
"""Names without empty parts, parts that begin with a dot, or escapes, so that a name cannot lead out of the folder."""


class BlobRefused(DecodeError):
    """A name or URL does not denote a blob of this run, a size is over the limit of readers, or no store is configured
    here.
    """


class BlobDamaged(DecodeError):
    """A blob does not match its reference."""


class BlobMissing(DecodeError):
    """A blob does not exist, and the store is available."""


class StoreUnavailable(Exception):
    """The store does not answer; a retry may succeed."""


class BlobStore:
    """The blobs of one run. All methods block: call them in a thread with :func:`run_with_store_retries`.

    Args:
        url: ``broker.blob_store``, without a slash at its end.
        run: The run's name. Files outside its folder are never opened.
        max_bytes: Maximum size of a blob to read.
    """

    def __init__(self, url: str, run: str, max_bytes: int) -> None:
        self.url, self.max_bytes = f"{url}/{run}", max_bytes
        self._scheme = url.partition("://")[0]
        self._is_local = self._scheme in {"file", "local"}
        self._signed = False

    def check(self) -> None:
        """Check that a library for this kind of store is installed.

        Raises:
            FatalError: The library is not installed, or the URL scheme is unknown.
        """
        import fsspec

        try:
            fsspec.get_filesystem_class(self._scheme)
        except (ImportError, ValueError) as error:
            raise FatalError(f"broker.blob_store: no library opens {self._scheme}:// URLs here: {error}") from error

    def put(self, name: str, body: bytes) -> ExperienceReference:
        """Write a blob atomically, and return the reference to send instead of the body.

        Raises:
            BlobRefused: The name is not a valid blob name, or leads through a symbolic link.
            StoreUnavailable: The blob could not be written.
        """
        path = self._path(name)
        with self._asking(name):
            if not self._signed:
                self._write(self._path(MARK), b"blobs of a trinity-mq run\n")
                self._signed = True
            self._write(path, body)
        log.info("blob_written", blob=name, bytes=len(body))
        return ExperienceReference(url=f"{self.url}/{name}", bytes=len(body), sha256=hashlib.sha256(body).hexdigest())

    def get(self, reference: ExperienceReference) -> bytes:
        """Return the content of a blob. Its size is checked before it is read.

        Raises:
            BlobRefused: The reference does not point to a blob of this run, or its size is over ``max_bytes``.
            BlobDamaged: Size or checksum differ from the reference.
            BlobMissing: The blob does not exist.
            StoreUnavailable: The store does not answer, or its marker file is missing (such as a disk that is not
                mounted).
        """
        name = self._name_of(reference)
        path = self._path(name)
        with self._asking(name):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(path)
                if info["type"] != "file" or info["size"] != reference.bytes:
                    raise BlobDamaged(f"blob {name} has {info['size']} bytes, its reference says {reference.bytes}")
                body: bytes = self._fs.cat_file(path, start=0, end=reference.bytes)
            except FileNotFoundError:
                raise self._missing(name) from None
        if len(body) != reference.bytes or hashlib.sha256(body).hexdigest() != reference.sha256:
            raise BlobDamaged(f"blob {name} does not match its reference: {len(body)} bytes with another SHA-256")
        return body

    def folders(self, kind: str) -> list[str]:
        """Return the tickets that have blobs under ``kind``.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        with self._asking(kind):
            self._fs.invalidate_cache()
            try:
                paths = self._fs.ls(self._path(kind), detail=False)
            except FileNotFoundError:
                return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(name for name in names if _NAME.fullmatch(name))

    def delete(self, *names: str) -> None:
        """Remove blobs or folders of blobs. Missing names are ignored.

        Raises:
            BlobRefused: A name is not a valid blob name.
            StoreUnavailable: The store does not answer.
        """
        for name in names:
            self._remove(name, self._path(name))

    def delete_run(self) -> None:
        """Remove all blobs of the run.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        self._signed = False
        self._remove("all blobs", self._root)

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        filesystem, root = url_to_fs(self.url)
        return filesystem, root.rstrip("/")

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise BlobRefused(f"{name!r} is not a valid blob name")
        with self._asking(name):
            if self._is_local and Path(self._root, name).resolve() != Path(self._root).resolve() / name:
                raise BlobRefused(f"blob {name} is a symbolic link or lies below one, and links are not followed")
            return f"{self._root}/{name}"

    def _name_of(self, reference: ExperienceReference) -> str:
        prefix, url = f"{self.url}/", reference.url
        name = url[len(prefix) :]
        if not url.startswith(prefix) or not _NAME.fullmatch(name):
            raise BlobRefused(
                f"the reference leads to {url[:200]!r}, wanted a blob under {self.url}; is broker.blob_store the same "
                "for all agents, and was it when the reference was written?"
            )
        if reference.bytes > self.max_bytes:
            raise BlobRefused(f"blob {name} of {reference.bytes} bytes is over broker.max_batch_bytes {self.max_bytes}")
        return name

    def _missing(self, name: str) -> Exception:
        if self._fs.exists(self._path(MARK)):
            return BlobMissing(f"blob {name} does not exist in {self.url}")
        return StoreUnavailable(
            f"{self.url} holds neither blob {name} nor the file {MARK!r} that every run has: is it mounted? If it was "
            f"emptied on purpose, put an empty file {MARK!r} there"
        )

    def _write(self, path: str, body: bytes) -> None:
        if self._is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(path), body)
            return
        # Object stores publish an object atomically. In other stores the name is unknown to readers until this call
        # returns.
        try:
            self._fs.pipe_file(path, body)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, body)

    def _remove(self, name: str, path: str) -> None:
        with self._asking(name):
            self._fs.invalidate_cache()
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                return
        log.info("blobs_removed", store=self.url, name=name)

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """Convert every error of a store's library to StoreUnavailable, because the libraries do not share a base
        exception.
        """
        try:
            yield
        except (DecodeError, StoreUnavailable):
            raise
        except Exception as error:
            raise StoreUnavailable(
                f"blob store {self.url} failed at {name}: {type(error).__name__}: {error}"
            ) from error


def open_store(broker: BrokerConfig, run: str) -> BlobStore | None:
    """Return the run's blob store, None if none is configured. The store is not contacted yet.

    Raises:
        FatalError: No library for it is installed.
    """
    if broker.blob_store is None:
        return None
    store = BlobStore(broker.blob_store, run, broker.max_batch_bytes)
    store.check()
    return store


async def run_with_store_retries(function: Callable[..., T], *args: Any, seconds: float = STORE_PATIENCE) -> T:
    """Run ``function`` in a thread, and retry while the store is unavailable.

    Raises:
        StoreUnavailable: The store was unavailable for ``seconds``.
    """
    last: BaseException | None = None

    def note(state: RetryCallState) -> None:
        nonlocal last
        last = state.outcome.exception() if state.outcome else None
        log.warning("blob_store_unavailable", reason=str(last))

    try:
        async with asyncio.timeout(seconds):
            return await retrying(StoreUnavailable, before_sleep=note)(asyncio.to_thread, function, *args)
    except TimeoutError:
        raise StoreUnavailable(f"not done within {seconds:g} s; {last or 'the blob store does not answer'}") from last


def resolve_body(store: BlobStore | None, body: bytes, content_type: str | None) -> bytes:
    """Return the experience body: ``body`` itself, or the blob that it refers to.

    Raises:
        DecodeError: The reference is not permitted, or its blob is missing or damaged.
        StoreUnavailable: The store does not answer.
    """
    if content_type != REFERENCE:
        return body
    reference = decode(body, ExperienceReference)
    if store is None:
        raise BlobRefused(
            f"a reference to {reference.url[:200]!r}, but broker.blob_store is not set here; give all agents the same"
        )
    return store.get(reference)


def resolved_size(store: BlobStore | None, body: bytes, content_type: str | None) -> int:
    """Return the number of bytes that a body takes after its reference is resolved. A reference that will be refused
    counts with its own size; without a store this is every reference.
    """
    if content_type == REFERENCE and store is not None:
        try:
            claimed = decode(body, ExperienceReference).bytes
        except DecodeError:
            return len(body)
        return claimed if claimed <= store.max_bytes else len(body)
    return len(body)

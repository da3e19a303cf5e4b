"""Blob store for experiences that are too large for a message, and the references sent in their place.

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
"""Seconds that a delivery waits for a store that does not answer before it is requeued."""
MARK = "store"
"""A file of each run. A blob that is not found where this is missing too is not lost: the store is not there."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
"""No empty word, none that begins with a dot, no escapes: nothing that leads out of the folder."""


class BlobRefused(DecodeError):
    """A name or URL that is not one of this run's blobs, or a size that no reader takes."""


class BlobDamaged(DecodeError):
    """A blob that is not what its reference says."""


class BlobGone(DecodeError):
    """There is no such blob, in a store that is there."""


class StoreUnavailable(Exception):
    """The store does not answer; what was asked may work later."""


class BlobStore:
    """The blobs of one run. Everything here blocks: call it in a thread, :func:`patiently`.

    Args:
        url: ``broker.blob_store``, without a slash at its end.
        run: The run's name; nothing outside of its folder is ever opened.
        max_bytes: Size above which no blob is read.
    """

    def __init__(self, url: str, run: str, max_bytes: int) -> None:
        self.url, self.max_bytes = f"{url}/{run}", max_bytes
        self._scheme = url.partition("://")[0]
        self._is_local = self._scheme in {"file", "local"}
        self._signed = False

    def check(self) -> None:
        """Find the library that speaks to such a store.

        Raises:
            FatalError: It is not installed, or there is none.
        """
        import fsspec

        try:
            fsspec.get_filesystem_class(self._scheme)
        except (ImportError, ValueError) as error:
            raise FatalError(f"broker.blob_store: no library opens {self._scheme}:// URLs here: {error}") from error

    def put(self, name: str, body: bytes) -> ExperienceReference:
        """Write a blob, whole or not at all, and return what to send in its place.

        Raises:
            BlobRefused: The name is none of ours.
            StoreUnavailable: It could not be written.
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
        """Return the blob, whose size is looked at before it is read.

        Raises:
            BlobRefused: The reference leads elsewhere than to a blob of this run, or is over ``max_bytes``.
            BlobDamaged: Size or checksum are not what the reference says.
            BlobGone: It does not exist.
            StoreUnavailable: The store does not answer, or is not the one it was (such as a disk not mounted).
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
            raise BlobDamaged(f"blob {name} is not what its reference says: {len(body)} bytes with another SHA-256")
        return body

    def folders(self, kind: str) -> list[str]:
        """Return the tickets that have blobs under ``kind``.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        with self._asking(kind):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(kind), detail=False)
            except FileNotFoundError:
                return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted(name for name in names if _NAME.fullmatch(name))

    def delete(self, *names: str) -> None:
        """Remove blobs or folders of blobs; none of that name is fine.

        Raises:
            BlobRefused: A name is none of ours.
            StoreUnavailable: The store does not answer.
        """
        for name in names:
            self._remove(name, self._path(name))

    def delete_run(self) -> None:
        """Remove all that the run has there.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        self._signed = False
        self._remove("all blobs", self._root)

    # -- inside

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
            raise BlobRefused(f"{name!r} is no name of a blob")
        with self._asking(name):
            if self._is_local and Path(self._root, name).resolve() != Path(self._root).resolve() / name:
                raise BlobRefused(f"blob {name} is a link, or lies behind one; such are not followed")
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
            return BlobGone(f"blob {name} does not exist in {self.url}")
        return StoreUnavailable(
            f"{self.url} holds neither blob {name} nor the file {MARK!r} that every run has: is it mounted? If it was "
            f"emptied on purpose, put an empty file {MARK!r} there"
        )

    def _write(self, path: str, body: bytes) -> None:
        if self._is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(path), body)
            return
        # object stores show an object when all of it is there; elsewhere nobody knows the name before we return
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
        """Make one error of all that a store's library may raise: they have no common root."""
        try:
            yield
        except (DecodeError, StoreUnavailable):
            raise
        except Exception as error:
            raise StoreUnavailable(
                f"blob store {self.url} failed at {name}: {type(error).__name__}: {error}"
            ) from error


def open_store(broker: BrokerConfig, run: str) -> BlobStore | None:
    """Return the run's blob store, None where none is configured. Nothing is asked of it yet.

    Raises:
        FatalError: No library for it is installed.
    """
    if broker.blob_store is None:
        return None
    store = BlobStore(broker.blob_store, run, broker.max_batch_bytes)
    store.check()
    return store


async def patiently(function: Callable[..., T], *args: Any, seconds: float = STORE_PATIENCE) -> T:
    """Run ``function`` in a thread, again while the store is unavailable.

    Raises:
        StoreUnavailable: It was for ``seconds``.
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


def resolve(store: BlobStore | None, body: bytes, content_type: str | None) -> bytes:
    """Return the experience body that was sent: ``body`` itself, or the blob that it refers to.

    Raises:
        DecodeError: It refers to nothing that may be read, that is there, and that is whole.
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


def carried_bytes(store: BlobStore | None, body: bytes, content_type: str | None) -> int:
    """Return how much a body takes once it is resolved; one that will be refused takes only what it is."""
    if content_type == REFERENCE and store is not None:
        try:
            claimed = decode(body, ExperienceReference).bytes
        except DecodeError:
            return len(body)
        return claimed if claimed <= store.max_bytes else len(body)
    return len(body)

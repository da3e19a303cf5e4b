"""Bodies that stand for a blob: what a reader gets of them."""

from __future__ import annotations

from trinity_mq.messages import DecodeError, ExperienceReference, decode
from trinity_mq.runtime.deliveries import REFERENCE
from trinity_mq.transport.blobs import BlobRefused, BlobStore


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

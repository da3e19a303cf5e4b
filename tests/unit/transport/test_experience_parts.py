"""Experiences cut into bodies that fit, and the one that fits nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.agents.world import a_slice, experience
from trinity_mq.bus import MessageTooLarge
from trinity_mq.experience import Experience, encode
from trinity_mq.messages import BatchClosed, ExperienceReference, decode
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE
from trinity_mq.transport.blobs import BlobStore
from trinity_mq.transport.experience_parts import chunk_message, part_message, split_to_size

LIMIT = 64 * 1024


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(f"file://{tmp_path}", "r", 1 << 20)


def runs(bodies: list[bytes]) -> list[int]:
    return [one.eid.run for body in bodies for one in Experience.deserialize_many(body)]


def test_they_are_cut_until_each_body_fits(store: BlobStore) -> None:
    many = [experience(run=run, length=3000) for run in range(16)]
    for given in (None, store):
        bodies = split_to_size(many, LIMIT, store=given)
        assert max(map(len, bodies)) <= LIMIT
        assert 4 <= len(bodies) <= 16
        assert runs(bodies) == list(range(16))
    assert split_to_size([], LIMIT) == []


def test_exactly_at_the_limit_is_a_message_and_one_byte_more_is_not(store: BlobStore) -> None:
    one = [experience(length=5000)]
    size = len(encode(one))
    assert split_to_size(one, size) == [encode(one)]
    with pytest.raises(MessageTooLarge, match=rf"takes {size} bytes, over broker\.max_message_bytes {size - 1}"):
        split_to_size(one, size - 1)
    assert split_to_size(one, size - 1, store=store) == [encode(one)]


def test_without_a_store_the_error_names_the_setting_and_the_experience() -> None:
    with pytest.raises(MessageTooLarge, match=r"1/0/7.*broker\.blob_store"):
        split_to_size([experience(run=0), experience(run=7, length=100_000)], LIMIT)


def test_what_no_reader_would_take_is_refused(store: BlobStore) -> None:
    with pytest.raises(MessageTooLarge, match=r"over broker\.max_batch_bytes 1048576"):
        split_to_size([experience(length=200_000)], LIMIT, store=store)


def test_compression_comes_before_the_limit(store: BlobStore) -> None:
    one = [experience(length=12_000)]
    assert len(encode(one)) > LIMIT
    (body,) = split_to_size(one, LIMIT, compression="zstd")
    assert len(body) <= LIMIT
    assert runs([body]) == [0]


def test_a_reference_travels_under_the_name_and_headers_of_its_body() -> None:
    reference = ExperienceReference(url="s3://b/r/batch/t1/a-0.tmqx", bytes=9, sha256="0" * 64)
    plain, stands = (part_message(a_slice(), "a", 0, 1, one, (1, 3)) for one in (b"body", reference))
    assert (plain.content_type, stands.content_type) == (EXPERIENCES, REFERENCE)
    assert (plain.kind, plain.message_id, plain.headers) == (stands.kind, stands.message_id, stands.headers)
    assert decode(stands.body, ExperienceReference) == reference
    closed = BatchClosed(batch=1, ticket="t1")
    plain, stands = (chunk_message(closed, "o", 0, one) for one in (b"body", reference))
    assert (plain.content_type, stands.content_type) == (EXPERIENCES, REFERENCE)
    assert (plain.kind, plain.message_id, plain.headers) == (stands.kind, stands.message_id, stands.headers)
    assert len(stands.body) < 300

"""The broker section: where the blob store may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.config import ConfigError, load_config


def blob_store(value: str) -> str | None:
    return load_config({"model": {"tiny": {}}}, [f"broker.blob_store={value}"]).broker.blob_store


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/data/blobs/", "file:///data/blobs"),
        ("file:///data/blobs", "file:///data/blobs"),
        ("~/blobs", f"file://{Path.home()}/blobs"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("null", None),
    ],
)
def test_a_blob_store_is_a_url_or_an_absolute_path(given: str, url: str | None) -> None:
    assert blob_store(given) == url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("blobs", "'blobs' is a relative path"),
        ("./blobs", "an absolute path or a URL"),
        ("file://blobs/x", "names no one place"),
        ("file:///", "names no one place"),
        ("/", "names no one place"),
        ("simplecache::s3://bucket/x", "names no one place"),
        ("s3://key:s3cr3t@bucket/x", "holds a password"),
    ],
)
def test_what_is_none_says_so_and_repeats_no_password(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"broker\.blob_store") as caught:
        blob_store(given)
    assert words in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"broker\.compression"):
        load_config({"model": {"tiny": {}}}, ["broker.compression=gzip"])

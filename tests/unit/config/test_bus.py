"""The broker section: where broker and blob store may be, and how TLS is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.config import ConfigError, load_config

TINY = {"model": {"tiny": {}}}


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
    assert load_config(TINY, [f"broker.blob_store={given}"]).broker.blob_store == url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["broker.blob_store=blobs"], "broker.blob_store: 'blobs' is a relative path"),
        (["broker.blob_store=./blobs"], "an absolute path or a URL"),
        (["broker.blob_store=file://blobs/x"], "does not name a single place"),
        (["broker.blob_store=file:///"], "does not name a single place"),
        (["broker.blob_store=/"], "does not name a single place"),
        (["broker.blob_store=simplecache::s3://bucket/x"], "does not name a single place"),
        (["broker.blob_store=s3://key:s3cr3t@bucket/x"], "holds a password"),
        (["broker.compression=gzip"], "broker.compression"),
        (["broker.url=amqp://h/", "broker.url_file=/x"], "url and url_file are both given"),
        (["broker.tls.key_file=/k"], "key_file is given without cert_file"),
        (["broker.tls.verify=false", "broker.tls.ca_file=/c"], "ca_file would not be looked at"),
        (["broker.url={a: s3cr3t}"], "broker.url: Input should be a valid string"),
        (["broker.url=[amqp://u:s3cr3t@h/, 3]"], "broker.url: Input should be a valid string"),
        (['broker.url="amqp://u:s3cr3t@h/'], "value is not YAML"),
        (["amqp://u:s3cr3t@h/"], "wanted section.key=value"),
        (["broker.tls.ca_fil=/c"], "did you mean 'ca_file'"),
    ],
)
def test_what_does_not_fit_is_said_without_a_password(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, given)
    assert words in str(caught.value)
    if "://" in given[0]:
        assert "s3cr3t" not in str(caught.value)

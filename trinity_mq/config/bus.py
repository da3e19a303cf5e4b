"""The broker section: address, TLS, limits and timeouts."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section, UserFile, expand_user

PUBLISH_TIMEOUT = 300.0
"""Seconds after which an unconfirmed publish is an error. The value is longer than the restart of a broker or a short
lack of disk space takes. It is short enough that a slice or a batch fits into the 30 minutes for which a broker lets an
agent hold a message by default."""
SLICE_RESERVE_BYTES = 8 * 1024
"""Bytes of a slice's message that are reserved for everything except its task."""


class TlsConfig(Section):
    """Verification of ``amqps://``. All files are PEM. They are read again at each connect, so they may be rotated."""

    ca_file: UserFile = None
    """File with the certificates of the authorities that may sign the broker's certificate. None: the authorities that
    this system trusts."""
    cert_file: UserFile = None
    """Client certificate, with the chain up to its authority, for a broker that requires it."""
    key_file: UserFile = None
    """Key of ``cert_file``. None: ``cert_file`` also holds the key."""
    key_password_file: UserFile = None
    """File with the password of an encrypted key. None: the environment variable ``TRINITY_MQ_BROKER_KEY_PASSWORD``."""
    server_name: str | None = None
    """Name that the broker's certificate must contain. None: the host in the URL."""
    verify: bool = True
    """``false``: anybody on the network path can read and change all messages, including passwords. Each start then
    logs a warning."""

    @model_validator(mode="after")
    def _check_certificate(self) -> TlsConfig:
        for name in ("key_file", "key_password_file"):
            if getattr(self, name) and not self.cert_file:
                raise ValueError(f"{name} is given without cert_file, the certificate that it belongs to: give both")
        if not self.verify and self.ca_file:
            raise ValueError("verify is false, so ca_file would not be looked at: remove one of them")
        return self


class BrokerConfig(Section):
    """RabbitMQ 3.10 or newer."""

    url: str | None = None
    """``amqp://user:password@host:port/vhost``, or ``amqps://`` with TLS. Several nodes of a cluster are a list, or
    separated by commas: each connect tries them in turn, starting with a random node. None: ``url_file``, else
    ``TRINITY_MQ_BROKER_URL``, else the file named by ``TRINITY_MQ_BROKER_URL_FILE``, else a private node, else Docker.
    """
    url_file: UserFile = None
    """File with the value of ``url``, one URL in each line. It is read at each connect, so it may be rotated."""
    password_file: UserFile = None
    """File with the password for URLs without a password. The whole content is the password. It is read at each
    connect. None: the file named by ``TRINITY_MQ_BROKER_PASSWORD_FILE``."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    """Verification of the broker of an ``amqps://`` URL, and the client certificate."""
    max_message_bytes: int = Field(default=8 * 1024**2, ge=64 * 1024, le=16 * 1024**2)
    """Maximum bytes of one message. Producers split larger bodies. RabbitMQ 4 closes the channel above 16 MiB."""
    max_batch_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """Maximum bytes of a batch, since one operator holds it completely in memory. A larger batch fails."""
    compression: Literal["none", "zstd"] = "none"
    """Compression of experience bodies that are written. Readers accept both. zstd costs CPU time and saves bandwidth.
    """
    blob_store: str | None = None
    """Store for single experiences larger than ``max_message_bytes``; the message then holds only a reference. It is an
    fsspec URL such as ``s3://bucket/tmq`` or ``file:///data/tmq``, or an absolute path. Runners, operators and trainer
    must reach it under the same URL. Credentials come from the environment or files of its library. Change it only
    between runs: references into another store are refused. Each run has a folder with its name in the store, so runs
    of the same name on several brokers need separate stores. None: such an experience is an error."""
    heartbeat: float = Field(default=10.0, ge=1.0)
    """Seconds between AMQP heartbeats."""
    connect_timeout: float = Field(default=60.0, gt=0)
    """Seconds for which an agent waits for the broker when it starts."""
    consumer_timeout: float = Field(default=86_400.0, ge=60, le=7 * 86_400)
    """Seconds for which an agent may hold a message (a runner a slice, an operator a batch) before RabbitMQ returns it
    to the queue. From RabbitMQ 3.12 on, the run's queues set this limit once, when they are declared. A private node
    allows a week. For other brokers, `trinity-mq doctor` shows the line that their configuration needs."""
    ready_max_bytes: int = Field(default=2 * 1024**3, ge=64 * 1024**2)
    """Maximum bytes kept in the stream of processed batches."""
    results_max_bytes: int = Field(default=512 * 1024**2, ge=64 * 1024**2)
    """Maximum bytes kept in the stream of results."""
    sessions_max_bytes: int = Field(default=2 * 1024**3, ge=256 * 1024**2)
    """Maximum bytes kept in the stream of sessions, which a gateway declares. The broker deletes 64 MiB at a time.
    Messages of unsettled sessions are published again once they lie a quarter of this size behind the end of the
    stream."""
    submitted_max_bytes: int = Field(default=1024**3, ge=64 * 1024**2)
    """Maximum bytes of submitted tasks that wait in the queue ``submitted``. The broker refuses further tasks, and
    their submitter retries. An existing queue keeps its limit."""
    dead_max_bytes: int = Field(default=512 * 1024**2, ge=64 * 1024**2)
    """Maximum bytes of dead letters in the queue ``dead``. Beyond that the broker drops the oldest; `trinity-mq why`
    shows how many were dropped. An existing queue keeps its limit."""
    delivery_limit: int = Field(default=5, ge=1)
    """Number of deliveries after which a slice counts as poisoned or a batch as failed, if at least one delivery was
    seen to fail. Deliveries that were returned to the queue in good order do not count."""

    @property
    def publish_timeout(self) -> float:
        """Seconds after which an unconfirmed publish is an error."""
        return PUBLISH_TIMEOUT

    @property
    def max_task_bytes(self) -> int:
        """Maximum bytes of a task's record, or of a submitted task, that fit into a slice."""
        return self.max_message_bytes - SLICE_RESERVE_BYTES

    @field_validator("url", mode="before")
    @classmethod
    def _join_urls(cls, value: Any) -> Any:
        """Join a list of URLs with commas."""
        if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
            return ",".join(value)
        return value

    @model_validator(mode="after")
    def _check_url_source(self) -> BrokerConfig:
        if self.url and self.url_file:
            raise ValueError("url and url_file are both given: remove one of them")
        return self

    @field_validator("blob_store")
    @classmethod
    def _blob_url(cls, value: str | None) -> str | None:
        """Return a URL without a trailing slash; a path becomes a ``file://`` URL."""
        if value is None:
            return None
        if "://" not in value:
            path = expand_user(value)
            if not path.is_absolute():
                raise ValueError(
                    f"{value!r} is a relative path, which means a different folder in each working directory; give an "
                    "absolute path or a URL such as s3://bucket/tmq"
                )
            value = f"file://{path}"
        url = urlsplit(value)
        if url.password:
            raise ValueError(
                "the URL holds a password and would be part of every reference; give the password to the storage "
                "library instead"
            )
        is_relative = url.scheme in {"file", "local"} and url.netloc
        if is_relative or "::" in value or not url.path.strip("/") + url.netloc:
            raise ValueError(
                f"{value!r} does not name a single place; wanted a URL such as s3://bucket/tmq or file:///data/tmq"
            )
        return value.rstrip("/")

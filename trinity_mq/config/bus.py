"""The broker section: address, TLS, limits and timeouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section

SLICE_RESERVE_BYTES = 8 * 1024
"""Bytes of a slice's message beside its task."""


class TlsConfig(Section):
    """Verification of ``amqps://``. All files are PEM and read again at each connect, so they may be rotated."""

    ca_file: str | None = None
    """Certificates of the authorities that may sign the broker's certificate. None: those that this system trusts."""
    cert_file: str | None = None
    """Our own certificate, for a broker that asks for one, with the chain that leads to its authority."""
    key_file: str | None = None
    """Key of ``cert_file``. None: it is in ``cert_file`` too."""
    key_password_file: str | None = None
    """File with the password of an encrypted key. None: the environment's ``TRINITY_MQ_BROKER_KEY_PASSWORD``."""
    server_name: str | None = None
    """The name that the broker's certificate must hold. None: the host in the URL."""
    verify: bool = True
    """False: anybody on the path may read and change everything, passwords included; each start logs a warning."""

    @field_validator("ca_file", "cert_file", "key_file", "key_password_file")
    @classmethod
    def _expand(cls, value: str | None) -> str | None:
        return str(Path(value).expanduser()) if value else None

    @model_validator(mode="after")
    def _key_of_a_certificate(self) -> TlsConfig:
        for name in ("key_file", "key_password_file"):
            if getattr(self, name) and not self.cert_file:
                raise ValueError(f"{name} is given without cert_file, the certificate that it belongs to: give both")
        if not self.verify and self.ca_file:
            raise ValueError("verify is false, so ca_file would not be looked at: remove one of them")
        return self


class BrokerConfig(Section):
    """RabbitMQ 3.10 or newer."""

    url: str | None = None
    """``amqp://user:password@host:port/vhost``, or ``amqps://`` with TLS. Several nodes of a cluster as a list, or with
    commas between: each connect tries them in turn from a random one on. None: ``url_file``, else
    ``TRINITY_MQ_BROKER_URL``, else the file named by ``TRINITY_MQ_BROKER_URL_FILE``, else a private node, else Docker.
    """
    url_file: str | None = None
    """A file that holds what ``url`` would, one URL a line; read anew at each connect, so it may be rotated."""
    password_file: str | None = None
    """A file with the password of URLs that hold none, as it is; read anew at each connect. None: the file named by
    ``TRINITY_MQ_BROKER_PASSWORD_FILE``."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    """Verification of the broker of an ``amqps://`` URL, and our own certificate."""
    max_message_bytes: int = Field(default=8 * 1024**2, ge=64 * 1024, le=16 * 1024**2)
    """Most bytes of one message; producers split larger bodies. RabbitMQ 4 closes the channel above 16 MiB."""
    max_batch_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """Most bytes of a batch, which one operator holds whole; a larger batch fails."""
    compression: Literal["none", "zstd"] = "none"
    """Compression of written experience bodies; readers accept both. zstd costs CPU time and saves bandwidth."""
    blob_store: str | None = None
    """Store of single experiences over ``max_message_bytes``, of which only a reference is sent: an fsspec URL
    such as ``s3://bucket/tmq`` or ``file:///data/tmq``, or an absolute path. Runners, operators and trainer reach it
    under this same URL; credentials come from its library's own environment or files. Change it only between runs:
    references into another store are refused. Each run has a folder of its name in it, so runs of one name on several
    brokers need a store each. None: such an experience is an error.
    """
    heartbeat: float = Field(default=10.0, ge=1.0)
    """Seconds between AMQP heartbeats."""
    connect_timeout: float = Field(default=60.0, gt=0)
    """Seconds for which an agent waits for the broker at its start."""
    publish_timeout: float = Field(default=300.0, gt=0)
    """Seconds until an unconfirmed publish is an error."""
    consumer_timeout: float = Field(default=86_400.0, ge=60, le=7 * 86_400)
    """Seconds for which an agent may hold a message, a runner a slice and an operator a batch; RabbitMQ then takes it
    back. From 3.12 on the run's queues ask for it themselves, once, when they are made; a private node allows a week;
    for other brokers `trinity-mq doctor` says which line their configuration needs."""
    ready_max_bytes: int = Field(default=2 * 1024**3, ge=64 * 1024**2)
    """Most bytes kept of the stream of processed batches."""
    results_max_bytes: int = Field(default=512 * 1024**2, ge=64 * 1024**2)
    """Most bytes kept of the stream of results."""
    sessions_max_bytes: int = Field(default=2 * 1024**3, ge=256 * 1024**2)
    """Most bytes kept of the stream of sessions, which a gateway declares. The broker cuts 64 MiB at a time; what is
    not settled is published again once it lies a quarter of this back."""
    submitted_max_bytes: int = Field(default=1024**3, ge=64 * 1024**2)
    """Most bytes of submitted tasks that wait in the queue ``submitted``. The broker refuses further ones, and their
    submitter tries again. A queue keeps the bound that it was made with."""
    dead_max_bytes: int = Field(default=512 * 1024**2, ge=64 * 1024**2)
    """Most bytes of dead letters in the queue ``dead``. The broker drops the oldest ones beyond that; `trinity-mq why`
    says how many. A queue keeps the bound that it was made with."""
    delivery_limit: int = Field(default=5, ge=1)
    """Deliveries after which a slice is poisoned or a batch failed, if one was seen to fail. What was given back in
    good order does not count."""

    @property
    def max_task_bytes(self) -> int:
        """Most bytes of a task's record, or of a submitted task, that a slice has room for."""
        return self.max_message_bytes - SLICE_RESERVE_BYTES

    @field_validator("url", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Join a list of URLs by commas."""
        if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
            return ",".join(value)
        return value

    @field_validator("url_file", "password_file")
    @classmethod
    def _expand(cls, value: str | None) -> str | None:
        return str(Path(value).expanduser()) if value else None

    @model_validator(mode="after")
    def _one_place(self) -> BrokerConfig:
        if self.url and self.url_file:
            raise ValueError("url and url_file are both given: remove one of them")
        return self

    @field_validator("blob_store")
    @classmethod
    def _blob_url(cls, value: str | None) -> str | None:
        """Return a URL without a slash at its end; a path becomes a ``file://`` URL."""
        if value is None:
            return None
        if "://" not in value:
            path = Path(value).expanduser()
            if not path.is_absolute():
                raise ValueError(
                    f"{value!r} is a relative path, another folder for each process that is started elsewhere; give "
                    "an absolute path or a URL such as s3://bucket/tmq"
                )
            value = f"file://{path}"
        url = urlsplit(value)
        if url.password:
            raise ValueError("the URL holds a password, and goes with every reference; give it to the library instead")
        is_relative = url.scheme in {"file", "local"} and url.netloc
        if is_relative or "::" in value or not url.path.strip("/") + url.netloc:
            raise ValueError(f"{value!r} names no one place; wanted one like s3://bucket/tmq or file:///data/tmq")
        return value.rstrip("/")

"""The broker section: where it is and how patiently we talk to it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from trinity_mq.config.base import Section


class BrokerConfig(Section):
    """RabbitMQ 3.10 or newer."""

    url: str | None = None
    """``amqp://user:password@host:port/vhost``. None: ``TRINITY_MQ_BROKER_URL``, else a private node, else Docker."""
    max_message_bytes: int = Field(default=8 * 1024**2, ge=64 * 1024, le=16 * 1024**2)
    """Producers split above this. RabbitMQ 4 closes the channel above 16 MiB."""
    max_batch_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """A batch is held whole by one operator; a larger one fails as a batch, not as an operator."""
    compression: Literal["none", "zstd"] = "none"
    """What experience bodies are written with; readers take both. zstd costs CPU time and saves broker and network."""
    blob_store: str | None = None
    """Where a single experience over ``max_message_bytes`` goes, so that only a reference to it travels: an fsspec URL
    such as ``s3://bucket/tmq`` or ``file:///data/tmq``, or an absolute path. Runners, operators and trainer reach it
    under this same URL; credentials come from its library's own environment or files. Change it only between runs:
    references into another store are refused. Each run has a folder of its name in it, so runs of one name on several
    brokers need a store each. None: such an experience is an error.
    """
    heartbeat: float = Field(default=10.0, ge=1.0)
    """Seconds."""
    connect_timeout: float = Field(default=60.0, gt=0)
    """Seconds to wait for the broker at start."""
    publish_timeout: float = Field(default=300.0, gt=0)
    """Seconds until an unconfirmed publish is an error."""
    ready_max_bytes: int = Field(default=2 * 1024**3, ge=64 * 1024**2)
    """Retention of the stream of processed batches."""
    results_max_bytes: int = Field(default=512 * 1024**2, ge=64 * 1024**2)
    """Retention of the stream of results."""
    delivery_limit: int = Field(default=5, ge=1)
    """Deliveries after which a slice is poisoned or a batch failed."""

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

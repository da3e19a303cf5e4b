"""The broker section: where it is and how patiently we talk to it."""

from __future__ import annotations

from pydantic import Field

from trinity_mq.config.base import Section


class BrokerConfig(Section):
    """RabbitMQ 3.10 or newer."""

    url: str | None = None
    """``amqp://user:password@host:port/vhost``. None: ``TRINITY_MQ_BROKER_URL``, else a private node, else Docker."""
    max_message_bytes: int = Field(default=8 * 1024**2, ge=64 * 1024, le=16 * 1024**2)
    """Producers split above this. RabbitMQ 4 closes the channel above 16 MiB."""
    max_batch_bytes: int = Field(default=2 * 1024**3, ge=1024**2)
    """A batch is held whole by one operator; a larger one fails as a batch, not as an operator."""
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

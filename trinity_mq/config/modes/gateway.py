"""The section of mode ``serve``: the gateway between agents that know only a base URL and the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from trinity_mq.config.base import Section
from trinity_mq.config.hosts import is_loopback

Merge = Literal["prefix", "per_call", "renderer"]


class GatewayConfig(Section):
    """The HTTP gateway: sessions, their rewards, and how they become training batches."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback it needs ``key_file``, and TLS."""
    port: int = Field(default=8710, ge=0, le=65535)
    """Port to listen on; 0: a free one. Further gateways on one machine take the ports behind it."""
    num_gateways: int = Field(default=1, ge=1)
    """Gateways that ``trinity-mq run`` starts; a process each, all of which know every session."""
    public_url: str = ""
    """Base URL by which agents reach the gateways, such as that of a balancer. Empty: host and port."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Further names of this machine that clients may call the gateway by where ``key_file`` is not set. Loopback names,
    ``host`` and that of ``public_url`` always count. A request by another name may be a web page's, which has its own
    name resolve to this machine, and is refused."""
    key_file: str | None = None
    """File with the keys, one a line, that may make sessions and see all of them. None: whoever reaches it may."""
    cert_file: str | None = None
    """PEM file with the certificate for TLS, and the chain behind it."""
    cert_key_file: str | None = None
    """Key of ``cert_file``. None: it is in ``cert_file`` too."""
    tls_elsewhere: bool = False
    """A balancer in front speaks TLS: the gateway may listen beyond loopback without."""
    idle_ttl: float = Field(default=3600.0, gt=0)
    """Seconds without a call or a reward after which a session ends by itself, unless it asks for another limit."""
    reward_ttl: float = Field(default=86_400.0, gt=0)
    """Seconds for which a session that has ended waits for a reward, and for the others of its group, unless it asks
    for another limit."""
    group_size: int | None = Field(default=None, ge=2)
    """Sessions of a group. None: ``algorithm.repeat_times``."""
    merge: Merge = "prefix"
    """Experiences of a session. ``prefix``: turns whose prompt begins with exactly the tokens of an earlier turn become
    one. ``per_call``: each answer is one. ``renderer``: as ``prefix``, and a prompt of a chat is rendered behind the
    tokens of the turn before where these are of its text, so that no turn is lost to another way to cut the same text
    into tokens."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Reward of an answer that has none of its own: that of the next one, times this."""
    sampling: Literal["configured", "agent"] = "configured"
    """``configured``: sessions that are trained on are sampled as ``explorer.rollout_model`` says, whatever the agent
    asks for. ``agent``: its temperature counts, which is kept with each answer."""
    batch_wait: float = Field(default=30.0, gt=0)
    """Seconds for which an incomplete batch waits for further sessions before it is trained on as it is."""
    record_timeout: float = Field(default=2.0, gt=0)
    """Seconds that an answer waits for the broker's confirm. Then it is given as not recorded, and counted."""
    when_behind: Literal["sample", "refuse"] = "sample"
    """Treatment of new sessions while training is behind. ``sample``: a part of them is recorded, the others are
    answered and not. ``refuse``: 429."""
    max_waiting: int = Field(default=4096, ge=1)
    """Sessions that wait to be trained on, from which on training counts as behind."""
    max_kept_bytes: int = Field(default=512 * 1024**2, ge=1024**2)
    """Bytes of all sessions that are not settled, from which on nothing further is recorded."""
    max_open: int = Field(default=10_000, ge=1)
    """Sessions that may be open at a time."""
    max_calls: int = Field(default=1000, ge=1)
    """Calls of one session."""
    calls_per_minute: int = Field(default=600, ge=1)
    """Calls of one session within a minute."""
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1024)
    """Bytes of one request."""
    not_ready_timeout: float = Field(default=60.0, ge=0)
    """Seconds that a call waits for an engine with weights."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds for one answer of an engine."""

    @field_validator("key_file", "cert_file", "cert_key_file")
    @classmethod
    def _expand(cls, value: str | None) -> str | None:
        return str(Path(value).expanduser()) if value else None

    @property
    def is_local(self) -> bool:
        """Only programs on this machine reach it."""
        return is_loopback(self.host)

    @property
    def host_names(self) -> frozenset[str]:
        """Names by which clients may call it where nobody needs a key, besides those of loopback."""
        named = urlsplit(self.public_url).hostname
        return frozenset(name.lower() for name in (self.host, named, *self.allowed_hosts) if name)

    @model_validator(mode="after")
    def _safe(self) -> GatewayConfig:
        if self.cert_key_file and not self.cert_file:
            raise ValueError("gateway.cert_key_file is given without cert_file, the certificate that it belongs to")
        if self.is_local:
            return self
        if not self.key_file:
            raise ValueError(
                f"gateway.host is {self.host}, which others can reach: set gateway.key_file to a file with a key, such "
                "as one made by `openssl rand -hex 32`, or gateway.host to 127.0.0.1"
            )
        if not (self.cert_file or self.tls_elsewhere):
            raise ValueError(
                f"gateway.host is {self.host} without TLS, so that keys would travel in clear: set gateway.cert_file, "
                "or gateway.tls_elsewhere: true where a balancer in front speaks TLS"
            )
        return self

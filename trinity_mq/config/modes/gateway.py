"""The section of mode ``serve``: the gateway between agents that know only a base URL and the engines."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from trinity_mq.config.base import Section, UserFile
from trinity_mq.config.hosts import is_loopback

Merge = Literal["prefix", "per_call", "renderer"]
SharedPrefix = Literal["first", "last", "mean"]
Switches = Literal["agent", "configured"]


class GatewayConfig(Section):
    """The HTTP gateway: sessions, their rewards, and how they become training batches."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback needs ``key_file`` and TLS."""
    port: int = Field(default=8710, ge=0, le=65535)
    """Port to listen on. 0: a free port. Further gateways on the same machine take the following ports."""
    num_gateways: int = Field(default=1, ge=1)
    """Number of gateways that ``trinity-mq run`` starts. Each is a process, and all of them know every session."""
    public_url: str = ""
    """Base URL by which agents reach the gateways, such as the URL of a load balancer. Empty: host and port."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Additional host names by which clients may call the gateway if ``key_file`` is not set. Loopback names, ``host``
    and the host of ``public_url`` are always allowed. A request for another name is refused, since it may come from a
    web page whose own host name resolves to this machine (DNS rebinding)."""
    key_file: UserFile = None
    """File with the keys that may create sessions and see all of them, one key in each line. None: no key is needed."""
    cert_file: UserFile = None
    """PEM file with the TLS certificate, followed by its chain."""
    cert_key_file: UserFile = None
    """Key of ``cert_file``. None: ``cert_file`` also holds the key."""
    tls_elsewhere: bool = False
    """A load balancer in front of the gateway terminates TLS, so the gateway may listen without TLS on an address other
    than loopback."""
    idle_ttl: float = Field(default=3600.0, gt=0)
    """Seconds without a call or a reward after which a session ends by itself, unless it requests another limit."""
    reward_ttl: float = Field(default=86_400.0, gt=0)
    """Seconds for which an ended session waits for a reward and for the other sessions of its group, unless it requests
    another limit."""
    group_size: int | None = Field(default=None, ge=2)
    """Number of sessions in a group, unless a session requests another number. None: ``algorithm.repeat_times``."""
    merge: Merge = "renderer"
    """Experiences of a session. ``renderer``: a turn whose prompt begins with exactly the tokens of an earlier turn is
    merged with that turn into one experience, and a prompt that continues a recorded answer is rendered behind the
    exact tokens of that answer, unless the model's family would write the past in another form. ``prefix``: turns are
    merged in the same way, but each prompt is rendered as a whole, so that a turn is lost where the same text is
    tokenized differently. ``per_call``: each answer is an experience."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount for earlier turns: an answer without a reward of its own gets this factor times the reward of the next
    answer in its lineage."""
    shared_prefix: SharedPrefix = "first"
    """Credit of answers that several branches of a conversation share: parallel branches, several choices, or a
    conversation that was resumed at an earlier turn. The shared answers are trained on once; the other branches hold
    them as context. ``first``: they belong to the experience of the first branch. ``last``: to the experience of the
    last branch, such as the final attempt of an agent that goes back. ``mean``: they are an experience of their own
    with the mean of the rewards of their branches, times ``turn_discount``."""
    sampling: Literal["configured", "agent"] = "configured"
    """``configured``: sessions that are trained on are sampled with the parameters of ``explorer.rollout_model``, and
    the agent's parameters, also ``logit_bias``, ``min_tokens`` and ``ignore_eos``, are ignored. ``agent``: the agent's
    parameters are used, and the temperature is recorded with each answer."""
    switches: Switches = "agent"
    """``agent``: agents may switch thinking and set other variables of the chat template, as they may write any prompt;
    a value that the template of the model does not have is refused. ``configured``: these options of agents are
    ignored, and ``model.chat_template_kwargs`` apply, for agents that always send a level that the model lacks."""
    batch_wait: float = Field(default=30.0, gt=0)
    """Seconds for which an incomplete batch waits for further sessions. Then it is trained on although it is
    incomplete."""
    record_timeout: float = Field(default=2.0, gt=0)
    """Seconds that an answer waits for the broker's confirm. After that the answer is returned anyway, and counted as
    not recorded."""
    when_behind: Literal["sample", "refuse"] = "sample"
    """Treatment of new sessions to train on while training is behind: a random share of them is recorded, smaller the
    more sessions wait. ``sample``: the others are answered but not recorded. ``refuse``: the others get status 429."""
    max_waiting: int = Field(default=4096, ge=1)
    """Number of sessions waiting to be trained on at which training counts as behind."""
    max_kept_bytes: int = Field(default=512 * 1024**2, ge=1024**2)
    """Bytes of all unsettled sessions at which no new session is recorded."""
    max_open: int = Field(default=10_000, ge=1)
    """Maximum number of open sessions."""
    max_calls: int = Field(default=1000, ge=1)
    """Maximum number of calls in one session."""
    max_session_tokens: int = Field(default=10_000_000, ge=1)
    """Maximum number of recorded tokens in one session; tokens that several answers share count once. Further calls are
    refused. It bounds the memory that a gateway needs for a session: some 40 bytes for each token."""
    calls_per_minute: int = Field(default=600, ge=1)
    """Maximum number of calls in one session within a minute."""
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1024)
    """Maximum bytes of one request."""
    not_ready_timeout: float = Field(default=60.0, ge=0)
    """Seconds for which a call waits for an engine with weights."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds for one answer of an engine."""

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can reach the gateway."""
        return is_loopback(self.host)

    @property
    def host_names(self) -> frozenset[str]:
        """Host names by which clients may call the gateway if no key is needed, in addition to loopback names."""
        named = urlsplit(self.public_url).hostname
        return frozenset(name.lower() for name in (self.host, named, *self.allowed_hosts) if name)

    @model_validator(mode="after")
    def _check_exposure(self) -> GatewayConfig:
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

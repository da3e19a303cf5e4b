"""Events of sessions: an agent's conversation with the model through the gateway, its rewards, and its outcome.

All of these messages are on one stream, ``tmq.<run>.sessions``. Every gateway derives the same state from it. Any
program may publish rewards and ends there, as JSON or MessagePack with the routing key ``session``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from trinity_mq.messages.base import Message, Version

Record = Literal["train", "eval", "off"]
Scope = Literal["call", "reward", "end", "read"]
KeyScope = Literal["call", "reward", "end", "read", "replay"]
"""Scopes that a key can get over HTTP; the message has a separate field for ``replay``."""
SCOPES: tuple[Scope, ...] = ("call", "reward", "end", "read")
"""Scopes of a key by default. ``replay`` must be granted explicitly."""
SESSION_ID = r"^[A-Za-z0-9_-]{1,64}$"
OF_SESSIONS = "sessions-"
"""Prefix of the ids of submissions that a gateway makes from sessions. Other submitters may not use it."""
LONGEST_LABEL = 200
"""Maximum characters of a label, a group's name or a call's id."""

Drop = Literal["discarded", "failed", "evaluation", "no reward", "no answers", "not recorded", "group not full"]
"""Reasons why sessions do not become a task. Sessions of an evaluation are not meant to become a task."""


class SessionOpened(Message):
    """A session begins."""

    kind: ClassVar[str] = "session_opened"

    session: str = Field(pattern=SESSION_ID)
    opened: float
    """Seconds since the epoch."""
    key_hash: str = ""
    """SHA-256 of the session's key, in hexadecimal digits; empty: the session does not have a key."""
    scopes: list[Scope] = Field(default_factory=lambda: list(SCOPES))
    """Scopes of the key."""
    may_replay: bool = False
    """The key may end the session with a replay (scope ``replay`` of ``POST /sessions``)."""
    record: Record = "train"
    """``train``: the answers are trained on. ``eval``: the rewards are reported. ``off``: the session is not
    recorded."""
    sampled_out: bool = False
    """True if ``train`` was requested, but training is so far behind that this session is not recorded."""
    task: dict[str, Any] = Field(default_factory=dict)
    """The task's record, for replays."""
    group: str = Field(default="", max_length=LONGEST_LABEL)
    """Sessions with the same group are compared with each other. Empty: no group."""
    group_size: int = Field(default=1, ge=1)
    """Number of sessions in the group."""
    labels: dict[str, str] = Field(default_factory=dict)
    idle_ttl: float = Field(gt=0)
    """Seconds without a call or a reward after which the session ends automatically."""
    reward_ttl: float = Field(gt=0)
    """Seconds for which the session waits, after its end, for a reward and for the other sessions of its group."""
    ended: bool = False
    """True if the session is a single call and ends with it."""


class SampledChoice(BaseModel):
    """One sampled answer of an engine."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    ids: list[int] = Field(default_factory=list)
    """Token ids."""
    logprobs: list[float | None] = Field(default_factory=list)
    """One logprob for each token; null where the engine did not report it."""
    text: str = ""
    finish_reason: str | None = None
    versions: list[tuple[int, int, int]] = Field(default_factory=list)
    """First token, generation and step of each weight version, in the order in which the versions sampled."""
    conversation: str = ""
    """Digest of the request's messages and this answer, which is equal for the same messages in a later request; empty:
    the request had no messages."""
    identity: str = ""
    """Digest of the ids of the answer's tool calls, or of its thoughts, which tells equal answers apart; empty: it has
    neither."""
    malformed_calls: int = 0
    """Number of tool calls that the answer begins and that the engine could not read."""


class StoredResponse(BaseModel):
    """A response to which a later request may refer by its id, instead of sending the conversation again."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    follows: str = ""
    """Call whose stored response comes before ``messages``; empty: ``messages`` begin the conversation."""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """New messages of the request, without instructions, in the format of chat completions."""
    answer: dict[str, Any] = Field(default_factory=dict)
    """The answer as a chat message."""


class SessionCall(Message):
    """A request of a session and the answer."""

    kind: ClassVar[str] = "session_call"

    session: str
    call: str
    """Id of the answer that the client received."""
    at: float
    """Time in seconds since the epoch."""
    path: str = ""
    """Route of the request, such as ``/v1/chat/completions``."""
    temperature: float = 1.0
    continues: str = ""
    """The call whose prompt and answer are a prefix of this prompt, token by token; empty: it begins a lineage."""
    choice: int = 0
    """Index of the continued answer among the choices of that call."""
    prompt: list[int] = Field(default_factory=list)
    """Token ids of the prompt, without the tokens of the call that it continues."""
    prompt_text: str = ""
    """Text that the template rendered; with ``continues``, only the new part if it is known."""
    choices: list[SampledChoice] = Field(default_factory=list)
    version: Version | None = None
    """Weight version, if the choices do not contain versions."""
    supersedes: str = ""
    """A call that its client abandoned and repeated with this call. The abandoned call is not trained on."""
    break_cause: str = ""
    """Why the prompt does not begin with the tokens of the answer that its messages continue: ``template``, ``retoken``
    or ``temperature``. Empty: it does, or its messages continue no answer of the session. Release 0.2.0 wrote ``new``
    for these."""
    tied: bool = False
    """True if the client may have continued another answer, equal to the continued one."""
    stored: StoredResponse | None = None
    """Null: no later request can refer to the response by its id."""
    request: dict[str, Any] = Field(default_factory=dict)
    """``messages`` and ``tools``, or ``prompt``, of the first request, for a replay; empty: not recorded."""
    digest: str = ""
    """Digest that is equal for equal requests, so that any gateway recognizes a repeated request; empty: unknown."""
    retry: int = 0
    """How often the client sent the request before, according to the client; also 0 if those attempts are known
    calls."""
    began: float = 0.0
    """Arrival of the request in seconds since the epoch; 0: unknown."""
    siblings: list[str] = Field(default_factory=list)
    """Calls with the same request that were in progress at the same gateway at the same time. They are not repeats."""
    traceparent: str = ""
    """``traceparent`` header of the request (W3C Trace Context), which links its trace to the batch's trace; empty:
    none."""

    @property
    def message_id(self) -> str:
        """Id of the message that carries this call."""
        return f"call-{self.session}-{self.call}"


class SessionReward(Message):
    """A reward of a session, of one of its lineages or of one of its answers. The last reward counts, unless it is
    added to the earlier rewards.
    """

    kind: ClassVar[str] = "session_reward"

    session: str
    reward: float = Field(allow_inf_nan=False)
    call: str | int | None = None
    """Id of the answer, or its number counted from 0; null: the whole session."""
    choice: int | None = Field(default=None, ge=0)
    """Index of the answer if the request has several."""
    lineage: str | None = None
    """Id of any call of the lineage that is rewarded; null: the session or ``call``. Gateways write the id to ``call``
    too, because release 0.2.0 ignores this field and would reward the session."""
    how: Literal["replace", "add"] = "replace"
    metrics: dict[str, float] = Field(default_factory=dict)
    final: bool = False
    """True if this reward ends the session."""
    group: str = Field(default="", max_length=LONGEST_LABEL)
    """Group of a session that was opened without a group."""


class SessionReplay(BaseModel):
    """The first request of a session, sent to the model again as a separate task."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    workflow: str = Field(min_length=1)
    """Registered name or dotted path."""
    runs: int = Field(ge=1, le=4096)
    """Number of runs of the task; they form a group."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)


class SessionEnd(Message):
    """A session ends: no further answers are accepted, but a reward may still arrive."""

    kind: ClassVar[str] = "session_end"

    session: str
    outcome: Literal["done", "failed", "discard"] = "done"
    """``discard``: the session is not trained on. ``failed``: it is trained on only if it has a reward."""
    reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of the whole session."""
    metrics: dict[str, float] = Field(default_factory=dict)
    replay: SessionReplay | None = None
    """Train on the runs of this replay instead of the session."""
    reason: str = Field(default="", max_length=1000)
    """Reason in one line, for people."""


class SessionsCommitted(Message):
    """Groups with enough members for a comparison stop waiting for further members."""

    kind: ClassVar[str] = "sessions_committed"


class SessionsDecided(Message):
    """A decision about sessions that are over, made by the gateway that acts for the run."""

    kind: ClassVar[str] = "sessions_decided"

    sessions: list[str]
    """All sessions of one task."""
    submission: str = ""
    """Id of the task made from the sessions; empty: the sessions are dropped."""
    dropped: Drop | None = None
    """Why the sessions do not become a task."""
    reason: str = ""
    """Reason in one line, for people."""


class SessionsTrained(Message):
    """The trainer has consumed the batch with these sessions."""

    kind: ClassVar[str] = "sessions_trained"

    ticket: str
    outcome: str
    generation: int
    step: int
    """Train step that trained on the sessions, if ``outcome`` is ``trained``."""
    reason: str = ""
    offset: int = 0
    """Position on the results stream up to which the trainer's progress was read."""


class SessionRefused(Message):
    """An event that no session accepts, such as a reward for an unknown session."""

    kind: ClassVar[str] = "session_refused"

    offset: int
    """Offset of the event in the stream."""
    reason: str

"""Events of sessions: an agent's conversation with the model through the gateway, its rewards, and what became of it.

All of them are on one stream, ``tmq.<run>.sessions``, from which every gateway works out the same state. Rewards and
ends may be published there by any program, as JSON or MessagePack, with the routing key ``session``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from trinity_mq.messages.base import Message, Version

Record = Literal["train", "eval", "off"]
Scope = Literal["call", "reward", "end", "read"]
KeyScope = Literal["call", "reward", "end", "read", "replay"]
"""Scopes that a key may be given over HTTP; ``replay`` is a field of its own in the message."""
SCOPES: tuple[Scope, ...] = ("call", "reward", "end", "read")
"""Scopes of a key that is given none. Replays need to be granted by name."""
SESSION_ID = r"^[A-Za-z0-9_-]{1,64}$"
OF_SESSIONS = "sessions-"
"""Beginning of the ids of submissions that a gateway makes of sessions; no outsider may use it."""
LONGEST_LABEL = 200
"""Characters of a label, a group's name or a call's id."""

Drop = Literal["discarded", "failed", "evaluation", "no reward", "no answers", "not recorded", "group not full"]
"""Reasons why sessions do not become a task. Those of an evaluation were never meant to."""


class SessionOpened(Message):
    """A session begins."""

    kind: ClassVar[str] = "session_opened"

    session: str = Field(pattern=SESSION_ID)
    opened: float
    """Seconds since the epoch."""
    key_hash: str = ""
    """SHA-256 of the session's key, in hexadecimal digits; empty: it has none."""
    scopes: list[Scope] = Field(default_factory=lambda: list(SCOPES))
    """Scopes of the key."""
    may_replay: bool = False
    """The key may end the session with a replay: the scope ``replay`` of ``POST /sessions``."""
    record: Record = "train"
    """``train``: its answers are trained on. ``eval``: its rewards are reported. ``off``: nothing is kept."""
    sampled_out: bool = False
    """``train`` was asked for, and training is so far behind that this one is not recorded."""
    task: dict[str, Any] = Field(default_factory=dict)
    """The task's record, for whoever replays it."""
    group: str = Field(default="", max_length=LONGEST_LABEL)
    """Sessions with the same one are compared with each other. Empty: none."""
    group_size: int = Field(default=1, ge=1)
    """Sessions of a group."""
    labels: dict[str, str] = Field(default_factory=dict)
    idle_ttl: float = Field(gt=0)
    """Seconds without a call or a reward after which the session ends by itself."""
    reward_ttl: float = Field(gt=0)
    """Seconds for which it waits for a reward, and for the others of its group, after its end."""
    ended: bool = False
    """It is one call, and ends with it."""


class SampledChoice(BaseModel):
    """One answer of an engine, as it was sampled."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    ids: list[int] = Field(default_factory=list)
    """Token ids."""
    logprobs: list[float | None] = Field(default_factory=list)
    """One for each; null where the engine gave none."""
    text: str = ""
    finish_reason: str | None = None
    versions: list[tuple[int, int, int]] = Field(default_factory=list)
    """First token, generation and step of each version of the weights, in the order in which they sampled."""


class SessionCall(Message):
    """A request of a session and its answer."""

    kind: ClassVar[str] = "session_call"

    session: str
    call: str
    """Id of the answer, as its caller has it."""
    at: float
    """Seconds since the epoch."""
    path: str = ""
    """Route of the request, such as ``/v1/chat/completions``."""
    temperature: float = 1.0
    continues: str = ""
    """The call whose prompt and answer this prompt begins with, token by token; empty: none that is known."""
    choice: int = 0
    """Index of the answer among those of that call."""
    prompt: list[int] = Field(default_factory=list)
    """Token ids of the prompt, without those of the call that it continues."""
    prompt_text: str = ""
    """Text that the template rendered; with ``continues`` only its new part, where that is known."""
    choices: list[SampledChoice] = Field(default_factory=list)
    version: Version | None = None
    """Version of the weights, where the choices do not say."""
    supersedes: str = ""
    """A call that its client gave up and repeated with this one: it is not trained on."""
    break_cause: str = ""
    """Why the prompt does not continue an earlier call: ``new``, ``template``, ``retoken`` or ``temperature``; empty:
    it does, or is the first."""
    request: dict[str, Any] = Field(default_factory=dict)
    """``messages`` and ``tools``, or ``prompt``, of the first request, for a replay; empty: not kept."""
    digest: str = ""
    """Text that is the same for the same request, by which any gateway knows a repeat; empty: not known."""
    retry: int = 0
    """Number of times that the client sent the request before, as the client says; 0 also if those tries are known."""
    began: float = 0.0
    """Arrival of the request in seconds since the epoch; 0: not known."""
    siblings: list[str] = Field(default_factory=list)
    """Calls with the same request that were under way at the same gateway at the same time: other requests."""
    traceparent: str = ""
    """Header of the request (W3C Trace Context), by which its trace and that of the batch are linked; empty: none."""

    @property
    def message_id(self) -> str:
        """The id of its message."""
        return f"call-{self.session}-{self.call}"


class SessionReward(Message):
    """A reward of a session or of one of its answers. The last one counts, unless it is added to those before."""

    kind: ClassVar[str] = "session_reward"

    session: str
    reward: float = Field(allow_inf_nan=False)
    call: str | int | None = None
    """Id of the answer, or its number from 0; null: the whole session."""
    choice: int | None = Field(default=None, ge=0)
    """One of several answers to the same request."""
    how: Literal["replace", "add"] = "replace"
    metrics: dict[str, float] = Field(default_factory=dict)
    final: bool = False
    """It ends the session."""
    group: str = Field(default="", max_length=LONGEST_LABEL)
    """The group of a session that was begun without one."""


class SessionReplay(BaseModel):
    """The first request of a session, put to the model again as a task of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    workflow: str = Field(min_length=1)
    """Registered name or dotted path."""
    runs: int = Field(ge=1, le=4096)
    """Runs of the task: they are a group."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)


class SessionEnd(Message):
    """A session ends: no answer comes any more, a reward may."""

    kind: ClassVar[str] = "session_end"

    session: str
    outcome: Literal["done", "failed", "discard"] = "done"
    """``failed`` without a reward, and ``discard``, are not trained on."""
    reward: float | None = Field(default=None, allow_inf_nan=False)
    """As a reward of the whole session."""
    metrics: dict[str, float] = Field(default_factory=dict)
    replay: SessionReplay | None = None
    """Train on these runs in place of the session."""
    reason: str = Field(default="", max_length=1000)
    """In one line, for people."""


class SessionsCommitted(Message):
    """Groups that have enough members to be compared wait no longer for further ones."""

    kind: ClassVar[str] = "sessions_committed"


class SessionsDecided(Message):
    """A decision about sessions that are over, by the gateway that acts for the run."""

    kind: ClassVar[str] = "sessions_decided"

    sessions: list[str]
    """All those of one task."""
    submission: str = ""
    """Id of the task that they become; empty: they are dropped."""
    dropped: Drop | None = None
    """Why they do not become one."""
    reason: str = ""
    """In one line, for people."""


class SessionsTrained(Message):
    """The trainer has consumed the batch of some sessions."""

    kind: ClassVar[str] = "sessions_trained"

    ticket: str
    outcome: str
    generation: int
    step: int
    """Train step that learned from them, where ``outcome`` is ``trained``."""
    reason: str = ""
    offset: int = 0
    """Position on the results stream up to which the trainer's progress was read."""


class SessionRefused(Message):
    """An event that no session takes, such as a reward for one that is not known."""

    kind: ClassVar[str] = "session_refused"

    offset: int
    """Offset of the event in the stream."""
    reason: str


AnySessionEvent = (
    SessionOpened
    | SessionCall
    | SessionReward
    | SessionEnd
    | SessionsCommitted
    | SessionsDecided
    | SessionsTrained
    | SessionRefused
)

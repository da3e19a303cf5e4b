"""Experience: one sampled sequence with its rewards, logprobs and origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from trinity_mq.experience.eid import EID
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import (
    TENSOR_FIELDS,
    ExperienceError,
    TensorInput,
    number,
    sampling_temperature,
    values_equal,
    whole,
)
from trinity_mq.experience.rules import (
    DPO,
    MULTI_TURN,
    PLAIN_FIELDS,
    PROMPT_TRUNCATED,
    SINGLE_TURN,
    TRUNCATE_STATUSES,
    TYPES,
    Versions,
    as_eid,
    check_lengths,
    check_versions,
    checked_plain,
    tensors_by_name,
)


@dataclass(frozen=True)
class CustomField:
    """Copies ``Experience.info[source_field]`` into the training batch as ``destination_field``, in ``data_type``.

    All experiences of a batch have the same custom fields. A user-defined surrogate loss with a parameter of the name
    in ``destination_field`` gets the values, one for each trained token.
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype


@dataclass(init=False, eq=False, repr=False)
class Experience:
    """One sampled sequence: prompt and response tokens, the policy's logprobs, and its rewards.

    The type is determined at construction and kept: ``multi_turn`` if an action mask is given, else ``dpo`` if both
    ``chosen`` and ``rejected`` are given, else ``single_turn``. ``experience_type`` overrides this.

    * ``single_turn``, ``multi_turn``: ``tokens`` holds prompt and response. Response fields have one value per response
      token, ``len(tokens) - prompt_length`` values.
    * ``dpo``: ``tokens`` is the prompt, ``chosen`` and ``rejected`` are the two responses.

    Tensor fields accept lists, tuples, arrays and tensors. Fields may be assigned later; the codec checks them again.
    """

    encode_body: ClassVar[Callable[[list[Experience]], bytes]]
    decode_body: ClassVar[Callable[[bytes | memoryview, bool], list[Experience]]]
    """Set when the package is imported: the codec imports this class, so this class cannot import the codec."""

    eid: EID
    tokens: Tensor
    """Token ids, int32 ``[sequence]``."""
    logprobs: Tensor | None = None
    """Logprobs under the distribution from which the tokens were sampled, in nats, ``[response]``."""
    reward: float | None = None
    token_level_reward: Tensor | None = None
    """Reward of each token, ``[response]``."""
    advantages: Tensor | None = None
    """Advantage of each token, ``[response]``."""
    returns: Tensor | None = None
    """Target of the critic for each token, ``[response]``."""
    truncate_status: str | None = None
    """``prompt_truncated``, ``response_truncated`` or None."""
    info: dict[str, Any] = field(default_factory=dict)
    """Values by key, of any type that msgpack holds; also numpy scalars, arrays and tensors."""
    metrics: dict[str, float] = field(default_factory=dict)
    prompt_length: int = 1
    response_text: str | None = None
    prompt_text: str | None = None
    action_mask: Tensor | None = None
    """bool ``[response]``: True for a token that is trained on."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chosen: Tensor | None = None
    """Token ids of the preferred response (dpo), int32 ``[response]``."""
    rejected: Tensor | None = None
    """Token ids of the other response (dpo), int32 ``[response]``."""
    chosen_messages: list[dict[str, Any]] | None = None
    rejected_messages: list[dict[str, Any]] | None = None
    multi_modal_inputs: dict[str, Tensor] | None = None
    """Tensors by name; an empty mapping is stored as None."""
    teacher_logprobs: Tensor | None = None
    """Logprobs under a teacher model, in nats, ``[response]``."""
    custom_fields: list[CustomField] = field(default_factory=list)
    routed_experts: Tensor | None = None
    """Experts that the engine chose for each token except the last, uint8 ``[sequence - 1, layers, top-k]``."""
    versions: Versions | None = None
    """Run-length column of the sampling policy: rows ``(first token in the response, generation, step)``."""
    temperature: float | None = None
    """Divisor of the logits in the sampler."""
    taskset: str | None = None
    index: int | None = None
    """Position of the task in its taskset."""
    experience_type: str = SINGLE_TURN

    def __init__(
        self,
        *,
        eid: EID | Mapping[str, Any] | None = None,
        tokens: TensorInput,
        logprobs: TensorInput | None = None,
        reward: float | None = None,
        token_level_reward: TensorInput | None = None,
        advantages: TensorInput | None = None,
        returns: TensorInput | None = None,
        truncate_status: str | None = None,
        info: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        prompt_length: int = 1,
        response_text: str | None = None,
        prompt_text: str | None = None,
        action_mask: TensorInput | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chosen: TensorInput | None = None,
        rejected: TensorInput | None = None,
        chosen_messages: list[dict[str, Any]] | None = None,
        rejected_messages: list[dict[str, Any]] | None = None,
        multi_modal_inputs: Mapping[str, Any] | None = None,
        teacher_logprobs: TensorInput | None = None,
        custom_fields: Iterable[CustomField] | None = None,
        routed_experts: TensorInput | None = None,
        versions: Versions | None = None,
        temperature: float | None = None,
        taskset: str | None = None,
        index: int | None = None,
        experience_type: str | None = None,
    ) -> None:
        """Create an experience; the class describes the fields.

        Raises:
            ExperienceError: A field breaks a rule; the message names field, value and rule.
        """
        arguments = locals()
        for name, (normalise, _, _) in TENSOR_FIELDS.items():
            value = arguments[name]
            setattr(self, name, None if value is None and name != "tokens" else normalise(name, value))
        for name, kind in PLAIN_FIELDS.items():
            setattr(self, name, checked_plain(name, arguments[name], kind))
        self.eid = eid if isinstance(eid, EID) else as_eid(eid)
        self.multi_modal_inputs = None if multi_modal_inputs is None else tensors_by_name(multi_modal_inputs) or None
        self.reward = None if reward is None else number("reward", reward)
        self.temperature = None if temperature is None else sampling_temperature(temperature)
        self.index = None if index is None else whole("index", index)
        self.prompt_length = whole("prompt_length", prompt_length)
        self.truncate_status = truncate_status
        # Shallow copies: experiences of one task must not share dicts that operators write to.
        self.info = {} if info is None else dict(info)
        self.metrics = {} if metrics is None else dict(metrics)
        self.custom_fields = [] if custom_fields is None else list(custom_fields)
        if experience_type is not None:
            self.experience_type = experience_type
        elif action_mask is not None:
            self.experience_type = MULTI_TURN
        else:
            self.experience_type = SINGLE_TURN if chosen is None or rejected is None else DPO
        self._settle()
        response = None if self.experience_type == DPO else self.response_length
        self.versions = None if versions is None else check_versions(versions, response)

    def _settle(self) -> None:
        """Set fields that follow from the type, and check that the fields agree."""
        if self.experience_type not in TYPES:
            raise ExperienceError(f"experience_type is {self.experience_type!r}, wanted one of {', '.join(TYPES)}")
        if self.truncate_status not in TRUNCATE_STATUSES:
            raise ExperienceError(
                f"truncate_status is {self.truncate_status!r}, wanted one of {', '.join(map(repr, TRUNCATE_STATUSES))}"
            )
        if self.experience_type == DPO:
            self.prompt_length = self.tokens.shape[0]
        elif self.action_mask is None and self.experience_type == SINGLE_TURN:
            self.action_mask = self._default_mask()
        values = self.__dict__
        lengths = {name: values[name].shape[0] for name in TENSOR_FIELDS if values[name] is not None}
        check_lengths(self.experience_type, self.truncate_status, self.prompt_length, lengths)

    def _default_mask(self) -> Tensor:
        length, value = max(self.tokens.shape[0] - self.prompt_length, 0), b"\1"
        if self.truncate_status == PROMPT_TRUNCATED:
            # Tokens after a prompt that was cut are not a response to it: none of them is trained on.
            length, value = length if self.logprobs is None else self.logprobs.shape[0], b"\0"
        if not length or not self.tokens.is_cpu:
            return self.tokens.new_full((length,), bool(value[0]), dtype=torch.bool)
        return torch.frombuffer(bytearray(value * length), dtype=torch.bool)  # half the time of torch.ones

    @classmethod
    def from_valid_fields(
        cls,
        eid: EID,
        tokens: Tensor,
        logprobs: Tensor | None,
        reward: float | None,
        token_level_reward: Tensor | None,
        advantages: Tensor | None,
        returns: Tensor | None,
        truncate_status: str | None,
        info: dict[str, Any],
        metrics: dict[str, float],
        prompt_length: int,
        response_text: str | None,
        prompt_text: str | None,
        action_mask: Tensor | None,
        messages: list[dict[str, Any]] | None,
        tools: list[dict[str, Any]] | None,
        chosen: Tensor | None,
        rejected: Tensor | None,
        chosen_messages: list[dict[str, Any]] | None,
        rejected_messages: list[dict[str, Any]] | None,
        multi_modal_inputs: dict[str, Tensor] | None,
        teacher_logprobs: Tensor | None,
        custom_fields: list[CustomField],
        routed_experts: Tensor | None,
        versions: Versions | None,
        temperature: float | None,
        taskset: str | None,
        index: int | None,
        experience_type: str,
    ) -> Experience:
        """Return an experience that takes over these values without checks, in the order of :data:`FIELD_NAMES`.

        This method is for callers that have checked whole columns; other callers use the constructor. It sets the
        attributes one by one, because a ``__dict__`` that is assigned as a whole takes five times the memory.
        """
        experience = cls.__new__(cls)
        experience.eid = eid
        experience.tokens = tokens
        experience.logprobs = logprobs
        experience.reward = reward
        experience.token_level_reward = token_level_reward
        experience.advantages = advantages
        experience.returns = returns
        experience.truncate_status = truncate_status
        experience.info = info
        experience.metrics = metrics
        experience.prompt_length = prompt_length
        experience.response_text = response_text
        experience.prompt_text = prompt_text
        experience.action_mask = action_mask
        experience.messages = messages
        experience.tools = tools
        experience.chosen = chosen
        experience.rejected = rejected
        experience.chosen_messages = chosen_messages
        experience.rejected_messages = rejected_messages
        experience.multi_modal_inputs = multi_modal_inputs
        experience.teacher_logprobs = teacher_logprobs
        experience.custom_fields = custom_fields
        experience.routed_experts = routed_experts
        experience.versions = versions
        experience.temperature = temperature
        experience.taskset = taskset
        experience.index = index
        experience.experience_type = experience_type
        return experience

    @property
    def response_length(self) -> int:
        """Number of response tokens; for dpo, of the chosen response; for a truncated prompt, the length of the action
        mask.
        """
        if self.experience_type == DPO and self.chosen is not None:
            return self.chosen.shape[0]
        if self.truncate_status == PROMPT_TRUNCATED and self.action_mask is not None:
            return self.action_mask.shape[0]
        return self.tokens.shape[0] - self.prompt_length

    @property
    def version_min(self) -> tuple[int, int] | None:
        """Oldest ``(generation, step)`` that sampled a token, None if unknown."""
        version: tuple[int, int] | None = _stamped(self.versions, min)
        return version

    @property
    def version_max(self) -> tuple[int, int] | None:
        """Newest ``(generation, step)`` that sampled a token, None if unknown."""
        version: tuple[int, int] | None = _stamped(self.versions, max)
        return version

    def serialize(self) -> bytes:
        """Return this experience alone as an experience body (schemas/README.md)."""
        return self.serialize_many([self])

    @classmethod
    def deserialize(cls, data: bytes | memoryview, *, allow_legacy: bool = False) -> Experience:
        """Return the single experience in ``data``; arguments as :meth:`deserialize_many`.

        Raises:
            DecodeError: ``data`` is not an experience body, or does not hold exactly one experience.
        """
        experiences = cls.deserialize_many(data, allow_legacy=allow_legacy)
        if len(experiences) != 1:
            raise DecodeError(
                f"the body holds {len(experiences)} experiences, wanted exactly one; read it with "
                "Experience.deserialize_many"
            )
        return experiences[0]

    @classmethod
    def serialize_many(cls, experiences: list[Experience]) -> bytes:
        """Return ``experiences`` as one experience body.

        Raises:
            EncodeError: A field does not fit the format.
        """
        return cls.encode_body(experiences)

    @classmethod
    def deserialize_many(cls, data: bytes | memoryview, *, allow_legacy: bool = False) -> list[Experience]:
        """Return the experiences in ``data``.

        Args:
            data: An experience body.
            allow_legacy: Also read bodies that Trinity wrote (``TRXP``, bare pickles), in a child process. Their code
                is never executed, but they carry no checksum and cost more to refuse. Use this only for data from a
                known origin.

        Raises:
            DecodeError: ``data`` is not an experience body.
        """
        return cls.decode_body(data, allow_legacy)

    def to_dict(self) -> dict[str, Any]:
        """Return the readable fields, without the tensor fields; optional fields only if they are set."""
        result: dict[str, Any] = {
            "eid": self.eid.to_dict(),
            "type": self.experience_type,
            "prompt_length": self.prompt_length,
            "response_length": self.response_length,
            "info": self.info,
            "metrics": self.metrics,
        }
        if self.experience_type == DPO and self.rejected is not None:
            result["rejected_length"] = self.rejected.shape[0]
        for name in OPTIONAL_IN_DICT:
            value = getattr(self, name)
            if value is not None:
                result[name] = value
        return result

    def __eq__(self, other: object) -> bool:
        """Compare every field; tensors by dtype, shape and values, with NaN equal to NaN."""
        if not isinstance(other, Experience):
            return NotImplemented
        return all(values_equal(getattr(self, name), getattr(other, name)) for name in FIELD_NAMES)

    __hash__ = None  # type: ignore[assignment]  # mutable, so neither a key nor a member of a set

    def __repr__(self) -> str:
        return (
            f"Experience({self.eid.uid}, {self.experience_type}, {self.prompt_length}+{self.response_length} tokens, "
            f"reward={self.reward})"
        )


def _stamped(rows: Versions | None, which: Callable[[Iterable[tuple[int, int]]], tuple[int, int]]) -> Any:
    """Return the minimum or maximum version in ``rows``, by ``which``; None without versions."""
    if not rows:
        return None
    return rows[0][1:] if len(rows) == 1 else which(row[1:] for row in rows)


FIELD_NAMES = tuple(item.name for item in fields(Experience))
"""Names of all fields of an experience."""

OPTIONAL_IN_DICT = (
    "prompt_text",
    "response_text",
    "messages",
    "tools",
    "chosen_messages",
    "rejected_messages",
    "reward",
    "truncate_status",
    "temperature",
    "versions",
    "taskset",
    "index",
)
READABLE_FIELDS = (
    *("eid", "type", "prompt_length", "response_length", "info", "metrics", "rejected_length"),
    *OPTIONAL_IN_DICT,
)
"""Keys that :meth:`Experience.to_dict` may return."""

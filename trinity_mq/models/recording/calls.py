"""Requests of a wrapped model: the bodies that are sent, the seeds, and the recorded answers until a workflow takes
them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trinity_mq.config.switches import SWITCH_FIELDS
from trinity_mq.experience import Experience
from trinity_mq.experience.rules import ENGINE
from trinity_mq.families.switches import merge_switch_fields, without_switches
from trinity_mq.messages import Version
from trinity_mq.models.clients import stream_error
from trinity_mq.models.errors import EngineLost, PromptTooLong
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.responses import experiences_of, masked_experiences
from trinity_mq.models.recording.sse import AnswerAssembler, EventReader
from trinity_mq.telemetry.trace import span

LOGPROBS_HEADERS = {"X-TMQ-Logprobs": "numbers"}
"""Header that lets our engines leave out the text of each token; other servers ignore it."""


Partial = Callable[[], list[Experience]]
"""Returns the experiences of an answer that is still arriving, up to its current end."""
SEED_BITS = 63


class ExperienceHistory:
    """Experiences in the order in which their answers completed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._experiences: list[Experience] = []
        self._partials: list[Partial] = []

    def add(self, experiences: Iterable[Experience]) -> None:
        """Append ``experiences``."""
        with self._lock:
            self._experiences.extend(experiences)

    def expect(self, partial: Partial) -> None:
        """Register a partial answer, which :meth:`settle` or :meth:`take` evaluates."""
        with self._lock:
            self._partials.append(partial)

    def settle(self, partial: Partial, *, keep: bool = True) -> None:
        """Append the answer's experiences, once; with ``keep`` False discard them. Does nothing if :meth:`take` cleared
        the answer before.
        """
        with self._lock:
            if partial in self._partials:
                self._partials.remove(partial)
                if keep:
                    self._experiences += partial()

    def take(self, *, clear: bool) -> list[Experience]:
        """Return the recorded experiences, and clear them with ``clear``. Answers still arriving are included up to
        their current end.
        """
        with self._lock:
            taken = [*self._experiences, *(experience for partial in self._partials for experience in partial())]
            if clear:
                self._experiences.clear()
                self._partials.clear()
        return taken


class Seeds:
    """A sequence of seeds derived from one seed, and further sequences for clones. Without a seed, all derived seeds
    are None.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._calls, self._clones = itertools.count(), itertools.count()

    def next(self) -> int | None:
        """Return the seed of the next call."""
        return self._derived("call", next(self._calls))

    def clone(self) -> Seeds:
        """Return a new sequence for the next clone."""
        return Seeds(self._derived("clone", next(self._clones)))

    def _derived(self, purpose: str, number: int) -> int | None:
        if self._seed is None:
            return None
        digest = hashlib.blake2b(f"{self._seed}/{purpose}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


class RecordedModel:
    """State of a model wrapper that its requests and OpenAI clients share."""

    def __init__(
        self,
        model: InferenceModel,
        *,
        sampling: Mapping[str, Any],
        seed: int | None,
        headers: Mapping[str, str],
        enable_history: bool,
        not_ready_timeout: float,
        request_timeout: float,
    ) -> None:
        self.model, self.enable_history = model, enable_history
        self.sampling, self.headers = sampling, headers
        """Default sampling parameters of a call; headers of every request."""
        self.not_ready_timeout, self.request_timeout = not_ready_timeout, request_timeout
        self.history, self.seeds = ExperienceHistory(), Seeds(seed)
        self.note_version: Version | None = None
        """Weight version that gave the latest answer. None: no answer with a version yet."""


class RecordedCall:
    """A request to ``/v1/chat/completions`` or ``/v1/completions``.

    The request belongs to the history that the wrapper had when the request was made. An answer that arrives during the
    next run on the same wrapper is not added to the history of that run.
    """

    def __init__(self, wrapper: RecordedModel, fields: Mapping[str, Any], *, tokens: bool) -> None:
        """Create the request. ``fields`` is the caller's body. ``tokens``: experiences will be made from the answer."""
        self._wrapper = wrapper
        self._history = wrapper.history
        self.model, self.url = wrapper.model, wrapper.model.url
        self.body = _body(wrapper, fields, tokens=tokens)
        # logprobs=0 is an explicit request
        wants_logprobs = fields.get("logprobs") is not None and fields["logprobs"] is not False
        self.headers = {**wrapper.headers, **({} if wants_logprobs or not tokens else LOGPROBS_HEADERS)}

    @property
    def temperature(self) -> float:
        """Temperature that was sent. Read it only after the server accepted the request, which validates the value."""
        return float(self.body.get("temperature", 1.0))

    @property
    def recorded(self) -> bool:
        """Whether the answer is added to the history."""
        return self._wrapper.enable_history

    def experiences(self, answer: Mapping[str, Any]) -> list[Experience]:
        """Return a whole answer as experiences, and add them to the history if it is enabled.

        Raises:
            EngineRefused: The answer has no token ids or logprobs. Without recording, an auxiliary model may answer
                with text alone.
        """
        with span("make experiences") as traced:
            experiences = self.read(answer)
            traced.count = len(experiences)
        if self.recorded:
            self._history.add(experiences)
        return experiences

    def read(self, answer: Mapping[str, Any]) -> list[Experience]:
        """Return an answer as experiences without recording them; errors as :meth:`experiences`."""
        text_only = self.model.role == "auxiliary" and not self.recorded
        experiences = experiences_of(answer, self.temperature, text_only=text_only)
        if self.model.role == "rollout":
            for experience in experiences:
                experience.info[ENGINE] = self.model.id
        self.note_version(answer, experiences)
        return experiences

    def note_version(self, answer: Mapping[str, Any], experiences: list[Experience] | None = None) -> None:
        """Store the weight version that gave ``answer`` in the wrapper, if it is known and the wrapper has not begun
        another run since.

        Args:
            answer: The answer.
            experiences: Experiences made from it. Their newest version takes precedence over the answer's own.
        """
        version = answer.get("weight_version")
        if experiences and experiences[0].versions:
            version = experiences[0].version_max
        if version is not None and self._wrapper.history is self._history:
            self._wrapper.note_version = (int(version[0]), int(version[1]))

    def too_long(self, error: PromptTooLong) -> list[Experience]:
        """Return the masked experiences of a prompt that is too long, and add them to the history if it is enabled."""
        experiences = masked_experiences(error, self.body.get("n") or 1, self.temperature)
        if self.recorded:
            self._history.add(experiences)
        return experiences

    def recording(self, named: Mapping[str, Any], *, streamed: bool) -> Recording:
        """Return the recorder for the bytes of the answer; ``named`` holds fields from the answer's headers."""
        return StreamedAnswer(self, self._history, named) if streamed else WholeAnswer(self, named)


class WholeAnswer:
    """Records an answer that is one JSON object; an incomplete answer is not recorded."""

    def __init__(self, call: RecordedCall, named: Mapping[str, Any]) -> None:
        self._call, self._named = call, named
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Buffer bytes for :meth:`end`."""
        self._received += data

    def end(self) -> None:
        """Record the answer.

        Raises:
            EngineError: The body is not an answer, or has no token ids or logprobs.
        """
        try:
            answer = json.loads(self._received)
        except ValueError as error:
            raise EngineLost(f"{self._call.url}: the answer is not JSON: {error}", self._call.model) from error
        if not isinstance(answer, dict):
            kind = type(answer).__name__
            raise EngineLost(f"{self._call.url}: the answer is a {kind}, wanted a JSON object", self._call.model)
        self._call.experiences({**self._named, **answer})

    def close(self) -> None:
        """Record nothing."""

    forget = close


class StreamedAnswer:
    """Records an event stream when it is complete, when it is closed, or when the history is taken before its end.

    Choices that had not ended by then are ``response_truncated``. Nothing is recorded twice.
    """

    def __init__(self, call: RecordedCall, history: ExperienceHistory, named: Mapping[str, Any]) -> None:
        self._call, self._history = call, history
        self._reader, self._gathered = EventReader(), AnswerAssembler()
        self._gathered.add(named)
        history.expect(self._partial_experiences)

    def feed(self, data: bytes) -> None:
        """Add the events that end in ``data``.

        Raises:
            EngineError: The events report an error, or the bytes are not an event stream. Then nothing is recorded.
        """
        try:
            chunks = self._reader.feed(data)
        except ValueError as error:
            self.forget()
            raise EngineLost(f"{self._call.url}: the stream cannot be read: {error}", self._call.model) from error
        for chunk in chunks:
            if not isinstance(chunk, dict):
                continue
            if chunk.get("error"):
                self.forget()
                raise stream_error(chunk["error"], self._call.url)
            self._gathered.add(chunk)

    def end(self) -> None:
        """Record the tokens received."""
        self._history.settle(self._partial_experiences)

    close = end

    def forget(self) -> None:
        """Record nothing."""
        self._history.settle(self._partial_experiences, keep=False)

    def _partial_experiences(self) -> list[Experience]:
        return self._call.read(self._gathered.answer())


Recording = WholeAnswer | StreamedAnswer


def _body(wrapper: RecordedModel, fields: Mapping[str, Any], *, tokens: bool) -> dict[str, Any]:
    """Return the body to send: the wrapper's sampling parameters, overridden by the caller's fields, a derived seed,
    and, with ``tokens``, the fields that request token ids and logprobs.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    body = {"model": wrapper.model.name, **wrapper.sampling}
    if "max_completion_tokens" in present:
        body.pop("max_tokens", None)
    body |= present
    if not body.keys().isdisjoint(SWITCH_FIELDS):  # a text completion has no template for the wrapper's switches
        defaults = wrapper.sampling if "messages" in present else {}
        body = without_switches(body) | merge_switch_fields(defaults, present)
    if "seed" not in present and (seed := wrapper.seeds.next()) is not None:
        body["seed"] = seed
    if tokens:
        chat = "messages" in body
        body["return_token_ids"] = True
        if not body.get("logprobs"):
            body["logprobs"] = True if chat else 0
        if chat:
            body["return_prompt_text"] = True
    return body

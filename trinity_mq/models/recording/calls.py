"""One request of a wrapped model: what is sent, and where what comes back is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from trinity_mq.experience import Experience
from trinity_mq.messages import Version
from trinity_mq.models.clients import stream_error
from trinity_mq.models.errors import EngineLost, PromptTooLong
from trinity_mq.models.inference import InferenceModel
from trinity_mq.models.recording.history import History
from trinity_mq.models.recording.responses import experiences_of, masked_experiences
from trinity_mq.models.recording.sse import EventReader, Gathered

LOGPROBS_HEADERS = {"X-TMQ-Logprobs": "numbers"}
"""Spares our engines the text of each token; other servers do not know it."""


class RecordedModel(Protocol):
    """Interface of the model wrapper to its requests and OpenAI clients."""

    model: InferenceModel
    enable_history: bool
    request_timeout: float

    @property
    def history(self) -> History:
        """History that is recorded into."""
        ...

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        ...

    def next_seed(self) -> int | None:
        """Return the seed of the next call."""

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters of a call that gives none."""

    def note_version(self, version: Version) -> None:
        """Remember the version that gave the latest answer."""

    def not_ready_policy(self) -> dict[str, Any]:
        """Return how long and how often to ask an engine that is not ready, for tenacity."""


class Call:
    """A request to ``/v1/chat/completions`` or ``/v1/completions``.

    It belongs to the history that was the wrapper's when it was made: an answer that comes late, into the next run on
    the same wrapper, is not that run's.
    """

    def __init__(self, wrapper: RecordedModel, given: Mapping[str, Any], *, tokens: bool) -> None:
        """``given``: the body as the caller wants it; ``tokens``: experiences are to be made of the answer."""
        self._wrapper = wrapper
        self._history = wrapper.history
        self.body = _body(wrapper, given, tokens=tokens)
        # logprobs=0 is an explicit request
        wants_logprobs = given.get("logprobs") is not None and given["logprobs"] is not False
        self.headers = wrapper.headers | ({} if wants_logprobs or not tokens else LOGPROBS_HEADERS)

    @property
    def model(self) -> InferenceModel:
        """The model that is asked."""
        return self._wrapper.model

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        return self.model.url

    @property
    def temperature(self) -> float:
        """As sent; to be asked for only once the server has taken it."""
        return float(self.body.get("temperature", 1.0))

    @property
    def recorded(self) -> bool:
        """Whether what comes is kept in the history."""
        return self._wrapper.enable_history

    def experiences(self, answer: Mapping[str, Any]) -> list[Experience]:
        """Return a whole answer as experiences, and keep them when history is enabled.

        Raises:
            EngineRefused: It has no token ids or logprobs; from an auxiliary model text is enough where nothing is
                recorded.
        """
        experiences = self.read(answer)
        if self.recorded:
            self._history.add(experiences)
        return experiences

    def read(self, answer: Mapping[str, Any]) -> list[Experience]:
        """Return an answer as experiences and keep nothing; errors as :meth:`experiences`."""
        text_only = self._wrapper.model.role == "auxiliary" and not self.recorded
        experiences = experiences_of(answer, self.temperature, text_only=text_only)
        self.answered_by(answer, experiences)
        return experiences

    def answered_by(self, answer: Mapping[str, Any], experiences: list[Experience] | None = None) -> None:
        """Note which version gave ``answer``."""
        version = answer.get("weight_version")
        if experiences and experiences[0].versions:
            version = experiences[0].version_max
        if version is not None and self._wrapper.history is self._history:
            self._wrapper.note_version((int(version[0]), int(version[1])))

    def too_long(self, error: PromptTooLong) -> list[Experience]:
        """Return the masked experiences of a prompt that is too long, and keep them when history is enabled."""
        experiences = masked_experiences(error, self.body.get("n") or 1, self.temperature)
        if self.recorded:
            self._history.add(experiences)
        return experiences

    def whole(self, named: Mapping[str, Any]) -> Recording:
        """Return the recording of an answer in one piece; ``named`` says what is known of it beforehand."""
        return WholeAnswer(self, named)

    def streamed(self, named: Mapping[str, Any]) -> Recording:
        """Return the recording of an answer that is an event stream."""
        return StreamedAnswer(self, self._history, named)


class Recording(Protocol):
    """Records the bytes of an answer while they pass."""

    def feed(self, piece: bytes) -> None:
        """Take in bytes.

        Raises:
            EngineError: They report an error, or are no answer.
        """

    def end(self) -> None:
        """Keep the answer: all of it has come.

        Raises:
            EngineError: It is no answer, or has no token ids or logprobs.
        """

    def close(self) -> None:
        """Keep of it what can be used; does nothing after :meth:`end`."""

    def forget(self) -> None:
        """Keep nothing of it."""


class WholeAnswer:
    """An answer in one piece: what is not whole is of no use."""

    def __init__(self, call: Call, named: Mapping[str, Any]) -> None:
        self._call, self._named = call, named
        self._pieces: list[bytes] = []
        self._over = False

    def feed(self, piece: bytes) -> None:
        """Keep bytes for :meth:`end`."""
        self._pieces.append(piece)

    def end(self) -> None:
        """Record the answer."""
        if self._over:
            return
        self._over = True
        try:
            answer = json.loads(b"".join(self._pieces))
        except ValueError as error:
            raise EngineLost(f"{self._call.url}: the answer is not JSON: {error}", self._call.model) from error
        if not isinstance(answer, dict):
            kind = type(answer).__name__
            raise EngineLost(f"{self._call.url}: the answer is a {kind}, wanted a JSON object", self._call.model)
        self._call.experiences({**self._named, **answer})

    def close(self) -> None:
        """Leave it."""
        self._over = True

    def forget(self) -> None:
        """Leave it."""
        self._over = True


class StreamedAnswer:
    """An answer in pieces: kept when it is whole, is closed, or is taken from the history before.

    What had not ended by then is ``response_truncated``. Nothing is kept twice.
    """

    def __init__(self, call: Call, history: History, named: Mapping[str, Any]) -> None:
        self._call, self._history = call, history
        self._reader, self._gathered = EventReader(), Gathered()
        self._gathered.add(named)
        history.expect(self._so_far)

    def feed(self, piece: bytes) -> None:
        """Take in the events that end here."""
        try:
            chunks = self._reader.feed(piece)
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
        """Record what came."""
        self._history.settle(self._so_far)

    close = end

    def forget(self) -> None:
        """Record nothing."""
        self._history.settle(self._so_far, keep=False)

    def _so_far(self) -> list[Experience]:
        return self._call.read(self._gathered.answer())


def _body(wrapper: RecordedModel, given: Mapping[str, Any], *, tokens: bool) -> dict[str, Any]:
    """Return the caller's body over the wrapper's sampling parameters."""
    wanted = {name: value for name, value in given.items() if value is not None}
    body = {"model": wrapper.model.name, **wrapper.sampling_defaults()}
    if "max_completion_tokens" in wanted:
        body.pop("max_tokens", None)
    body |= wanted
    if "seed" not in wanted and (seed := wrapper.next_seed()) is not None:
        body["seed"] = seed
    if tokens:
        chat = "messages" in body
        body["return_token_ids"] = True
        if not body.get("logprobs"):
            body["logprobs"] = True if chat else 0
        if chat:
            body["return_prompt_text"] = True
    return body

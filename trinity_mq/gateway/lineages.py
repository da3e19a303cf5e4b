"""Lineages of a session: a forest of token sequences, and the sequence that a new prompt continues.

Each recorded answer ends a sequence: the tokens of its prompt, then its own tokens. A prompt that begins with a
sequence continues it. A sequence is found in two ways, both in time linear in the request:

* before the engine is asked, by the client's messages: each answer is indexed by a digest of the messages that led to
  it and of the answer, in the form in which clients send it back (:func:`read_chain`);
* after the engine has answered, by the tokens of the prompt: each sequence is indexed by the digest of its tokens.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trinity_mq.families.messages import Message, MessageError, read_messages, without_nulls
from trinity_mq.messages import SessionCall

SEQUENCE_BYTES = 2048
"""More bytes than the index takes for a sequence, apart from tokens that the session's record holds anyway."""
OPTIONS_IN_PROMPT = ("chat_template_kwargs", "reasoning_effort")
"""Options of a chat that can change how earlier messages are written."""
BREAK_CAUSES = ("template", "retoken", "temperature")
"""Reasons why a prompt does not begin with the tokens of the answer that its messages continue."""
_DIGEST_BYTES = 16
T = TypeVar("T")


# -- by messages


@dataclass(frozen=True, slots=True)
class Chain:
    """Digests of the beginnings of a conversation."""

    digests: tuple[str, ...]
    """Digest of the first ``i`` messages at index ``i``. It covers the tools and options that the template writes."""
    identities: tuple[str, ...]
    """Identity of each message; see :func:`identity_of`."""

    def answered(self, message: Message) -> tuple[str, str]:
        """Return the digest of the whole conversation followed by an answer, and the identity of the answer. Both are
        empty if the answer cannot be read.
        """
        try:
            [answer] = read_messages([{**message, "role": "assistant"}])
        except MessageError:
            return "", ""
        return _next_digest(self.digests[-1], answer), identity_of(answer)


def read_chain(body: Mapping[str, Any]) -> Chain | None:
    """Return the digests of a chat request. Two requests have equal digests where they differ only in what engines
    ignore or clients rewrite: ids, thoughts, null values, unknown keys, text as one part or several, white space around
    an answer, and the format of a call's arguments.

    Args:
        body: The request in the format of chat completions.

    Returns:
        None if the request has no messages, or messages that the engine will refuse.
    """
    if not isinstance(messages := body.get("messages"), list):
        return None
    try:
        read = read_messages(messages)
        # without the choice of tools, the template does not write them
        tools = [] if body.get("tool_choice") == "none" else without_nulls(body.get("tools")) or []
        options = {name: body[name] for name in OPTIONS_IN_PROMPT if body.get(name) is not None}
        digests = [_digest(json.dumps([tools, options], sort_keys=True))]
    except (MessageError, RecursionError):
        return None
    for message in read:
        digests.append(_next_digest(digests[-1], message))
    return Chain(tuple(digests), tuple(map(identity_of, read)))


def identity_of(message: Message) -> str:
    """Return what tells an answer apart from an equal answer: a digest of the ids of its calls, or else of its
    thoughts. Empty: the message has neither.
    """
    if calls := message.get("tool_calls"):
        return _digest(json.dumps([call.get("id") for call in calls], default=str))
    thoughts = message.get("reasoning_content")
    return _digest(thoughts.strip()) if isinstance(thoughts, str) and thoughts.strip() else ""


def _next_digest(digest: str, message: Message) -> str:
    role, text = message["role"], message["content"]
    is_answer = role == "assistant"
    calls = [_plain_call(call["function"]) for call in message.get("tool_calls") or ()]
    name = None if role in ("assistant", "tool") else message.get("name")
    return _digest(json.dumps([digest, role, name, text.strip() if is_answer else text, calls], default=str))


def _plain_call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    try:
        arguments = json.dumps(_plain(arguments), sort_keys=True)
    except RecursionError:  # text of a model, nested without end
        arguments = ""
    return f"{function['name']} {arguments}"


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as integers: clients write 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(text: str) -> str:
    return hashlib.blake2b(_text_bytes(text), digest_size=_DIGEST_BYTES).hexdigest()


def _text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# -- by tokens


class Beginnings(Generic[T]):
    """Items by the digests of their bytes, to look up those whose bytes are the beginning of other bytes."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._items: dict[bytes, list[T]] = {}

    def add(self, size: int, digest: bytes, item: T) -> None:
        """Add an item with so many bytes and this digest."""
        place = bisect.bisect_left(self._sizes, size)
        if place == len(self._sizes) or self._sizes[place] != size:
            self._sizes.insert(place, size)
        self._items.setdefault(digest, []).append(item)

    def of(self, content: bytes) -> list[list[T]]:
        """Return the items whose bytes begin ``content``, those of equal bytes in one list, short ones first."""
        state, end, matches = new_state(), 0, []
        view = memoryview(content)
        for size in self._sizes:
            if size > len(content):
                break
            state.update(view[end:size])
            end = size
            if items := self._items.get(state.digest()):
                matches.append(items)
        return matches


def new_state() -> hashlib.blake2b:
    """Return the state of an empty digest."""
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, four for each.

    Raises:
        ValueError: A token id is not a whole number of at most 31 bits.
    """
    try:
        return array("i", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids: {error}; wanted whole numbers of at most 31 bits") from None


# -- the forest


@dataclass(slots=True, eq=False)
class Sampled:
    """A sequence: the tokens of a prompt and of one of its answers."""

    call: str
    choice: int
    temperature: float
    number: int
    """Position of its call among the session's calls."""
    parent: Sampled | None
    added: Sequence[int]
    """Tokens of the prompt after the parent's sequence."""
    ids: Sequence[int]
    """Tokens of the answer."""
    length: int
    """Number of all tokens."""
    state: hashlib.blake2b
    """Digest of all tokens."""
    identity: str
    text: bytes = b""
    """Digest of the text of all tokens. Empty: unknown."""
    is_continued: bool = False
    """True if a later call continues it, or may continue it."""

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        parts: list[Sequence[int]] = []
        node: Sampled | None = self
        while node is not None:
            parts += [node.ids, node.added]
            node = node.parent
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True, slots=True)
class Match:
    """The sequence that a conversation continues, according to its messages."""

    sequence: Sampled
    messages: int
    """Number of leading messages that lead to the answer, the answer included."""
    is_tied: bool
    """True if other answers are equal, so that the client may have continued another one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a prompt in the forest."""

    continued: Sampled | None
    """Longest sequence that the prompt begins with. None: the prompt begins a new lineage."""
    break_cause: str
    """Why the prompt does not begin with the sequence whose answer the client continued; empty: it does, or the client
    continued none."""
    is_tied: bool = False


class Lineages:
    """The sequences of one session.

    The index holds digests. Tokens are those of the recorded calls, which the session's record holds anyway.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of sequences."""
        self.tokens = 0
        """Number of recorded tokens, those of a shared prefix once."""
        self._sequences: dict[str, list[Sampled]] = {}
        """Sequences by call id. Empty for a call that continues a call that was not stored."""
        self._answers: dict[str, list[Sampled]] = {}
        self._by_tokens = Beginnings[Sampled]()
        self._by_text = Beginnings[Sampled]()
        self._superseded: set[str] = set()
        self._extended: set[str] = set()
        """Calls that another call continues."""
        self._beginning: set[str] = set()
        """Calls that begin a lineage."""
        self._unread: set[str] = set()
        """Calls that were added here and that the session's record did not hold yet."""

    def catch_up(self, calls: Mapping[str, SessionCall]) -> None:
        """Add the calls that other gateways have recorded, or this gateway before it started.

        Args:
            calls: Calls of the session by id, as far as its record was read.
        """
        for name in [name for name in self._unread if name in calls]:
            self._unread.remove(name)
            for sequence in self._sequences[name]:  # the tokens of the record replace those of the answer
                sequence.added, sequence.ids = calls[name].prompt, calls[name].choices[sequence.choice].ids
        if len(self._sequences) == len(calls) + len(self._unread):
            return
        for name, call in calls.items():
            if name not in self._sequences:
                self.add(call, "" if call.continues else call.prompt_text, is_read=True)

    def add(self, call: SessionCall, prompt_text: str, *, is_read: bool = False) -> None:
        """Add a recorded call.

        Args:
            call: The call.
            prompt_text: Text of the whole prompt. Empty: unknown.
            is_read: True if the session's record holds the call.
        """
        if call.call in self._sequences:
            self._add_texts(self._sequences[call.call], call, prompt_text)
            return
        self._sequences[call.call] = []
        if not is_read:
            self._unread.add(call.call)
        if call.supersedes:
            self._superseded.add(call.supersedes)
        parent = None
        if call.continues:
            earlier = self._sequences.get(call.continues, [])
            if call.choice >= len(earlier):
                return  # the continued call was not stored, so no later call continues this one either
            parent = earlier[call.choice]
            parent.is_continued = True
        if call.continues in self._extended or parent is None:
            self._beginning.add(call.call)
        self._extended.add(call.continues)
        self._sequences[call.call] = list(self._sequences_of(call, parent))
        self._add_texts(self._sequences[call.call], call, prompt_text)

    def _sequences_of(self, call: SessionCall, parent: Sampled | None) -> Iterator[Sampled]:
        state = new_state() if parent is None else parent.state.copy()
        state.update(token_bytes(call.prompt))
        before = len(call.prompt) if parent is None else parent.length + len(call.prompt)
        self.tokens += len(call.prompt)
        number = len(self._sequences)
        for index, choice in enumerate(call.choices):
            whole = state.copy()
            whole.update(token_bytes(choice.ids))
            sequence = Sampled(
                call.call,
                index,
                call.temperature,
                number,
                parent,
                call.prompt,
                choice.ids,
                before + len(choice.ids),
                whole,
                choice.identity,
            )
            self._by_tokens.add(4 * sequence.length, whole.digest(), sequence)
            if choice.conversation:
                self._answers.setdefault(choice.conversation, []).append(sequence)
            self.count += 1
            self.tokens += len(choice.ids)
            yield sequence

    def _add_texts(self, sequences: Sequence[Sampled], call: SessionCall, prompt_text: str) -> None:
        if not prompt_text or not sequences or sequences[0].text:
            return
        prompt, state = _text_bytes(prompt_text), new_state()
        state.update(prompt)
        for sequence, choice in zip(sequences, call.choices, strict=True):
            answer, whole = _text_bytes(choice.text), state.copy()
            whole.update(answer)
            sequence.text = whole.digest()
            self._by_text.add(len(prompt) + len(answer), sequence.text, sequence)

    def begins_lineage(self, call: str) -> bool:
        """Return whether a call begins a lineage."""
        return call in self._beginning

    def match(self, chain: Chain, temperature: float) -> Match | None:
        """Return the recorded answer that a conversation continues: the last one whose messages are its beginning.

        Of equal answers the one with the client's ids or thoughts counts. If these do not decide, an answer counts that
        nothing continues yet, and of these the latest: parallel branches with equal answers then stay apart.
        """
        for place in range(len(chain.digests) - 2, 0, -1):
            if equal := self._answers.get(chain.digests[place]):
                sequence, is_tied = self._choose(equal, temperature, chain.identities[place - 1])
                if is_tied:
                    sequence.is_continued = True  # equal requests under way at the same time take different answers
                return Match(sequence, place, is_tied)
        return None

    def place(self, prompt: Sequence[int], text: str, temperature: float, match: Match | None) -> Place:
        """Return the position of a prompt.

        Args:
            prompt: Token ids that the engine has read.
            text: Text of the prompt. Empty: unknown.
            temperature: Sampling temperature of its answer.
            match: The answer that the client continued, by its messages.

        Raises:
            ValueError: A token id is not a whole number of at most 31 bits.
        """
        matches = self._by_tokens.of(token_bytes(prompt))
        same = [warm for equal in matches if (warm := [node for node in equal if node.temperature == temperature])]
        expected = None if match is None else match.sequence
        continued, is_tied = None, False
        if same:
            if expected in same[-1]:
                continued, is_tied = expected, match is not None and match.is_tied
            else:
                continued, is_tied = self._choose(same[-1], temperature, "")
        length = 0 if continued is None else continued.length
        if length > 0 and (expected is None or length >= expected.length):
            return Place(continued, "", is_tied)
        return Place(continued, self._break_cause(matches, text, expected), is_tied)

    def _break_cause(self, matches: Sequence[Sequence[Sampled]], text: str, expected: Sampled | None) -> str:
        if matches and (expected is None or matches[-1][0].length >= expected.length):
            return "temperature"
        equal_texts = self._by_text.of(_text_bytes(text)) if text else []
        if any(expected is None or node.text == expected.text for nodes in equal_texts for node in nodes):
            return "retoken"
        return "" if expected is None else "template"

    def _choose(self, equal: Sequence[Sampled], temperature: float, identity: str) -> tuple[Sampled, bool]:
        """Return one of equal sequences, and whether others could be meant as well."""
        kept = [node for node in equal if node.call not in self._superseded] or equal
        candidates = [node for node in kept if identity and node.identity == identity] or kept
        chosen = max(
            candidates,
            key=lambda node: (node.temperature == temperature, not node.is_continued, node.number, -node.choice),
        )
        return chosen, len(candidates) > 1


# -- of a recorded session


@dataclass(slots=True)
class Lineage:
    """Calls of which each continues the one before; trained on as one experience where tokens allow it."""

    calls: list[str]
    """Call ids, in order. The first is the id of the lineage."""
    parent: str | None
    """The call of another lineage that the first call continues. None: it continues none."""
    tokens: int
    """Number of tokens of its longest sequence, with the shared prefix."""


def superseded_calls(calls: Sequence[SessionCall]) -> set[str]:
    """Return the calls whose client did not receive the answer and repeated the request.

    A repeat names the call that it replaces if its gateway knows that call. The answer of another gateway may reach the
    stream later than the repeat. Therefore a repeat that names no call replaces one call with an equal request. That
    call began before the repeat was answered, has a lower retry count, and is not a sibling of the repeat. If several
    calls match, the call with the highest retry count is replaced.

    Args:
        calls: All calls of a session, in the order of the stream.
    """
    superseded = {call.supersedes for call in calls if call.supersedes}
    for repeat in calls:
        if not repeat.retry or not repeat.digest or repeat.supersedes:
            continue
        equal = [
            call
            for call in calls
            if call.digest == repeat.digest
            and call.retry < repeat.retry
            and 0.0 < call.began <= repeat.at
            and call.call not in superseded
            and call.call not in repeat.siblings
            and repeat.call not in call.siblings
        ]
        if equal:
            superseded.add(max(equal, key=lambda call: call.retry).call)
    return superseded


def lineages_of(calls: Sequence[SessionCall], superseded: Collection[str] = ()) -> list[Lineage]:
    """Return the lineages of a session in the order of their first calls. Each call belongs to one lineage.

    The first call that continues a call extends its lineage. A later one begins a lineage of its own, whose parent is
    the continued call. A call that its client repeated extends nothing.

    Args:
        calls: Calls of the session, in their order.
        superseded: Calls that their client repeated; see :func:`superseded_calls`.
    """
    lineages: dict[str, Lineage] = {}
    lengths: dict[str, list[int]] = {}
    continued: set[str] = set()
    for call in calls:
        before = lengths.get(call.continues, ())
        start = before[call.choice] if call.choice < len(before) else 0
        lengths[call.call] = [start + len(call.prompt) + len(choice.ids) for choice in call.choices]
        length = max(lengths[call.call], default=start + len(call.prompt))
        if call.call not in superseded and call.continues in lineages and call.continues not in continued:
            continued.add(call.continues)
            lineage = lineages[call.call] = lineages[call.continues]
            lineage.calls.append(call.call)
            lineage.tokens = max(lineage.tokens, length)
        else:
            lineages[call.call] = Lineage([call.call], call.continues or None, length)
    return list({id(lineage): lineage for lineage in lineages.values()}.values())


def lineage_ids(calls: Sequence[SessionCall], superseded: Collection[str] = ()) -> dict[str, str]:
    """Return the id of the lineage of each call: the id of its first call; see :func:`lineages_of`."""
    return {name: lineage.calls[0] for lineage in lineages_of(calls, superseded) for name in lineage.calls}

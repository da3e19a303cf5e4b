"""Lineages of a session: a forest of token sequences, and the sequence that a new prompt continues.

Each recorded answer ends a sequence: the tokens of its prompt, then its own tokens. A prompt that begins with a
sequence continues it. A sequence is found in two ways, both in time linear in the request:

* before the engine is asked, by the client's messages: each answer is indexed by a digest of the messages that led to
  it and of the answer, in a form that clients do not change (:func:`read_chain`);
* after the engine has answered, by the tokens of the prompt: each sequence is indexed by the digest of its tokens.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from trinity_mq.families.messages import Message, MessageError, read_messages, without_nulls
from trinity_mq.messages import SessionCall
from trinity_mq.models.recording.beginnings import TOKEN_BYTES, Beginnings, new_state, token_bytes

SEQUENCE_BYTES = 2048
"""Upper estimate of the bytes that the index takes for a sequence, without tokens that the session's record holds
anyway."""
OPTIONS_IN_PROMPT = ("chat_template_kwargs", "reasoning_effort")
"""Options of a chat that can change how earlier messages are written."""
BREAK_CAUSES = ("template", "retoken", "temperature")
"""Reasons why a prompt does not begin with the tokens of the answer that its messages continue."""


# -- digests of messages


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
            message = {**message, "role": "assistant"}
            answer = message if _is_plain(message) else read_messages([message])[0]
            return _next_digest(self.digests[-1], answer), identity_of(answer)
        except (MessageError, RecursionError):
            return "", ""


def read_chain(body: Mapping[str, Any]) -> Chain | None:
    """Return the digests of a chat request. Requests have equal digests if they differ only in details that engines
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
        read = [message if _is_plain(message) else read_messages([message])[0] for message in messages]
        # with the choice none, the template does not write the tools
        tools = [] if body.get("tool_choice") == "none" else without_nulls(body.get("tools")) or []
        options = {name: body[name] for name in OPTIONS_IN_PROMPT if body.get(name) is not None}
        digests = [_digest(json.dumps([tools, options], sort_keys=True) if tools or options else "")]
        for message in read:
            digests.append(_next_digest(digests[-1], message))
    except (MessageError, RecursionError):
        return None
    return Chain(tuple(digests), tuple(map(identity_of, read)))


def identity_of(message: Message) -> str:
    """Return the identity that distinguishes an answer from an equal answer: a digest of the ids of its calls, or else
    of its thoughts. Empty: the message has neither.
    """
    if len(message) == 2:
        return ""
    if calls := message.get("tool_calls"):
        return _digest(json.dumps([call.get("id") for call in calls], default=str))
    thoughts = message.get("reasoning_content")
    return _digest(thoughts.strip()) if isinstance(thoughts, str) and thoughts.strip() else ""


def _is_plain(message: Any) -> bool:
    """Return whether a message is a role and a text, as most are: reading it changes nothing."""
    return (
        isinstance(message, dict)
        and len(message) == 2
        and isinstance(message.get("content"), str)
        and isinstance(message.get("role"), str)
    )


def _next_digest(digest: str, message: Message) -> str:
    role, text, calls, name = message["role"], message["content"], message.get("tool_calls"), message.get("name")
    if role == "assistant":
        text, name = text.strip(), None
    elif role == "tool":
        name = None
    rest = ""
    if calls or name:
        rest = json.dumps([name, [_plain_call(call["function"]) for call in calls or ()]], default=str)
    return _digest(f"{digest} {role!r} {len(text)} {text}{rest}")


def _plain_call(function: Mapping[str, Any]) -> str:
    return f"{function['name']} {json.dumps(_plain(function['arguments']), sort_keys=True)}"


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as integers: clients write 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(text: str) -> str:
    state = new_state()
    state.update(_text_bytes(text))
    return state.hexdigest()


def _text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# -- the forest of token sequences


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A sequence: the tokens of a prompt and of one of its answers."""

    call: str
    choice: int
    temperature: float
    number: int
    """Position of its call among the session's calls."""
    parent: TokenSequence | None
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
    """True if a later call continues this sequence, or a request in progress was matched to it among equal answers."""

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        parts: list[Sequence[int]] = []
        node: TokenSequence | None = self
        while node is not None:
            parts += [node.ids, node.added]
            node = node.parent
        return list(chain.from_iterable(reversed(parts)))


@dataclass(frozen=True, slots=True)
class Match:
    """The sequence that a conversation continues, according to its messages."""

    sequence: TokenSequence
    tokens: list[int]
    """Tokens of the sequence."""
    messages: int
    """Number of leading messages that lead to the answer, the answer included."""
    is_tied: bool
    """True if other answers are equal, so that the client may have continued another answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a prompt in the forest."""

    continued: TokenSequence | None
    """Longest sequence that the prompt begins with. None: the prompt begins a new lineage."""
    break_cause: str
    """Reason, from :data:`BREAK_CAUSES`, why the prompt does not begin with the sequence of the answer that the client
    continued. Empty: it does, or the client continued no answer."""
    is_tied: bool = False


class Lineages:
    """The sequences of one session.

    The index holds digests. It shares the tokens of the recorded calls with the session's record.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of sequences."""
        self.tokens = 0
        """Number of recorded tokens. A shared prefix counts once."""
        self._sequences: dict[str, list[TokenSequence]] = {}
        """Sequences by call id. Empty for a call that continues a call that was not stored."""
        self._answers: dict[str, list[TokenSequence]] = {}
        self._by_tokens = Beginnings[TokenSequence]()
        self._by_text = Beginnings[TokenSequence]()
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
            for sequence in self._sequences[name]:  # no second copy of the tokens stays in memory
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

    def _sequences_of(self, call: SessionCall, parent: TokenSequence | None) -> Iterator[TokenSequence]:
        state = new_state() if parent is None else parent.state.copy()
        state.update(token_bytes(call.prompt))
        before = len(call.prompt) if parent is None else parent.length + len(call.prompt)
        self.tokens += len(call.prompt)
        number = len(self._sequences)
        for index, choice in enumerate(call.choices):
            whole = state.copy()
            whole.update(token_bytes(choice.ids))
            sequence = TokenSequence(
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
            self._by_tokens.add(TOKEN_BYTES * sequence.length, whole.digest(), sequence)
            if choice.conversation:
                self._answers.setdefault(choice.conversation, []).append(sequence)
            self.count += 1
            self.tokens += len(choice.ids)
            yield sequence

    def _add_texts(self, sequences: Sequence[TokenSequence], call: SessionCall, prompt_text: str) -> None:
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

    def match(self, chat: Chain, temperature: float) -> Match | None:
        """Return the recorded answer that a conversation continues: the answer at the end of the longest known
        beginning of the conversation. Return None if no beginning ends with a recorded answer.

        Among equal answers, the ids of calls or the thoughts decide. If these are equal too, an answer without a
        continuation comes first, then the latest answer. Parallel branches with equal answers then stay apart.
        """
        for place in range(len(chat.digests) - 2, 0, -1):
            if equal := self._answers.get(chat.digests[place]):
                sequence, is_tied = self._choose(equal, temperature, chat.identities[place - 1])
                if is_tied:
                    sequence.is_continued = True  # equal requests under way at the same time take different answers
                return Match(sequence, sequence.tokens, place, is_tied)
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
        expected = None if match is None else match.sequence
        is_warm = match is not None and match.sequence.temperature == temperature
        if match is not None and is_warm and prompt[: len(match.tokens)] == match.tokens:
            start = match.sequence.length  # the beginning needs no look-up
            rest = self._by_tokens.of(token_bytes(prompt[start:]), match.sequence.state, TOKEN_BYTES * start)
            matches = [[match.sequence], *rest]
        else:
            matches = self._by_tokens.of(token_bytes(prompt))
        same = [warm for equal in matches if (warm := [node for node in equal if node.temperature == temperature])]
        continued, is_tied = self._choose(same[-1], temperature, "") if same else (None, False)
        if continued is not None and (expected is None or continued.length >= expected.length):
            return Place(continued, "", is_tied or (continued is expected and match is not None and match.is_tied))
        return Place(continued, self._break_cause(matches, text, expected), is_tied)

    def _break_cause(
        self, matches: Sequence[Sequence[TokenSequence]], text: str, expected: TokenSequence | None
    ) -> str:
        if matches and (expected is None or matches[-1][0].length >= expected.length):
            return "temperature"
        equal_texts = self._by_text.of(_text_bytes(text)) if text else []
        if any(expected is None or node.text == expected.text for nodes in equal_texts for node in nodes):
            return "retoken"
        return "" if expected is None else "template"

    def _choose(self, equal: Sequence[TokenSequence], temperature: float, identity: str) -> tuple[TokenSequence, bool]:
        """Return one of equal sequences, and whether another of them could be meant as well."""
        kept = [node for node in equal if node.call not in self._superseded] or equal
        candidates = [node for node in kept if identity and node.identity == identity] or kept
        chosen = max(
            candidates,
            key=lambda node: (node.temperature == temperature, not node.is_continued, node.number, -node.choice),
        )
        return chosen, len(candidates) > 1


# -- lineages of a recorded session


@dataclass(slots=True)
class SessionLineage:
    """A chain of calls: each call continues the call before it, if possible as one experience."""

    calls: list[str]
    """Call ids, in order. The first is the id of the lineage."""
    parent: str | None
    """The call of another lineage that the first call continues. None: it continues no call."""
    tokens: int
    """Number of tokens of its longest sequence, with the shared prefix."""


def superseded_calls(calls: Sequence[SessionCall]) -> set[str]:
    """Return the ids of the calls whose client did not receive the answer and repeated the request.

    A repeat names the call that it replaces if its gateway knows that call. The answer of another gateway may reach the
    stream later than the repeat. Therefore a repeat that names no call replaces one call with an equal request. That
    call began before the repeat was answered, has a lower retry count, and is not a sibling of the repeat. If several
    calls match, the call with the highest retry count is replaced.

    Args:
        calls: All calls of a session, in the order of the stream.
    """
    superseded = {call.supersedes for call in calls if call.supersedes}
    attempts: dict[str, list[SessionCall]] = {}
    """Calls by the digests of their requests. Calls with the highest retry counts come first."""
    for call in sorted(calls, key=lambda call: -call.retry):
        if call.digest and call.call not in superseded:
            attempts.setdefault(call.digest, []).append(call)
    for repeat in calls:
        if not repeat.retry or repeat.supersedes:
            continue
        equal = attempts.get(repeat.digest, [])
        for place in range(bisect.bisect_right(equal, -repeat.retry, key=lambda call: -call.retry), len(equal)):
            call = equal[place]
            if 0.0 < call.began <= repeat.at and call.call not in repeat.siblings and repeat.call not in call.siblings:
                superseded.add(equal.pop(place).call)
                break
    return superseded


def lineages_of(calls: Sequence[SessionCall], superseded: Collection[str] = ()) -> list[SessionLineage]:
    """Return the lineages of a session in the order of their first calls. Each call belongs to one lineage.

    The first call that continues a call extends its lineage. A later call begins a lineage of its own, whose parent is
    the continued call. A call that its client repeated extends nothing. This division names lineages;
    ``gateway.shared_prefix`` does not change it, although it may credit a shared prefix to a later branch.

    Args:
        calls: Calls of the session, in their order.
        superseded: Calls that their client repeated; see :func:`superseded_calls`.
    """
    lineages: dict[str, SessionLineage] = {}
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
            lineages[call.call] = SessionLineage([call.call], call.continues or None, length)
    return list({id(lineage): lineage for lineage in lineages.values()}.values())


def lineage_ids(calls: Sequence[SessionCall], superseded: Collection[str] = ()) -> dict[str, str]:
    """Return the id of the lineage of each call: the id of its first call; see :func:`lineages_of`."""
    return {name: lineage.calls[0] for lineage in lineages_of(calls, superseded) for name in lineage.calls}

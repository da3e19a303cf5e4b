"""The proof that experiences are what engines read and sampled: a witness in front of the engine, an agent that talks
in random ways, and a comparison that shares no code with the gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests.unit.gateway.serving import Serving
from trinity_mq.engines.generation.request import Completion, GenerationListener, GenerationRequest
from trinity_mq.experience import Experience
from trinity_mq.messages import Version

TAG = "\u241f"
"""Begins the stop text by which the witness recognises a request. No answer contains it."""
RETRIED = {"x-stainless-retry-count": "1"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        },
    }
]
Message = dict[str, Any]


# -- the witness


@dataclass(frozen=True)
class Sampled:
    """What an engine sampled for one choice, and the prompt that it had read."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    version: Version
    tag: str = field(compare=False)
    request: int = field(compare=False)
    """Number of the request at the engine."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.ids


class Witness:
    """A generator that writes down what it is asked and what it answers.

    Args:
        generator: The engine's generator.
        version: Returns the version of its weights.
        renew: Gives it weights of another version.
    """

    def __init__(self, generator: Any, version: Callable[[], Version], renew: Callable[[], object]) -> None:
        self._generator, self._version, self.renew = generator, version, renew
        self.sampled: list[Sampled] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        version = self._version()
        answers: list[list[Completion]] = self._generator.generate(requests, listener)
        for request, completions in zip(requests, answers, strict=True):
            self.note(request.stop, request.prompt, request.temperature, completions, version)
        return answers

    def note(
        self,
        stop: Sequence[str],
        prompt: Sequence[int],
        temperature: float,
        completions: Sequence[Completion],
        version: Version,
    ) -> None:
        """Write down one request and its answers."""
        [tag] = [text for text in stop if text.startswith(TAG)]
        number = len({sampled.request for sampled in self.sampled})
        self.sampled += [
            Sampled(
                tuple(prompt),
                tuple(completion.token_ids),
                tuple(completion.logprobs),
                temperature,
                version,
                tag,
                number,
            )
            for completion in completions
        ]


# -- the agent


@dataclass(frozen=True)
class Step:
    """One thing that the agent does; the numbers choose among what it has."""

    action: str
    session: int
    which: int
    text: str
    n: int = 1
    chosen: int = 0
    stream: bool = False
    cut: int | None = None
    temperature: float = 1.0
    tools: bool = False
    together: bool = False
    """Runs at the same time as the step before it."""


ACTIONS = (*["turn"] * 8, "sub", "fork", "rewind", "compact", "rewrite", "retry")
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=TAG), min_size=1, max_size=8)


def steps(texts: st.SearchStrategy[str] = TEXTS, *, most: int = 14) -> st.SearchStrategy[list[Step]]:
    """Return what an agent does in two sessions."""
    step = st.builds(
        Step,
        action=st.sampled_from(ACTIONS),
        session=st.sampled_from((0, 0, 0, 1)),
        which=st.sampled_from((0, 0, 0, 0, 1, 2, 5)),
        text=texts,
        n=st.sampled_from((1, 1, 1, 1, 2, 3)),
        chosen=st.integers(0, 2),
        stream=st.booleans(),
        cut=st.sampled_from((*[None] * 7, 1, 5)),
        temperature=st.sampled_from((*[1.0] * 7, 0.5)),
        tools=st.sampled_from((False, False, True)),
        together=st.sampled_from((False, False, False, False, True)),
    )
    return st.lists(step, min_size=most // 3, max_size=most)


@dataclass
class Conversation:
    """Messages that the agent holds."""

    messages: list[Message]
    tools: bool
    starts: list[int] = field(default_factory=list)
    """Where each of its turns began."""


class Agent:
    """Does steps in sessions of a gateway, and remembers the answers that it threw away.

    Args:
        at: The gateway.
        between: Called between steps, while no request is in progress.
    """

    def __init__(self, at: Serving, sessions: Sequence[str], between: Callable[[], object] = lambda: None) -> None:
        self._at, self.sessions, self._between = at, sessions, between
        self._group = 0
        self._held: dict[str, list[Conversation]] = {session: [] for session in sessions}
        self.session_of: dict[str, str] = {}
        """Session of each tag."""
        self.thrown_away: set[str] = set()
        """Tags of requests whose first answer was thrown away."""
        self.group_of: dict[str, int] = {}
        """By tag, the number of the requests that were under way at the same time."""
        self.answered: list[tuple[str, int, float]] = []
        """Tag, number of choices and temperature of each answered request."""
        self.refused: list[Any] = []

    async def do(self, steps: Sequence[Step]) -> None:
        """Do the steps, some of them at the same time."""
        groups: list[list[Step]] = []
        for step in steps:
            if step.together and groups:
                groups[-1].append(step)
            else:
                groups.append([step])
        for self._group, group in enumerate(groups):
            self._between()
            turns = [turn for step in group for turn in self._turns(step)]
            async with asyncio.TaskGroup() as tasks:
                for step, conversation in turns:
                    tasks.create_task(self._ask(step, conversation))

    def _turns(self, step: Step) -> list[tuple[Step, Conversation]]:
        """Return the conversations that the step continues. None is asked twice at the same time."""
        held = self._held[self.sessions[step.session]]
        if not held or step.action in {"sub", "compact"}:
            summary = "summary " if step.action == "compact" else ""
            created = Conversation([user(summary + step.text)], step.tools)
            held.append(created)
            return [(step, created)]
        old = held[-1 - step.which % len(held)]
        copy = Conversation(json.loads(json.dumps(old.messages)), old.tools, list(old.starts))
        if step.action == "rewind" and copy.starts:
            end = copy.starts[step.which % len(copy.starts)]
            copy.messages, copy.starts = copy.messages[:end], copy.starts[: step.which % len(copy.starts)]
        if step.action == "rewrite":
            first = next(number for number, message in enumerate(copy.messages) if message["role"] == "user")
            copy.messages[first]["content"] += "!"
        held.append(copy)
        turns = [copy]
        if step.action == "fork":
            other = Conversation(json.loads(json.dumps(copy.messages)), copy.tools, list(copy.starts))
            held.append(other)
            turns.append(other)
        for conversation in turns:
            _continue(conversation, step.text)
        return [(step, conversation) for conversation in turns]

    async def _ask(self, step: Step, conversation: Conversation) -> None:
        session = self.sessions[step.session]
        tag = f"{TAG}{len(self.session_of)}"
        self.session_of[tag], self.group_of[tag] = session, self._group
        body = {
            "messages": conversation.messages,
            "n": step.n,
            "temperature": step.temperature,
            "stop": [tag],
            "stream": step.stream,
            **({} if step.cut is None else {"max_tokens": step.cut}),
            **({"tools": TOOLS} if conversation.tools else {}),
        }
        if step.action == "retry" and await self._post(session, body, {}) is not None:
            self.thrown_away.add(tag)
        answers = await self._post(session, body, RETRIED if tag in self.thrown_away else {})
        if answers is None:
            conversation.messages.pop()
            if not conversation.messages:
                conversation.messages.append(user(step.text))
            return
        conversation.starts.append(len(conversation.messages))
        conversation.messages.append(answers[step.chosen % len(answers)])

    async def _post(self, session: str, body: Message, headers: Mapping[str, str]) -> list[Message] | None:
        url = f"{self._at.url}/s/{session}/v1/chat/completions"
        async with self._at.http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                self.refused.append(await response.json())
                return None
            self.answered.append((body["stop"][0], body["n"], body["temperature"]))
            if not body["stream"]:
                answer = await response.json()
                return [_present(choice["message"]) for choice in answer["choices"]]
            return assembled((await response.text()).split("\n\n"), body["n"])


def user(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def _continue(conversation: Conversation, text: str) -> None:
    calls = conversation.messages[-1].get("tool_calls") or [] if conversation.messages else []
    for call in calls:
        conversation.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    if not calls and (not conversation.messages or conversation.messages[-1]["role"] != "user"):
        conversation.messages.append(user(text))


def _present(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None}


def assembled(events: Sequence[str], n: int) -> list[Message]:
    """Return the messages of a stream, as a client puts them together."""
    messages: list[Message] = [{"role": "assistant"} for _ in range(n)]
    for event in events:
        if not event.startswith("data: {"):
            continue
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            message, delta = messages[choice["index"]], choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for part in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    function = {"name": part["function"]["name"], "arguments": ""}
                    calls.append({"id": part["id"], "type": "function", "function": function})
                calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
    return [message if "tool_calls" in message else {"content": "", **message} for message in messages]


# -- the comparison


def check(
    experiences: Sequence[Experience],
    sampled: Sequence[Sampled],
    thrown_away: set[str],
    group_of: Mapping[str, int],
    *,
    merge: str = "prefix",
    shared_prefix: str = "first",
) -> None:
    """Compare the experiences of a session with what its engine read and sampled.

    Args:
        experiences: All experiences of the session; every answer has a reward.
        sampled: What the witness saw of this session.
        thrown_away: Tags of requests whose first answer the agent threw away.
        group_of: By tag, the number of the requests that were under way at the same time.
        merge: ``gateway.merge``.
        shared_prefix: ``gateway.shared_prefix``.
    """
    first_request = {answer.tag: answer.request for answer in reversed(sampled)}
    kept = [
        answer for answer in sampled if answer.tag not in thrown_away or answer.request != first_request[answer.tag]
    ]
    counts, uses = Counter(kept), Counter[Sampled]()
    for experience in experiences:
        uses.update(_answers_of(experience, sampled, uses, counts))
    for answer in sampled:
        assert uses[answer] <= counts[answer], "an answer is trained on twice, or although its client threw it away"

    requests: dict[int, list[Sampled]] = defaultdict(list)
    for answer in kept:
        requests[answer.request].append(answer)
    continued, uncertain = dict[Sampled, list[int]](), set[Sampled]()
    for request, (choice, *_) in requests.items():
        prefixes = [
            answer
            for answer in kept
            if answer.temperature == choice.temperature
            and answer.request != request
            and group_of[answer.tag] <= group_of[choice.tag]
            and answer.tokens == choice.prompt[: len(answer.tokens)]
        ]
        size = max((len(answer.tokens) for answer in prefixes), default=0)
        longest = [answer for answer in prefixes if len(answer.tokens) == size]
        if any(group_of[answer.tag] == group_of[choice.tag] for answer in prefixes):
            uncertain |= set(prefixes)  # of two requests at the same time, either may be recorded first
        elif len(longest) == 1:
            continued.setdefault(longest[0], []).append(request)
        else:
            uncertain |= set(longest)
    least, most = Counter[Sampled](), Counter[Sampled]()
    for choices in requests.values():
        is_chosen = [answer in continued or answer in uncertain for answer in choices]
        for answer, chosen in zip(choices, is_chosen, strict=True):
            least[answer] += not any(is_chosen) or (chosen and not uncertain)
            most[answer] += not any(answer in continued for answer in choices) or chosen
    for answer in kept:
        assert least[answer] <= uses[answer] <= most[answer], (
            f"an answer of {answer.tag} is trained on {uses[answer]} times, wanted {least[answer]} to {most[answer]}"
        )
    if not uncertain and max(counts.values(), default=1) == 1:
        joined = 0
        for following in continued.values():
            children = sum(uses[choice] for request in following for choice in requests[request])
            joined += merge != "per_call" and (children == 1 or (children > 1 and shared_prefix != "mean"))
        assert len(experiences) == sum(uses.values()) - joined, "one experience for each lineage"


DISCOUNT, LAST_REWARD = 0.5, 1024.0
"""Discount and session's reward of the proof of rewards. Their products are exact."""


def check_rewards(
    experiences: Sequence[Experience],
    sampled: Sequence[Sampled],
    thrown_away: set[str],
    group_of: Mapping[str, int],
    *,
    shared_prefix: str,
) -> bool:
    """Compare the rewards of a session with rules 2, 4 and 5 of docs/serving.md, applied to what the witness saw.

    Args:
        experiences: All experiences of the session with ``gateway.merge: per_call``, the reward :data:`LAST_REWARD` and
            the discount :data:`DISCOUNT`.
        sampled: What the witness saw of this session.
        thrown_away: As in :func:`check`.
        group_of: As in :func:`check`.
        shared_prefix: ``gateway.shared_prefix``.

    Returns:
        False if the parents or the order of answers cannot be told from outside: requests at the same time, or answers
        with equal tokens.
    """
    first_request = {answer.tag: answer.request for answer in reversed(sampled)}
    requests: dict[int, list[Sampled]] = defaultdict(list)
    for answer in sampled:
        if answer.tag not in thrown_away or answer.request != first_request[answer.tag]:
            requests[answer.request].append(answer)
    groups = [group_of[choices[0].tag] for choices in requests.values()]
    kept = [answer for choices in requests.values() for answer in choices]
    if len(set(groups)) < len(groups) or len({(answer.tokens, answer.temperature) for answer in kept}) < len(kept):
        return False
    parents: dict[int, Sampled | None] = {}
    children: dict[Sampled, list[int]] = defaultdict(list)
    tree_of: dict[int, int] = {}
    for request, (choice, *_) in requests.items():
        prefixes = [
            answer
            for answer in kept
            if answer.request < request
            and answer.temperature == choice.temperature
            and answer.tokens == choice.prompt[: len(answer.tokens)]
        ]
        parent = parents[request] = max(prefixes, key=lambda answer: len(answer.tokens), default=None)
        tree_of[request] = request if parent is None else tree_of[parent.request]
        if parent is not None:
            children[parent].append(request)
    trained = {
        request: [answer for answer in choices if children[answer]] or choices for request, choices in requests.items()
    }
    rewards: dict[Sampled, float] = {}
    for request in sorted(requests, reverse=True):
        members = [number for number in requests if tree_of[number] == tree_of[request]]
        after = [number for number in requests if number > max(members)]
        resumed = [number for number in after if (base := parents[number]) is not None and base.request < members[0]]
        new_trees = [number for number in after if parents[number] is None]
        follower = [*resumed[:1], *new_trees[:1]][:1]
        for answer in trained[request]:
            following = [rewards[choice] for number in children[answer] or follower for choice in trained[number]]
            by_rule = {"first": following[:1], "last": following[-1:], "mean": following}[shared_prefix]
            rewards[answer] = DISCOUNT * sum(by_rule) / len(by_rule) if by_rule else LAST_REWARD
    wanted = {(answer.tokens, answer.temperature): reward for answer, reward in rewards.items()}
    actual = {
        (tuple(experience.tokens.tolist()), experience.temperature): experience.reward for experience in experiences
    }
    assert actual.keys() == wanted.keys()
    for key, reward in wanted.items():
        assert abs((actual[key] or 0.0) - reward) < 1e-6, f"reward {actual[key]}, wanted {reward}"
    return True


def _answers_of(
    experience: Experience, sampled: Sequence[Sampled], uses: Mapping[Sampled, int], counts: Mapping[Sampled, int]
) -> list[Sampled]:
    """Return the answers whose tokens are under the mask of an experience."""
    assert experience.action_mask is not None
    assert experience.logprobs is not None
    tokens, begin = tuple(experience.tokens.tolist()), experience.prompt_length
    mask = [False] * begin + experience.action_mask.tolist()
    versions = _versions_by_token(experience)
    answers: list[Sampled] = []
    place = begin
    while place < len(tokens):
        if not mask[place]:
            place += 1
            continue
        matches = [
            candidate
            for candidate in sampled
            if len(candidate.prompt) == place
            and candidate.tokens == tokens[: len(candidate.tokens)]
            and candidate.temperature == experience.temperature
            and all(mask[place : len(candidate.tokens)])
        ]
        assert matches, f"the mask at token {place} covers what no engine sampled after these tokens"
        end = max(len(candidate.tokens) for candidate in matches)
        longest = [candidate for candidate in matches if len(candidate.tokens) == end]
        logprobs, stamps = experience.logprobs[place - begin : end - begin], set(versions[place - begin : end - begin])
        equal = [
            candidate
            for candidate in longest
            if torch.equal(logprobs, torch.tensor(candidate.logprobs, dtype=torch.float32))
        ]
        assert equal, "logprobs are the engine's"
        equal = [candidate for candidate in equal if stamps == {candidate.version}]
        assert equal, "versions are the engine's"
        answer = min(equal, key=lambda candidate: uses[candidate] + answers.count(candidate) - counts[candidate])
        answers.append(answer)
        place = end
    assert answers, "an experience without a sampled token"
    assert tokens == answers[-1].tokens, "the tokens are those that the engine read and sampled last"
    assert begin == len(answers[0].prompt), "the response begins with the first sampled token"
    outside = [value for value, bit in zip(experience.logprobs.tolist(), mask[begin:], strict=True) if not bit]
    assert not any(outside), "tokens that were not sampled have no logprob"
    return answers


def _versions_by_token(experience: Experience) -> list[Version]:
    assert experience.versions is not None
    response = experience.tokens.shape[0] - experience.prompt_length
    starts = [first for first, _, _ in experience.versions]
    ends = [*starts[1:], response]
    return [
        (generation, step)
        for (first, generation, step), end in zip(experience.versions, ends, strict=True)
        for _ in range(end - first)
    ]

"""Model families against what their makers publish: prompts and masks token for token, answers read back."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from tests.chat_codec import trained
from tests.golden.families.conversations import CASES, TOOLS, Case
from tests.golden.families.makers import FOLDER, SOURCES, codec_of, template_of, vocabulary_of
from tests.golden.families.page import PAGE
from tests.golden.families.page import written as written_page
from tests.golden.families.proofs import PROOFS, UNPROVEN, Proof
from trinity_mq.engines.generation.text import TextError
from trinity_mq.families.family import ParsedAnswer
from trinity_mq.families.messages import read_messages
from trinity_mq.families.table import FAMILIES, family_of

LIMIT = 1 << 20
REFUSING = [proof for proof in PROOFS if proof.refused]
CALLING = [proof for proof in PROOFS if "one call" not in proof.refused]
BY_TEMPLATE = pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.template)
MISTRAL = json.loads((FOLDER / "mistral.json").read_text())
HARMONY = json.loads((FOLDER / "harmony.json").read_text())


class Turn(NamedTuple):
    """A turn of the assistant as the maker's template writes it."""

    number: int
    prompt: str
    text: str
    """Text that an engine would sample, with the token that ends it if the template writes one."""


def without_end(text: str, proof: Proof) -> str:
    for end in vocabulary_of(proof.template).ends:
        text = text.removesuffix(end)
    return text


def turns_of(proof: Proof, case: Case, switches: Mapping[str, Any]) -> list[Turn] | None:
    """The turns of a conversation by the maker's template; None if it writes one in another form later."""
    whole = proof.truth(case.messages, case.tools, asks=False, **switches)
    turns = []
    for number, message in enumerate(case.messages):
        if message["role"] != "assistant":
            continue
        prompt = proof.truth(case.messages[:number], case.tools, asks=True, **switches)
        alone = proof.truth(case.messages[: number + 1], case.tools, asks=False, **switches)
        if not whole.startswith(prompt) or not alone.startswith(prompt):
            return None
        text, written = whole[len(prompt) :], alone[len(prompt) :]
        ends = [text.find(end) + len(end) for end in vocabulary_of(proof.template).ends if end in text]
        text = text[: min(ends, default=len(text))]
        if not written.startswith(text) and not text.startswith(written):
            return None
        turns.append(Turn(number, prompt, text))
    return turns


def written(proof: Proof) -> Iterator[tuple[str, Case, Mapping[str, Any], frozenset[str]]]:
    """The conversations that a template writes, with each set of its variables."""
    for switches, rewritten in proof.rewritten:
        for title, case in proof.cases():
            if title not in proof.refused:
                yield title, case, {**proof.fixed, **switches}, rewritten


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_each_template_is_the_one_of_its_source(name: str) -> None:
    text = template_of(name)
    assert hashlib.sha256(text.encode()).hexdigest() == SOURCES[name]["sha256"], "a maker's file is kept as it is"
    assert "{% generation %}" not in text, "templates patched for training are not the maker's"
    assert name in {proof.template for proof in PROOFS}


@BY_TEMPLATE
def test_the_family_is_known_by_its_template(proof: Proof) -> None:
    assert family_of(template_of(proof.template)).name == proof.family


@BY_TEMPLATE
def test_prompts_are_the_makers_token_for_token(proof: Proof) -> None:
    codec = codec_of(proof.template)
    for title, case, switches, _ in written(proof):
        prompt = codec.prompt(read_messages(case.messages), case.tools, switches, limit=LIMIT)
        truth = proof.truth(case.messages, case.tools, asks=True, **switches)
        assert prompt.text == truth, (title, switches, codec.rendering)
        assert prompt.token_ids == codec.encode(truth), (title, switches, codec.rendering)


@pytest.mark.parametrize("proof", REFUSING, ids=lambda proof: proof.template)
def test_what_a_template_does_not_write_is_refused(proof: Proof) -> None:
    codec = codec_of(proof.template)
    for title, case in proof.cases():
        if title in proof.refused:
            with pytest.raises(TextError):
                codec.prompt(read_messages(case.messages), case.tools, proof.fixed, limit=LIMIT)


@BY_TEMPLATE
def test_masks_cover_what_the_assistant_samples(proof: Proof) -> None:
    codec = codec_of(proof.template)
    for title, case, switches, rewritten in written(proof):
        turns = turns_of(proof, case, switches)
        assert (turns is None) == (title in rewritten), (title, switches)
        if turns is None:
            with pytest.raises(TextError):
                codec.conversation(read_messages(case.messages), case.tools, switches)
            continue
        masked = codec.conversation(read_messages(case.messages), case.tools, switches)
        texts = [turn.text for turn in turns]
        if turns and case.messages[-1]["role"] == "assistant" and without_end(texts[-1], proof) == texts[-1]:
            texts[-1] += codec.decode([[codec.end_id]])[0]  # an engine samples an end where the template has none
        assert trained(codec, masked) == texts, (title, switches)
        truth = proof.truth(case.messages, case.tools, asks=False, **switches)
        through = codec.decode([masked.token_ids])[0]
        assert truth.startswith(through.removesuffix(texts[-1]) if turns else through), (title, switches)


def parts(answer: ParsedAnswer) -> tuple[str | None, str, list[tuple[str, Any]], int]:
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.calls]
    return answer.thoughts, answer.content, calls, answer.malformed


def parts_of(message: Mapping[str, Any]) -> tuple[str | None, str, list[tuple[str, Any]], int]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message.get("reasoning_content"), message["content"].strip(), calls, 0


def sampled(proof: Proof, case: Case, count: int, switches: Mapping[str, Any]) -> tuple[str, str] | None:
    """The prompt for message ``count`` and what an engine would sample for it, with the token that ends the turn; None
    if the template writes a turn that nobody samples after this prompt. Thoughts that the prompt opens are short.
    """
    prompt = proof.truth(case.messages[:count], case.tools, asks=True, **switches)
    alone = proof.truth(case.messages[: count + 1], case.tools, asks=False, **switches)
    opening = next((tag for tag in ("<think>\n", "<think>") if prompt.endswith(tag)), "")
    if alone.startswith(prompt):
        text = alone[len(prompt) :]
    elif opening and alone.startswith(prompt.removesuffix(opening)):
        body = alone[len(prompt) - len(opening) :].removeprefix("<think>")
        text = f"Hm.{body}" if "</think>" in body else f"Hm.\n</think>\n\n{body}"
    else:
        return None
    ends = vocabulary_of(proof.template).ends
    places = [text.find(end) + len(end) for end in ends if end in text]
    if places:
        return prompt, text[: min(places)]
    following = proof.truth(case.messages, case.tools, asks=True, **switches).removeprefix(prompt + text)
    return prompt, text + next((end for end in ends if following.startswith(end)), ends[0])


def answers(proof: Proof) -> Iterator[tuple[str, Turn, tuple[str | None, str, list[tuple[str, Any]], int]]]:
    """The answers that a template writes, also behind thoughts that the prompt opens, and what they are read as."""
    for title, case, switches, _ in written(proof):
        for turn in turns_of(proof, case, switches) or ():
            yield title, turn, parts_of(case.messages[turn.number])
        for number, message in enumerate(case.messages):
            opened = sampled(proof, case, number, switches) if message["role"] == "assistant" else None
            if opened is not None and opened[1].startswith("Hm."):
                yield title, Turn(number, *opened), ("Hm.", *parts_of(message)[1:])


@BY_TEMPLATE
def test_answers_of_the_template_are_read_back(proof: Proof) -> None:
    codec, titles = codec_of(proof.template), set()
    for title, turn, wanted in answers(proof):
        answer = codec.read_answer(without_end(turn.text, proof), turn.prompt[-200:], TOOLS)
        thoughts, content, calls, malformed = parts(answer)
        is_equal = (thoughts, content.strip(), calls, malformed) == wanted
        assert is_equal == (title not in proof.unread), (title, turn, answer)
        titles.add(title)
    assert "answered" in titles


@BY_TEMPLATE
def test_a_finished_turn_is_continued_as_the_template_continues_it(proof: Proof) -> None:
    codec, broken = codec_of(proof.template), set()
    for title, case, switches, _ in written(proof):
        last = max((place for place, message in enumerate(case.messages) if message["role"] == "assistant"), default=0)
        turn = sampled(proof, case, last, switches) if last and last + 1 < len(case.messages) else None
        if turn is None:
            continue
        truth, before = proof.truth(case.messages, case.tools, asks=True, **switches), codec.encode("".join(turn))
        prompt = codec.prompt(
            read_messages(case.messages), case.tools, switches, before=before, messages_before=last + 1, limit=LIMIT
        )
        if prompt.is_continued:
            added = codec.decode([prompt.token_ids[len(before) :]])[0]
            assert prompt.token_ids[: len(before)] == before
            assert added
            assert truth.endswith(added), (title, switches, codec.rendering)
            if truth.startswith("".join(turn)):
                assert prompt.token_ids == codec.encode(truth), (title, switches)
        else:
            broken.add(title)
            assert prompt.token_ids == codec.encode(truth), (title, switches, codec.rendering)
    assert broken == proof.breaks


# -- hostile answers

CALLED = "parallel calls", "one call", "thoughts and call"


def hostile(text: str) -> Iterator[str]:
    """Answers that are cut or damaged."""
    yield from (text[:end] for end in range(0, len(text), 3))
    yield from (text[:place] + noise + text[place:] for place in range(0, len(text), 17) for noise in ("{", '"', "<"))
    yield text * 3
    yield text.replace('"', "'")
    yield text.replace("}", "")


@BY_TEMPLATE
def test_damaged_answers_are_read_without_an_error(proof: Proof) -> None:
    codec = codec_of(proof.template)
    texts = {
        (without_end(turn.text, proof), turn.prompt[-200:])
        for title, case, switches, _ in written(proof)
        if title in CALLED
        for turn in turns_of(proof, case, switches) or ()
    } or {("Hello <think> [TOOL_CALLS]<tool_call>{", "")}
    for text, prompt in texts:
        for damaged in hostile(text):
            for call in codec.read_answer(damaged, prompt, TOOLS).calls:
                assert call["function"]["name"]
                assert isinstance(call["function"]["arguments"], str)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_time_to_read_is_linear_in_the_text(family: Any) -> None:
    begins = [*family.calls_begin, *family.headers, *(family.thoughts or ())]
    for piece in [*begins, "".join(begins), *(f'{begin}{{"name": "f", "a": [' for begin in begins)]:
        short, long = (seconds_to_read(family, piece * (size // len(piece))) for size in (25_000, 100_000))
        assert long < 8 * short + 0.3, piece


def seconds_to_read(family: Any, text: str) -> float:
    start = time.thread_time()
    family.read(text, "", TOOLS)
    return time.thread_time() - start


@pytest.mark.parametrize("proof", CALLING, ids=lambda proof: proof.template)
def test_a_call_without_its_end_is_no_call_or_the_whole_call(proof: Proof) -> None:
    codec = codec_of(proof.template)
    cases = [(turn, calls) for title, turn, (_, _, calls, _) in answers(proof) if title == "one call"]
    assert cases
    for turn, calls in cases:
        text = without_end(turn.text, proof)
        begin = min(text.find(mark) for mark in codec.family.calls_begin if mark in text)
        for end in range(begin + 1, len(text)):
            answer = codec.read_answer(text[:end], turn.prompt[-200:], TOOLS)
            assert parts(answer)[2] in ([], calls), text[:end]


# -- makers' packages


def maker_of_mistral(version: str) -> Proof:
    names = {"v3": "mistral-nemo", "v11": "mistral-small-3.2", "v13": "ministral-3"}
    return next(proof for proof in PROOFS if proof.template == names[version])


DEVIATIONS = {
    # the template writes the result of a call as it is, the package as JSON; the package strips blanks behind an answer
    "v3": {"result", "parallel calls", "two rounds", "turn after a result", "answer after a result", "unicode"},
    # the template writes no text next to calls
    "v11": {"text and call", "unicode"},
    "v13": {"unicode"},
}
"""Conversations that the maker's template and the maker's package write in different ways."""


@pytest.mark.parametrize("version", DEVIATIONS)
def test_prompts_of_mistral_are_those_of_its_package(version: str) -> None:
    proof = maker_of_mistral(version)
    codec, deviations = codec_of(proof.template), set()
    for title, case in proof.cases():
        truth = MISTRAL["rendered"][version][title]
        if truth is None or title in proof.refused:
            continue
        asks = case.messages[-1]["role"] != "assistant"
        system = [] if case.messages[0]["role"] == "system" or version == "v3" else [{"role": "system", "content": ""}]
        messages = read_messages([*system, *case.messages])
        text = codec.render_with_tools(messages, case.tools, add_generation_prompt=asks)
        if text.replace("[SYSTEM_PROMPT][/SYSTEM_PROMPT]", "") != truth:
            deviations.add(title)
    assert deviations == DEVIATIONS[version]


@pytest.mark.parametrize("effort", HARMONY["rendered"])
def test_prompts_of_gpt_oss_are_those_of_its_package(effort: str) -> None:
    proof = next(proof for proof in PROOFS if proof.template == "gpt-oss")
    codec, deviations = codec_of(proof.template), set()
    for title, case in proof.cases():
        if title in proof.refused:
            continue
        prompt = codec.prompt(read_messages(case.messages), case.tools, {"reasoning_effort": effort}, limit=LIMIT)
        [today] = re.findall(r"Current date: (\S+)", prompt.text)
        if prompt.text != HARMONY["rendered"][effort][title]["prompt"].replace(HARMONY["date"], today):
            deviations.add(title)
    assert deviations == GPT_DEVIATIONS


GPT_DEVIATIONS = {title for title, case in CASES.items() if case.tools or title == "system"} - {"parallel calls"}
"""The template of gpt-oss writes blank lines after the instructions, and nested objects of tools, in another way."""


def test_the_page_shows_what_is_proven() -> None:
    page = PAGE.read_text()
    assert page == written_page(page), "run python tests/golden/families/page.py"
    assert {family.name for family in FAMILIES} == {proof.family for proof in PROOFS} | UNPROVEN.keys()

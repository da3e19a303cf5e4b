r"""Extracts the answer that a text states, and compares answers: exactly for numbers, else by math-verify.

A text is searched in this order. The first match is the answer:

1. the last non-empty ``\boxed{}`` or ``<answer></answer>``, the later of the two;
2. the last ``####`` whose line reads as an answer; a Markdown heading such as ``#### Step 2`` does not;
3. the last sentence "the answer is ..." (also "Answer: ...") that continues with text that reads as an answer;
4. unmarked text: its last quantity, as :mod:`grammar` reads it, or its last formula.

In a response that was cut at a limit only rules 1 and 2 apply. A stated answer reads as a number if it holds exactly
one quantity with a value, regardless of the words around it: ``18 eggs`` and ``x = 18`` do, ``8, 7``, ``2x`` and
``10:30`` do not.

math-verify (https://github.com/huggingface/Math-Verify) defines mathematical equality: ``\frac{1}{\sqrt{3}}`` is
``\frac{\sqrt{3}}{3}``, sets have no order, tuples have an order.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import queue
import re
import signal
import weakref
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import structlog

from trinity_mq.rewards.ground_truth import BOOLEANS, accept_any_truth_type
from trinity_mq.rewards.math.grammar import Quantity, plain, quantities, reads_as_words
from trinity_mq.rewards.math.trinity_answers import RuleResult
from trinity_mq.rewards.registry import RewardError
from trinity_mq.rewards.text import last_boxed, last_tagged
from trinity_mq.runtime.processes.children import ChildEndedError, ChildNotStartedError, ChildServer

TAIL = 1000
"""Maximum characters read: of a marked text, and at the end of a text when searching for an unmarked answer."""
CANDIDATES = 20
"""Maximum lines with ``####``, or sentences, that are examined from the end of a text."""
LONGEST_LINE = 300

_HASHES = re.compile(r"#{4,}([^\n]*)")
_SENTENCE = re.compile(
    r"\banswer\b(?:[^.\n:=]{0,60}?\b(?:is|are|was|be|equals)\b|[\s*_\"]{0,3}[:=])[\s:*_]*", re.IGNORECASE
)
_FORMULA = re.compile(
    r"\$\$(?P<display>.+?)\$\$|\$(?P<inline>(?=\S)[^$\n]*?[^\s$\\])\$(?!\d)|\\\((?P<round>.+?)\\\)|\\\[(?P<square>.+?)\\\]",
    re.DOTALL,
)
# A "$" is currency unless it touches the formula between it and the next "$" (the rule of pandoc).
_CLAUSE_END = re.compile(r"[.!?](?=[\s*_]|$)|\n|,\s+(?=[A-Za-z])|\s\(|\b(?:because|since|so|which|where)\b")
_JOINED = re.compile(r"[,;]|\b(?:and|or)\b")
_NUMBERED = re.compile(
    r"\b(?:step|part|case|section|phase|stage|question|problem|example|exercise|method|option|approach|round|chapter|"
    r"equation|figure|table|note|task|item|point|level|day|week|month|year|solution|attempt|scenario|iteration|number|no)"
    r"s?[\s.#*]*$",
    re.IGNORECASE,
)
_LETTERED = re.compile(
    r"\W*(?:step|part|case|section|phase|stage|method|option|approach)\s+(?:[A-Z]|[IVX]+)\b", re.IGNORECASE
)
_INTRODUCED = re.compile(r"\banswers?\b|(?:[:=]|\b(?:is|are|was|were|equals))[\s*$]*$", re.IGNORECASE)
_EQUAL = re.compile(r"[=\u2248]|\\(?:approx|simeq)")
_NOT = re.compile(r"\bnot\b", re.IGNORECASE)
_CHOICE = re.compile(r"\b(?:between|either|from)\b", re.IGNORECASE)
_LIST_MARKER = re.compile(r"^\s*\d+[.)]\s+(?=\S)")
_HEADING = re.compile(r"^\s{0,3}#{1,6}(?=[\s#])")
_AROUND = re.compile(r"^[\s.:*$]+|[\s.:*$]+$")
_SPACES = r"(?:[\s~:.]|\\[ ,;:!]|\\q?quad(?![a-z]))"
_LABEL = re.compile(rf"[\s$]*(?:\(([A-J])\)(?:(?=[-\d$])|{_SPACES})|([A-J])[.):]{_SPACES}){_SPACES}*(?=[^\s.:*$])")
_LETTER = re.compile(r"\(?([A-J])\)?")
_MARKUP = re.compile(r"\\(?:boxed|fbox)\s?\{?|</?\w+>|#{4,}")

log = structlog.get_logger(__name__)
LONGEST = 500
"""Maximum characters of an answer; a longer answer is never equal."""
LONGEST_RESPONSE = 200_000
"""Maximum characters of a response that is compared by a named rule; a longer response is wrong."""
CPU_SECONDS = 2.0
"""Maximum processor seconds for one pair. The limit is not wall time, because a busy machine must not turn a right
answer into a wrong answer.
"""
MEMORY = 2 * 2**30
"""Maximum bytes that a child may allocate."""
SILENCE = 120.0
"""Maximum seconds until a child replies. Then :class:`ChildTimeoutError` is raised, because the machine is overloaded;
the answer does not count as wrong.
"""
CHILD = Path(__file__).with_name("judge_child.py")


class StatedAnswer(NamedTuple):
    """The answer that a text states."""

    text: str
    """LaTeX or words; empty if the answer is too long."""
    number: Fraction | None = None
    percent: bool = False
    """Whether ``number`` precedes a percent sign."""
    is_calculation: bool = False
    """Whether the answer is an unevaluated calculation, such as ``2 + 17``."""
    choice: str = ""
    """Letter of a multiple-choice answer: B for ``(B) 12``, whose text is ``12``, and for ``(B)``."""


@accept_any_truth_type
def is_correct(response: str, truth: str | None, *, finished: bool) -> bool:
    """Return whether ``response``, ``finished`` or cut at a limit, states the answer that ``truth`` states. Without a
    truth, return False.
    """
    if not truth:
        return False
    right = truth_answer(truth)
    answer = extract_answer(response, finished=finished, words=reads_as_words(right.text))
    return answer is not None and equal(right, answer)


@functools.lru_cache(maxsize=4096)
def truth_answer(truth: str) -> StatedAnswer:
    """Return the answer of a dataset's ground truth: its marked answer, else the whole text."""
    return next(_marked(truth, finished=True, words=True), None) or read(truth, latex=True)


def extract_answer(text: str, *, finished: bool, words: bool = False) -> StatedAnswer | None:
    """Return the answer that ``text`` states, or None. The order of the search is in the module's docstring.

    Args:
        text: A response.
        finished: Whether the response ended by itself and was not cut at a limit.
        words: Whether the expected answer is in words, such as ``Monday``.
    """
    marked = next(_marked(text, finished=finished, words=words), None)
    return marked if marked or not finished else _unmarked(text, words)


def read(text: str, *, latex: bool) -> StatedAnswer:
    """Return the answer that the whole ``text``, a formula or prose, denotes: its only quantity, else all of it. The
    answer is empty if the text is longer than :data:`TAIL`.
    """
    if len(text) > TAIL:
        return StatedAnswer("")
    shown = plain(text)
    if label := _LABEL.match(shown):
        return read(shown[label.end() :], latex=latex)._replace(choice=label[1] or label[2])
    matches = quantities(shown, latex=latex)
    if len(matches) == 1 and not _NOT.search(shown[: matches[0].start]):
        return _answer(shown, matches[0])
    letter = _LETTER.fullmatch(bare := _AROUND.sub("", shown))
    return StatedAnswer(letter[1], choice=letter[1]) if letter else StatedAnswer(bare or text.strip())


def equal(right: StatedAnswer, answer: StatedAnswer) -> bool:
    """Return whether two answers are equal. Numbers are compared exactly; if only one of them is a percentage, ``50%``
    equals both ``50`` and ``0.5``. Different letters of a choice are never equal. An answer that is empty or too long
    equals no answer.
    """
    if not (0 < len(right.text) <= LONGEST and 0 < len(answer.text) <= LONGEST):
        return False
    if right.choice and answer.choice and (right.choice != answer.choice or right.choice in {right.text, answer.text}):
        return right.choice == answer.choice
    if right.number is not None and answer.number is not None:
        hundredth = {(True, False): right.number / 100, (False, True): right.number * 100}
        return answer.number in {right.number, hundredth.get((right.percent, answer.percent), right.number)}
    if _EQUAL.search(answer.text) and not _EQUAL.search(right.text):
        return False  # math-verify would use only one side of "2x = 18" or "8 = 7"
    if right.text.lower() in BOOLEANS:
        return right.text.lower() == answer.text.lower()
    return right.text.split() == answer.text.split() or same(right.text, answer.text)


def _answer(shown: str, quantity: Quantity) -> StatedAnswer:
    text = shown[quantity.start : quantity.end].strip()
    return (
        StatedAnswer(text)
        if quantity.contradicts
        else StatedAnswer(text, quantity.value, quantity.percent, quantity.is_calculation)
    )


def _marked(text: str, *, finished: bool, words: bool) -> Iterator[StatedAnswer]:
    box, tag = last_boxed(text), last_tagged(text)
    if box is not None and (tag is None or box > tag):
        yield read(box[1], latex=True)
    elif tag is not None:
        yield _inside_tag(tag[1], words)
    yield from _after_hashes(text, words)
    if finished:
        yield from _in_sentences(text, words)


def _inside_tag(content: str, words: bool) -> StatedAnswer:
    if len(content) > TAIL or len(quantities(plain(content), latex=False)) > 1:
        inner = (*_after_hashes(content, words), *_in_sentences(content, words))
        stated_inside = inner[0] if inner else _answer_in_clause(content.strip()[:LONGEST_LINE], words)
        if stated_inside is not None:
            return stated_inside
    return _read_text(content)


def _read_text(text: str) -> StatedAnswer:
    """Return the answer that ``text`` denotes: prose, or one formula in dollar signs or other math delimiters."""
    formula = _FORMULA.fullmatch(text.strip().removesuffix("."))
    return read(_content(formula), latex=True) if formula else read(text, latex=False)


def _content(formula: re.Match[str]) -> str:
    return str(formula[formula.lastgroup or 0])


def _after_hashes(text: str, words: bool) -> Iterator[StatedAnswer]:
    for mark in reversed(deque(_HASHES.finditer(text), maxlen=CANDIDATES)):
        line = mark[1].partition("</answer>")[0]
        answer = _answer_in_line(line, ends=not text[mark.end() :].strip(), words=words)
        if answer is not None:
            yield answer


def _answer_in_line(line: str, *, ends: bool, words: bool) -> StatedAnswer | None:
    """Return the answer that a line after ``####`` states, None if the line is a heading.

    Words before a number must introduce it ("the total is"), and words after it must begin with a small letter. On the
    last line of a text any words are accepted except words that number a section ("Step 2", "2. Check").
    """
    if len(line) > LONGEST_LINE:
        return None
    shown = plain(line)
    matches = quantities(shown, latex=False)
    if not matches:
        return read(line, latex=False) if words and ends and reads_as_words(line) else None
    lead, tail = shown[: matches[0].start], shown[matches[-1].end :]
    if len(matches) > 1:
        return _answer_in_list(shown, matches)
    if re.match(r"\s*(?::|[.)]\s*[^\W\d_])", tail) or _NUMBERED.search(lead) or _LETTERED.match(lead):
        return None
    if not ends:
        first = re.search(r"[^\W\d_]", tail)
        if (first and first[0].isupper()) or (re.search(r"[^\W\d_]", lead) and not _INTRODUCED.search(lead)):
            return None
    return _read_text(line)


def _answer_in_list(shown: str, matches: list[Quantity]) -> StatedAnswer | None:
    """Return the answer that a list of quantities denotes, ``8, 7`` or ``3 or 4``; None if it contains other words."""
    rest = shown[: matches[0].start] + shown[matches[-1].end :]
    rest += "".join(shown[left.end : right.start] for left, right in itertools.pairwise(matches))
    return None if re.search(r"[^\W\d_]", _JOINED.sub("", rest)) else StatedAnswer(shown.strip(" .:*$"))


def _in_sentences(text: str, words: bool) -> Iterator[StatedAnswer]:
    for mark in reversed(deque(_SENTENCE.finditer(text), maxlen=CANDIDATES)):
        answer = _answer_in_clause(text[mark.end() : mark.end() + LONGEST_LINE], words)
        if answer is not None:
            yield answer


def _answer_in_clause(rest: str, words: bool) -> StatedAnswer | None:
    formula = _FORMULA.match(rest)
    end = _CLAUSE_END.search(rest, formula.end() if formula else 0)
    clause = rest[: end.start()] if end else rest
    shown = plain(clause)
    matches = quantities(shown, latex=False)
    if not matches:
        return read(clause, latex=False) if words and reads_as_words(clause) else None
    lead = shown[: matches[0].start]
    if len(matches) == 1:
        return None if _NUMBERED.search(lead) or _NOT.search(lead) else _read_text(clause)
    if re.search(r"[^\W\d_]", lead) and not _CHOICE.search(lead):
        return None
    return (
        StatedAnswer(shown.strip(" .:*$"))
        if _JOINED.search(shown)
        else _answer(shown, matches[-1 if "=" in shown else 0])
    )


def _unmarked(text: str, words: bool) -> StatedAnswer | None:
    lines = text[-TAIL:].split("\n")
    prose_lines = [_LIST_MARKER.sub("", line) for line in lines if not _is_heading(line)]
    shown = plain(_MARKUP.sub(" ", "\n".join(prose_lines)))
    formulas = list(_FORMULA.finditer(shown))
    if words:
        return read(_content(formulas[-1]), latex=True) if formulas else read(shown, latex=False)
    end = len(shown)
    for formula in reversed(formulas):
        prose = shown[formula.end() : end]
        if matches := quantities(prose, latex=False, checked=False):
            return _answer(prose, matches[-1])
        content = _content(formula)
        if matches := quantities(content, latex=True, checked=False):
            between = content[matches[-2].end : matches[-1].start] if len(matches) > 1 else ""
            return StatedAnswer(content) if _JOINED.search(between) else _answer(content, matches[-1])
        end = formula.start()
    prose = shown[:end]
    matches = quantities(prose, latex=False, checked=False)
    return _answer(prose, matches[-1]) if matches else None


def _is_heading(line: str) -> bool:
    mark = _HEADING.match(line)
    return mark is not None and _answer_in_line(line.lstrip(" #"), ends=True, words=False) is None


class AnswerComparer:
    """Compares answers in child processes. It is safe to share between threads: each concurrent pair has its own
    process, up to ``processes``; further pairs wait. Sequential comparisons start only one process.

    math-verify limits its time by signals. Signals reach only main threads and cannot interrupt a long computation in
    C. Here the kernel ends the child instead.

    Args:
        cpu_seconds: Maximum processor seconds for one pair.
        memory: Maximum bytes that a child may allocate.
        silence: Seconds without a reply after which a child is killed.
        processes: Maximum number of child processes. None: the number of cores that this process may use.
        program: Python file of a child.
    """

    def __init__(
        self,
        cpu_seconds: float = CPU_SECONDS,
        memory: int = MEMORY,
        silence: float = SILENCE,
        processes: int | None = None,
        program: Path = CHILD,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        count = processes or len(os.sched_getaffinity(0))
        self._children = [ChildServer(program, cpu_seconds, memory, silence=silence) for _ in range(count)]
        self._mark_idle()
        fill = weakref.WeakMethod(self._mark_idle)
        os.register_at_fork(after_in_child=lambda: (method := fill()) and method())

    def _mark_idle(self) -> None:
        """Mark all children idle: at the start, and in a forked process, where no thread uses them."""
        # last in, first out: prefers a child that has started
        self._idle: queue.LifoQueue[ChildServer] = queue.LifoQueue()
        for child in reversed(self._children):
            self._idle.put(child)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running children: all that were needed so far, except children that a pair ended."""
        return [child.pid for child in self._children if child.pid is not None]

    def same(self, truth: str, answer: str) -> bool:
        """Return whether two answers in LaTeX are mathematically equal. A pair that exceeds a limit is not equal.

        Raises:
            ChildTimeoutError: The child does not answer on an overloaded machine. A retry may help.
            RewardError: The child cannot be started.
        """
        return self.compare("latex", answer, truth).right

    def compare(self, rule: str, response: str, truth: str) -> RuleResult:
        """Return the result of ``latex`` or of another rule of :data:`trinity_answers.RULES`. A pair that exceeds a
        limit is wrong.

        Raises:
            ChildTimeoutError, RewardError: See :meth:`same`.
        """
        idle = self._idle
        child = idle.get()
        try:
            return self._ask(child, rule, response, truth)
        finally:
            idle.put(child)

    def _ask(self, child: ChildServer, *question: str) -> RuleResult:
        request = json.dumps(question).encode()
        shown = question[1][-80:]
        for _ in range(2):
            try:
                return RuleResult(*json.loads(child.ask(request)))
            except ChildEndedError as error:
                if error.exitcode == -signal.SIGPROF:
                    log.info("comparison_over_cpu_limit", answer=shown, limit=self._cpu_seconds)
                    return RuleResult(False)
            except ChildNotStartedError as error:
                raise RewardError(
                    f"the process that compares answers cannot start: {error}. Check that `python -c 'import "
                    "math_verify'` works there, and that the process may allocate 2 GiB"
                ) from error
        log.warning("comparison_process_killed", answer=shown)
        return RuleResult(False)

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            child.close()


_judge = AnswerComparer()
atexit.register(_judge.close)


@functools.lru_cache(maxsize=4096)
def same(truth: str, answer: str) -> bool:
    """Return the result of :meth:`AnswerComparer.same` of this process's comparer. Results are cached, because the runs
    of a group often give the same answers.

    Raises:
        ChildTimeoutError, RewardError: See :meth:`AnswerComparer.same`.
    """
    if len(truth) > LONGEST or len(answer) > LONGEST:
        return False
    return _judge.same(truth, answer)


def compare(rule: str, response: str, truth: str) -> RuleResult:
    """Return the result of :meth:`AnswerComparer.compare` of this process's comparer. A response that is too long to
    read is wrong.

    Raises:
        ChildTimeoutError, RewardError: See :meth:`AnswerComparer.same`.
    """
    if len(response) > LONGEST_RESPONSE or len(truth) > LONGEST_RESPONSE:
        return RuleResult(False)
    return _judge.compare(rule, response, truth)

"""A judge: an auxiliary model that returns scores. Its answers and the judged texts are treated as hostile input.

A judge is called through its OpenAI client, so any server works, including servers without token ids.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED
from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.auxiliary import AuxiliaryError, Which, auxiliary_errors, auxiliary_index
from trinity_mq.workflows.builtin.simple import SimpleWorkflow
from trinity_mq.workflows.workflow import Task, Workflow

JUDGE = "judge"
MAX_VERDICT = 10_000
"""Number of characters read from the end of a judge's answer."""
MAX_SCORE = 40
"""Maximum characters of one score, including separators."""

Message = dict[str, str]


class BadVerdictError(ValueError):
    """A judge's answer holds no usable scores. The message gives the reason."""


class JudgeArguments(Arguments):
    """Arguments of every workflow with a judge in ``workflow_args``."""

    judge: Which = 0
    """The auxiliary model that judges: its name, or its position from 0."""
    judge_tries: int = Field(default=2, ge=1, le=10)
    """Maximum number of attempts to get a usable answer. Each retry tells the judge the error."""
    judge_max_tokens: int = Field(default=1024, ge=8)
    judge_temperature: float = Field(default=0.0, ge=0)
    on_bad_judge: Literal["neutral", "fail"] = "neutral"
    """Policy if no answer is usable: ``neutral`` gives scores without a learning signal (metric ``judge_success`` 0),
    ``fail`` fails the run.
    """
    max_answer_characters: int = Field(default=8000, ge=100)
    """Maximum characters of a response shown to the judge. Of a longer response, the judge sees the beginning and the
    end.
    """


@dataclass(frozen=True, slots=True)
class JudgeScores:
    """The answer of a judge."""

    scores: tuple[float, ...] | None
    """Scores from 0 to 1. None: no answer was usable."""
    problem: str = ""
    """The reason why no answer was usable."""


def read_scores(answer: str, count: int) -> tuple[float, ...]:
    """Return the last list ``[...]`` after the thoughts of a judge: ``count`` scores from 0 to 1. The cost of parsing
    is bounded.

    Raises:
        BadVerdictError: The answer holds no such list.
    """
    text = after_thoughts(answer)[-MAX_VERDICT:]
    end = text.rfind("]")
    start = text.rfind("[", 0, max(end, 0))
    if start < 0:
        raise BadVerdictError(f"there is no list of {count} scores in it, such as [0.5]")
    piece = text[start : end + 1]
    if len(piece) > MAX_SCORE * (count + 1):
        raise BadVerdictError(f"its last list has {len(piece)} characters, too many for {count} scores")
    try:
        values = json.loads(piece, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise BadVerdictError(f"its last list, {piece[:80]!r}, is not a JSON list of numbers") from None
    if len(values) != count:
        raise BadVerdictError(f"its last list has {len(values)} scores, wanted {count}")
    return tuple(_score(value) for value in values)


def _score(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= 1 or not math.isfinite(value):
        raise BadVerdictError(f"{str(value)[:40]!r} is not a score from 0 to 1")
    return float(value)


def _reject_constant(text: str) -> float:
    raise ValueError(f"{text} is no score")


def delimited(name: str, text: str, key: str, limit: int) -> str:
    """Return ``text`` between marks that it cannot contain. Beyond ``limit`` characters, the middle is left out."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be sent
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return f"<{name} {key}>\n{text}\n</{name} {key}>"


def delimiter_of(*texts: str) -> str:
    """Return a mark for :func:`delimited`. It is a hash of all texts, so no text can contain it on purpose."""
    digest = hashlib.blake2b(digest_size=6)
    for text in texts:
        digest.update(f"{len(text)}:".encode() + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def answer_of(response: Experience) -> str:
    """Return the text after the thoughts of a response."""
    return after_thoughts(response.response_text or "", response.prompt_text)


def has_answer(response: Experience) -> bool:
    """Return whether the response has an answer to judge: a prompt that was cut has no answer."""
    return response.truncate_status != PROMPT_TRUNCATED


def record_rule_rewards(responses: Sequence[Experience]) -> None:
    """Copy the rule rewards to the metric ``gold_reward``, because the judge's rewards replace them."""
    for response in responses:
        response.metrics["gold_reward"] = response.reward or 0.0


def answer_format_instruction(count: int) -> str:
    """Return the instruction that tells a judge how to end its answer."""
    example = json.dumps([0.5] * count if count < 4 else [0.5, 0.5, "..."]).replace('"', "")
    return f"End with one line that holds nothing but a JSON list of {count} numbers from 0 to 1, such as {example}"


class ScoringJudgeWorkflow(SimpleWorkflow):
    """A single-turn workflow whose answers are scored by the auxiliary model ``workflow_args.judge``."""

    arguments_kind: ClassVar[type[JudgeArguments]] = JudgeArguments
    _record_keys: ClassVar[Sequence[str]] = ()
    """Arguments that a record may set."""
    _arguments: JudgeArguments

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._arguments = arguments_of(task, self.arguments_kind, record_keys=self._record_keys)
        self._judge_place = auxiliary_index(self, self._arguments.judge, JUDGE)

    async def _judge_scores(self, messages: Sequence[Message], count: int) -> JudgeScores:
        """Return ``count`` scores from the judge's first usable answer, or the reason why no answer was usable. A retry
        tells the judge the error.

        Raises:
            AuxiliaryError: The judge cannot be reached, or gave no usable scores and ``on_bad_judge`` is ``fail``.
        """
        arguments = self._arguments
        sampling = {"temperature": arguments.judge_temperature, "max_tokens": arguments.judge_max_tokens}
        conversation, answer, problem = list(messages), "", ""
        for _ in range(arguments.judge_tries):
            answer = await judge_answer(self, self._judge_place, conversation, n=1, **sampling)
            try:
                return JudgeScores(read_scores(answer, count))
            except BadVerdictError as error:
                problem = str(error)
            conversation = [
                *messages,
                {"role": "assistant", "content": answer[-MAX_SCORE * 10 :]},
                {"role": "user", "content": f"That cannot be used: {problem}. {answer_format_instruction(count)}"},
            ]
        if arguments.on_bad_judge == "neutral":
            return JudgeScores(None, problem)
        raise AuxiliaryError(
            f"the judge gave no scores in {arguments.judge_tries} tries: {problem}; its answer ended with "
            f"{answer[-80:]!r}. Use a better judge, or on_bad_judge: neutral"
        )


async def judge_answer(workflow: Workflow, place: int, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> str:
    """Return the answer of the auxiliary model at ``place``, or "" if its server sent no text.

    Raises:
        AuxiliaryError: The judge cannot be reached.
    """
    model, client = workflow.auxiliary_model_wrappers[place], workflow.auxiliary_models[place]
    with auxiliary_errors(model, JUDGE):
        completion = client.chat.completions.create(model=model.model_name, messages=messages, **sampling)
        return completion_text(await completion if workflow.is_async else completion)


def completion_text(completion: Any) -> str:
    """Return the text of a completion, or "" if the server sent no text."""
    choices = getattr(completion, "choices", None)
    first = choices[0] if isinstance(choices, list) and choices else None
    content = getattr(getattr(first, "message", None), "content", None)
    return content if isinstance(content, str) else ""

"""On-policy distillation: the student samples, and a teacher scores the log-probability of each sampled token.

No text is tokenised again: the teacher receives the token ids that the student sampled, so both logprobs of a token
refer to the same token. Both models must therefore have the same vocabulary, which is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.auxiliary import AuxiliaryError, Which, auxiliary_errors, auxiliary_index
from trinity_mq.workflows.builtin.math import SYSTEM_PROMPT
from trinity_mq.workflows.builtin.simple import SimpleWorkflow, question_of
from trinity_mq.workflows.sync_async import call, gather, run_to_completion
from trinity_mq.workflows.workflow import Task, TaskError

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

TEACHER = "teacher"
MAX_PROBE = 500
"""Maximum characters of a prompt used to compare two tokenizers."""
_matching_tokenizers: set[tuple[str, ...]] = set()
"""Pairs of models whose tokenizers were compared and agree."""


class DistillationArguments(Arguments):
    """Arguments of distillation in ``workflow_args``."""

    teacher: Which = 0
    """The auxiliary model that is the teacher: its name, or its position from 0."""
    kl_reward: float = Field(default=0.0, ge=0)
    """Factor of the penalty that is subtracted from the reward: log p (student) - log q (teacher), summed over the
    sampled tokens. Algorithms that use only rewards then minimise KL(student || teacher) of whole responses.
    """
    check_vocabulary: bool = True
    """Compare once how both models tokenise a text, and reject a teacher that differs."""


def add_teacher_logprobs(experiences: Sequence[Experience], teacher: ModelWrapper) -> None:
    """Set ``teacher_logprobs`` ``[response]`` of each experience, and its metric ``kl_divergence``.

    The teacher's logits are divided by the experience's temperature, like the student's logits. An experience whose
    prompt was cut gets zeros and no metric: none of its tokens are trained on.

    Raises:
        AuxiliaryError: The teacher cannot be reached, or its answer does not fit the tokens.
    """
    run_to_completion(_add_logprobs(experiences, teacher, asynchronous=False))


async def add_teacher_logprobs_async(experiences: Sequence[Experience], teacher: ModelWrapper) -> None:
    """Set ``teacher_logprobs`` of each experience with concurrent requests; see :func:`add_teacher_logprobs`."""
    await _add_logprobs(experiences, teacher, asynchronous=True)


async def _add_logprobs(
    experiences: Sequence[Experience], teacher: ModelWrapper, asynchronous: bool, temperature: float | None = None
) -> None:
    async def add_to(experience: Experience) -> None:
        scored: Tensor | None = None
        if experience.truncate_status != PROMPT_TRUNCATED:
            with auxiliary_errors(teacher, TEACHER):
                at = experience.temperature if temperature is None else temperature
                scored = await call(asynchronous, teacher, "logprobs", experience.tokens.tolist(), temperature=at)
        _store_logprobs(experience, scored)

    await gather(asynchronous, map(add_to, experiences))


def _store_logprobs(experience: Experience, scored: Tensor | None) -> None:
    """Store the teacher's logprobs of the response.

    Args:
        experience: An experience with student logprobs ``[response]``.
        scored: Logprobs of every token after the first. None for an experience that is not trained on.
    """
    length = int(experience.action_mask.shape[0]) if experience.action_mask is not None else experience.response_length
    if scored is None:
        experience.teacher_logprobs = torch.zeros(length)
        return
    tokens = int(experience.tokens.shape[0])
    if scored.shape != (tokens - 1,):
        raise AuxiliaryError(
            f"the teacher gave {tuple(scored.shape)} logprobs for {tokens} tokens, wanted {tokens - 1}; its server "
            "cannot score token ids"
        )
    if not bool(torch.isfinite(scored).all()):
        raise AuxiliaryError(f"the teacher gave logprobs that are not finite numbers for {tokens} tokens")
    experience.teacher_logprobs = scored[experience.prompt_length - 1 :].to(torch.float32)
    experience.metrics["kl_divergence"] = kl_estimate(experience)


def kl_estimate(experience: Experience) -> float:
    """Return an estimate of KL(student || teacher) per trained token, in nats: the mean of log p - log q over the
    sampled tokens, the k1 estimator of http://joschu.net/blog/kl-approx.html. Return 0 if logprobs are missing or no
    token is trained.
    """
    student, teacher, mask = experience.logprobs, experience.teacher_logprobs, experience.action_mask
    if student is None or teacher is None or mask is None or not bool(mask.any()):
        return 0.0
    return float((student - teacher)[mask.bool()].mean())


ONE_TOKEN = {"n": 1, "max_tokens": 1, "temperature": 0, "seed": 0}
"""Sampling parameters of a minimal request. Because of its own seed it does not use up a seed of the run's sequence.
"""


class DistillWorkflow(SimpleWorkflow):
    """Makes one request for all runs of a slice of a single-turn task; the teacher scores each response token by token.

    The reward is the rule reward, or 0 for a task with neither a reward function nor a ground truth, minus
    ``kl_reward`` times the estimated divergence of the whole response.
    """

    arguments_kind: ClassVar[type[DistillationArguments]] = DistillationArguments
    _arguments: DistillationArguments

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._arguments = arguments_of(task, self.arguments_kind)
        place = auxiliary_index(self, self._arguments.teacher, TEACHER)
        self._teacher = self.auxiliary_model_wrappers[place]

    async def _dual_body(self) -> list[Experience]:
        """Ask the student, then the teacher; return one experience with ``teacher_logprobs`` for each run."""
        responses = self._numbered_responses(await self._scored_responses())
        if self.task.reward_fn is not None or self.truth is not None:  # otherwise only the teacher trains
            await self._with_rewards(responses)
        for response in responses:
            trained = 0 if response.action_mask is None else int(response.action_mask.sum())
            far = trained * kl_estimate(response)
            response.reward = (response.reward or 0.0) - self._arguments.kl_reward * far
        return responses

    async def _scored_responses(self, temperature: float | None = None) -> list[Experience]:
        """Return one response for each run, with the teacher's logprobs at ``temperature``. None: at the response's own
        temperature.
        """
        if self._arguments.check_vocabulary:
            await self._check_vocabulary()
        responses = await self._asked_responses()
        await _add_logprobs(responses, self._teacher, self.is_async, temperature)
        return responses

    async def _check_vocabulary(self) -> None:
        """Check, once for each pair of models, that both tokenise the beginning of the prompt in the same way.

        Raises:
            TaskError: The token ids differ.
        """
        models = (self.model, self._teacher)
        pair = tuple(part for model in models for part in (model.model_name, model.model_path, model.model.url))
        if pair in _matching_tokenizers:
            return
        text = [question_of(self)[:MAX_PROBE]]
        student = self.model.clone_with_isolated_history()
        answers = [(await call(self.is_async, student, "generate", text, **ONE_TOKEN))[0]]
        with auxiliary_errors(self._teacher, TEACHER):
            answers.append((await call(self.is_async, self._teacher, "generate", text, **ONE_TOKEN))[0])
        ours, theirs = (answer.tokens[: answer.prompt_length].tolist() for answer in answers)
        cut = any(answer.truncate_status == PROMPT_TRUNCATED for answer in answers)
        shorter = min(len(ours), len(theirs))
        if ours[:shorter] != theirs[:shorter] or (len(ours) != len(theirs) and not cut):
            pairs = enumerate(zip(ours, theirs, strict=False))
            place = next((number for number, (our_token, their_token) in pairs if our_token != their_token), shorter)
            raise TaskError(
                f"the teacher {self._teacher.model_name!r} splits text into other tokens than "
                f"{self.model.model_name!r}: token {place} of a prompt is {theirs[place : place + 1]} for the teacher, "
                f"{ours[place : place + 1]} for the policy; distillation needs two models with one tokenizer"
            )
        _matching_tokenizers.add(pair)


class AsyncDistillWorkflow(DistillWorkflow):
    """:class:`DistillWorkflow` on the event loop; the teacher scores all responses concurrently."""

    is_async = True


class MathDistillWorkflow(DistillWorkflow):
    """:class:`DistillWorkflow` that asks for a boxed number and compares it with the truth."""

    _default_system_prompt = SYSTEM_PROMPT
    _default_reward_fn = "math_answer"


class AsyncMathDistillWorkflow(MathDistillWorkflow):
    """:class:`MathDistillWorkflow` on the event loop."""

    is_async = True

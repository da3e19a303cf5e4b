"""On-policy distillation: the student samples, a teacher says how likely it finds each of the sampled tokens.

Nothing is tokenised again: the teacher is given the very token ids that the student sampled, so that both logprobs of
a token belong to that token. Both models must therefore have one vocabulary, which is checked.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED
from trinity_mq.runtime.threads import in_thread
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.auxiliary import AuxiliaryError, Which, asking, auxiliary_place
from trinity_mq.workflows.builtin.math import SYSTEM_PROMPT
from trinity_mq.workflows.builtin.simple import AsyncSimpleWorkflow, SimpleWorkflow, SingleTurnWorkflow
from trinity_mq.workflows.workflow import Task, TaskError

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

TEACHER = "teacher"
MAX_PROBE = 500
"""Characters of a prompt by which two tokenizers are compared."""
_alike: set[tuple[str, ...]] = set()
"""Pairs of models found to cut text into the same tokens."""


class DistillationArguments(Arguments):
    """Arguments of distillation in ``workflow_args``."""

    teacher: Which = 0
    """Which auxiliary model: its name, or its place from 0."""
    kl_reward: float = Field(default=0.0, ge=0)
    """Takes so many times log p - log q, summed over the sampled tokens, from the reward: algorithms that look at
    rewards alone then minimise KL(student || teacher) of whole responses."""
    check_vocabulary: bool = True
    """Ask both models once how they cut a text, and refuse a teacher that does it otherwise."""


def add_teacher_logprobs(experiences: Sequence[Experience], teacher: ModelWrapper) -> None:
    """Set ``teacher_logprobs`` ``[response]`` of each experience, and its metric ``kl_divergence``.

    The teacher's logits are divided by the experience's temperature, as the student's were. An experience whose prompt
    was cut gets zeros: nothing of it is trained on.

    Raises:
        AuxiliaryError: The teacher cannot be asked, or its answer does not fit the tokens.
    """
    for experience in experiences:
        if experience.truncate_status == PROMPT_TRUNCATED:
            _set(experience, None)
            continue
        with asking(teacher, TEACHER):
            scored = teacher.logprobs(experience.tokens.tolist(), temperature=experience.temperature)
        _set(experience, scored)


async def add_teacher_logprobs_async(experiences: Sequence[Experience], teacher: ModelWrapper) -> None:
    """Set ``teacher_logprobs`` of each experience, all asked for at once; see :func:`add_teacher_logprobs`."""

    async def one(experience: Experience) -> None:
        if experience.truncate_status == PROMPT_TRUNCATED:
            _set(experience, None)
            return
        with asking(teacher, TEACHER):
            scored = await teacher.logprobs_async(experience.tokens.tolist(), temperature=experience.temperature)
        _set(experience, scored)

    try:
        async with asyncio.TaskGroup() as group:
            for experience in experiences:
                group.create_task(one(experience))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _set(experience: Experience, scored: Tensor | None) -> None:
    """Keep the teacher's logprobs of the response.

    Args:
        experience: Of student logprobs ``[response]``.
        scored: Of every token after the first; None for an experience that is not trained on.
    """
    length = int(experience.action_mask.shape[0]) if experience.action_mask is not None else experience.response_length
    if scored is None:
        experience.teacher_logprobs = torch.zeros(length)
        return
    tokens = int(experience.tokens.shape[0])
    if scored.shape != (tokens - 1,):
        raise AuxiliaryError(
            f"the teacher gave {tuple(scored.shape)} logprobs for {tokens} tokens, wanted {tokens - 1}; "
            "its server is not one that scores token ids"
        )
    if not bool(torch.isfinite(scored).all()):
        raise AuxiliaryError(f"the teacher gave logprobs that are no finite numbers for {tokens} tokens")
    experience.teacher_logprobs = scored[experience.prompt_length - 1 :].to(torch.float32)
    experience.metrics["kl_divergence"] = kl_estimate(experience)


def kl_estimate(experience: Experience) -> float:
    """Return an estimate of KL(student || teacher) per trained token, in nats: the mean of log p - log q over the
    sampled tokens, the k1 estimator of http://joschu.net/blog/kl-approx.html. 0 where nothing is known or trained.
    """
    student, teacher, mask = experience.logprobs, experience.teacher_logprobs, experience.action_mask
    if student is None or teacher is None or mask is None or not bool(mask.any()):
        return 0.0
    return float((student - teacher)[mask.bool()].mean())


class _Distillation(SingleTurnWorkflow):
    """Base of the synchronous and the asynchronous workflow."""

    arguments: DistillationArguments

    def reset(self, task: Task) -> None:
        """Get ready for ``task``.

        Raises:
            TaskError: It has an argument that does not exist, or there is no such teacher.
        """
        super().reset(task)
        self.arguments = arguments_of(task, DistillationArguments)
        place = auxiliary_place(self, self.arguments.teacher, TEACHER)
        self.teacher = self.auxiliary_model_wrappers[place]

    def _valued(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with the rule's reward where the task has a rule or an answer, else reward 0: it is
        the teacher they learn from.
        """
        if self.task.reward_fn is not None or self.task.truth is not None:
            return self.rewarded(responses)
        for place, response in enumerate(responses):
            response.reward = 0.0
            response.eid.run = self.run_id_base + place
        return responses

    def _settle(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses``, which the teacher has scored, with what that changes about their reward."""
        for response in responses:
            trained = 0 if response.action_mask is None else int(response.action_mask.sum())
            far = trained * kl_estimate(response)
            response.reward = (response.reward or 0.0) - self.arguments.kl_reward * far
        return responses

    def _pair(self) -> tuple[str, ...]:
        pair = (self.model, self.teacher)
        return tuple(part for model in pair for part in (model.model_name, model.model_path, model.model.url))

    def _probe(self) -> str:
        return self.question()[:MAX_PROBE]

    def _wants_check(self) -> bool:
        return self.arguments.check_vocabulary and self._pair() not in _alike

    def _compare(self, student: list[Experience], teacher: list[Experience]) -> None:
        """Remember that the two models cut a text alike.

        Raises:
            TaskError: They do not.
        """
        ours, theirs = (one[0].tokens[: one[0].prompt_length].tolist() for one in (student, teacher))
        cut = any(one[0].truncate_status == PROMPT_TRUNCATED for one in (student, teacher))
        shorter = min(len(ours), len(theirs))
        if ours[:shorter] != theirs[:shorter] or (len(ours) != len(theirs) and not cut):
            pairs = enumerate(zip(ours, theirs, strict=False))
            place = next((number for number, (left, right) in pairs if left != right), shorter)
            raise TaskError(
                f"the teacher {self.teacher.model_name!r} cuts text into other tokens than {self.model.model_name!r}: "
                f"token {place} of a prompt is {theirs[place : place + 1]} there, {ours[place : place + 1]} here; "
                "distillation needs two models with one tokenizer"
            )
        _alike.add(self._pair())


ONE_TOKEN = {"n": 1, "max_tokens": 1, "temperature": 0, "seed": 0}
"""Asks for as little as can be, and takes no seed from the run's own row."""


class OnPolicyDistillWorkflow(_Distillation, SimpleWorkflow):
    """One request for all runs of a single-turn task; each response scored by the teacher, token by token.

    The rule's reward, where the task has one, is kept beside it.
    """

    def run(self) -> list[Experience]:
        """Ask the student, then the teacher; return one experience with ``teacher_logprobs`` for each run."""
        if self._wants_check():
            text = self._probe()
            student = self.model.clone_with_isolated_history().generate([text], **ONE_TOKEN)
            with asking(self.teacher, TEACHER):
                teacher = self.teacher.generate([text], **ONE_TOKEN)
            self._compare(student, teacher)
        responses = self._valued(self.ask())
        add_teacher_logprobs(responses, self.teacher)
        return self._settle(responses)


class AsyncOnPolicyDistillWorkflow(_Distillation, AsyncSimpleWorkflow):
    """:class:`OnPolicyDistillWorkflow` on the event loop; the teacher is asked for all responses at once."""

    async def run_async(self) -> list[Experience]:
        """Ask the student, then the teacher; return one experience with ``teacher_logprobs`` for each run."""
        if self._wants_check():
            text = self._probe()
            student = await self.model.clone_with_isolated_history().generate_async([text], **ONE_TOKEN)
            with asking(self.teacher, TEACHER):
                teacher = await self.teacher.generate_async([text], **ONE_TOKEN)
            self._compare(student, teacher)
        responses = await self.ask_async()
        await in_thread(functools.partial(self._valued, responses), "reward")
        await add_teacher_logprobs_async(responses, self.teacher)
        return self._settle(responses)


class OnPolicyDistillMathWorkflow(OnPolicyDistillWorkflow):
    """:class:`OnPolicyDistillWorkflow` that asks for a boxed number and compares it."""

    default_system_prompt: ClassVar[str | None] = SYSTEM_PROMPT
    default_reward_fn = "math_answer"


class AsyncOnPolicyDistillMathWorkflow(AsyncOnPolicyDistillWorkflow):
    """:class:`OnPolicyDistillMathWorkflow` on the event loop."""

    default_system_prompt: ClassVar[str | None] = SYSTEM_PROMPT
    default_reward_fn = "math_answer"

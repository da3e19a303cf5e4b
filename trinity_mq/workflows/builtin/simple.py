"""Single-turn tasks with a rule reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import REWARD_FAULT
from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.models.recording.responses import check_asked
from trinity_mq.rewards import ACCURACY, RewardFn, create_reward, invalid_parts_reason, parts_of
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.rewards.text import last_boxed, last_tagged
from trinity_mq.telemetry.aggregate import MAJORITY
from trinity_mq.workflows.arguments import Arguments, accept_more
from trinity_mq.workflows.attributes import Replaceable
from trinity_mq.workflows.sync_async import DualWorkflow, call, run_in_thread_if_async
from trinity_mq.workflows.workflow import Task, TaskError, Workflow

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper


def question_of(source: Task | Workflow) -> str:
    """Return the prompt of a task or of a workflow. A workflow may have replaced the prompt of its task.

    Raises:
        TaskError: The prompt is not a text.
    """
    prompt = source.task_desc
    if not isinstance(prompt, str):
        raise TaskError(
            f"raw_task[{source.format_args.prompt_key!r}] is a {type(prompt).__name__}, wanted the text of the prompt"
        )
    return prompt


class SimpleArguments(Arguments):
    """``workflow_args`` of single-turn workflows."""

    greedy_baseline: bool = False
    """Sample the first of a training task's ``repeat_times`` runs at temperature 0, as the baseline of the other runs.
    Its experience has ``info["greedy"]`` and is not trained on. Used by the algorithm ``remax``.
    """


def set_reward(response: Experience, reward_fn: RewardFn, parts: Mapping[str, float]) -> None:
    """Give a response the sum of the reward's ``parts`` as reward, and the parts as metrics. If a part is not a finite
    number, add the reason to its ``info``.
    """
    response.reward = sum(parts.values())
    response.metrics.update(parts)
    if fault := invalid_parts_reason(reward_fn, parts):
        response.info[REWARD_FAULT] = fault


def add_majority(responses: Sequence[Experience]) -> None:
    """Give each of several answers to a task the metric ``majority``: the accuracy of the most frequent answer
    (self-consistency, arXiv 2203.11171). If two answers are equally frequent, the earlier answer counts.

    The answer of a response is the last box after the thoughts, else the content of the last ``<answer>`` there, else
    all the text there. A response without an answer has no vote, unless no response has an answer. Nothing is added
    for a single response, or if a response has no metric ``accuracy``.
    """
    if len(responses) < 2 or any(ACCURACY not in response.metrics for response in responses):
        return
    texts = [after_thoughts(response.response_text or "", response.prompt_text) for response in responses]
    answers = [(last_boxed(text) or last_tagged(text) or (0, text))[1].strip() for text in texts]
    winner = Counter(list(filter(None, answers)) or answers).most_common(1)[0][0]
    accuracy = responses[answers.index(winner)].metrics[ACCURACY]
    for response in responses:
        response.metrics[MAJORITY] = accuracy


class SimpleWorkflow(DualWorkflow):
    """Makes one request for all runs of a slice of a single-turn task, and rewards each response by a rule. A greedy
    first run needs a second request (:class:`SimpleArguments`).

    A subclass may assign other values to the attributes of the task (``task_desc``, ``truth``, ``system_prompt``,
    ``reply_prefix``, ``reward_fn``, ...), in :meth:`reset` or later, and override :meth:`format_messages`. All other
    public names are free for its own attributes.
    """

    can_reset = True
    can_repeat = True
    _default_system_prompt: ClassVar[str | None] = None
    """System prompt used if the taskset's format has none."""
    _default_reward_fn: ClassVar[str] = "exact_match"
    """Reward function used if the task has none."""
    _has_greedy_baseline: bool = False
    """Whether the first run of the task is greedy. It never is in an evaluation."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let a class outside of this package read more ``workflow_args`` than its base class."""
        super().__init_subclass__(**keywords)
        kind = cls.arguments_kind
        is_foreign = not cls.__module__.startswith("trinity_mq.")
        if is_foreign and "arguments_kind" not in vars(cls) and kind is not None and issubclass(kind, Arguments):
            cls.arguments_kind = accept_more(kind)

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: An argument of the task has an invalid value.
            UnknownNameError: The task's reward function is not known.
            RewardError: The reward function does not take the task's arguments.
        """
        self.task = task
        is_greedy = task.workflow_args.get("greedy_baseline", False)
        if not isinstance(is_greedy, bool):
            raise TaskError(f"workflow_args.greedy_baseline is {is_greedy!r}, wanted true or false")
        self._has_greedy_baseline = is_greedy and not task.is_eval
        self.reward_fn = create_reward(task.reward_fn or self._default_reward_fn, task.reward_fn_args)

    @Replaceable
    def system_prompt(self) -> str | None:
        """The system prompt of the taskset's format, else the workflow's default."""
        return self.format_args.system_prompt or self._default_system_prompt

    @Replaceable
    def reply_prefix(self) -> str | None:
        """The beginning of each answer, which the model continues. The taskset's format sets it; None: no beginning."""
        prefix: str | None = getattr(self.format_args, "reply_prefix", None)
        return prefix

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the request: the system prompt, the task, and the beginning of the answer. The system
        prompt and the beginning are left out if they are empty.
        """
        parts = {"system": self.system_prompt, "user": question_of(self), "assistant": self.reply_prefix}
        return [{"role": role, "content": text} for role, text in parts.items() if text or role == "user"]

    def _request_sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of a request: the task's parameters with one completion for each run."""
        return {**self.task.rollout_args, "n": self.repeat_times}

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with reward, run number, and the parts of the reward as metrics."""
        truth, more = truth_text(self.truth), self._reward_arguments()
        for response in responses:
            parts = parts_of(
                self.reward_fn,
                response.response_text or "",
                truth,
                finished=response.truncate_status is None,
                tokens=response.response_length,
                record=self.raw_task,
                prompt_end=response.prompt_text,
                response_token=response.tokens[response.prompt_length :],
                info=response.info,
                **more,
            )
            set_reward(response, self.reward_fn, parts)
        if self.is_eval:
            add_majority(responses)
        return self._numbered_responses(responses)

    def _reward_arguments(self) -> Mapping[str, Any]:
        """Return further arguments for the reward function, which gets only arguments that it accepts."""
        return {}

    async def _with_rewards(self, responses: list[Experience]) -> list[Experience]:
        """Return :meth:`_rewarded_responses`. The reward may take long, so it does not run on the event loop."""
        return await run_in_thread_if_async(self.is_async, lambda: self._rewarded_responses(responses), "reward")

    def _numbered_responses(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with their run numbers set."""
        for place, response in enumerate(responses):
            response.eid.run = self.run_id_base + place
        return responses

    async def _asked_responses(self, **sampling: Any) -> list[Experience]:
        """Return one response for each run.

        Args:
            sampling: Overrides parameters of :meth:`_request_sampling`.

        Raises:
            PromptTooLong: The prompt was too long, so the model was not asked.
        """
        messages, sampling = self.format_messages(), {**self._request_sampling(), **sampling}
        return check_asked(await call(self.is_async, self.model, "chat", messages, **sampling), self.model)

    async def _slice_answers(self) -> list[Experience]:
        """Return one response for each run. If the slice contains the task's greedy first run, its response is marked
        and not trained on.
        """
        if not self._has_greedy_baseline or self.run_id_base:
            return await self._asked_responses()
        [greedy] = await self._asked_responses(n=1, temperature=0.0)
        greedy.info["greedy"] = True
        greedy.action_mask = torch.zeros(greedy.response_length, dtype=torch.bool)
        others = self.repeat_times - 1
        return [greedy, *(await self._asked_responses(n=others) if others else [])]

    async def _dual_body(self) -> list[Experience]:
        """Ask the model and return one experience with a reward for each run."""
        return await self._with_rewards(await self._slice_answers())


class AsyncSimpleWorkflow(SimpleWorkflow):
    """:class:`SimpleWorkflow` on the event loop."""

    is_async = True

"""Single-turn tasks with a rule reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED
from trinity_mq.rewards import create_reward, parts_of
from trinity_mq.rewards.truth import truth_text
from trinity_mq.workflows.attributes import Replaceable
from trinity_mq.workflows.dual import DualWorkflow, call, compute
from trinity_mq.workflows.workflow import Task, TaskError

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper


def question_of(task: Task) -> str:
    """Return the prompt of a task.

    Raises:
        TaskError: It is no text.
    """
    prompt = task.task_desc
    if not isinstance(prompt, str):
        raise TaskError(
            f"raw_task[{task.format_args.prompt_key!r}] is a {type(prompt).__name__}, wanted the text of the prompt"
        )
    return prompt


def truth_of(task: Task) -> str | None:
    """Return the right answer of a task as text; see :func:`truth_text`."""
    return truth_text(task.truth)


class SimpleWorkflow(DualWorkflow):
    """One request for all runs of a single-turn task, each response rewarded by a rule."""

    can_reset = True
    can_repeat = True
    default_system_prompt: ClassVar[str | None] = None
    """Used where the taskset's format has none."""
    default_reward_fn: ClassVar[str] = "exact_match"
    """Used where the task has none."""

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Get ready for ``task``.

        Raises:
            UnknownNameError: Its reward function is not known.
            RewardError: The reward function does not take the task's arguments.
        """
        self.task = task
        self.reward_fn = create_reward(task.reward_fn or self.default_reward_fn, task.reward_fn_args)

    @Replaceable
    def system_prompt(self) -> str | None:
        """The system prompt: that of the taskset's format, else the workflow's own."""
        return self.task.format_args.system_prompt or self.default_system_prompt

    def question(self) -> str:
        """Return the prompt of the task; see :func:`question_of`."""
        return question_of(self.task)

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the conversation that asks: the system prompt, if there is one, and the task."""
        system = self.system_prompt
        question = {"role": "user", "content": self.question()}
        return [{"role": "system", "content": system}, question] if system else [question]

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters: those of the task, and one completion for each run."""
        return {**self.task.rollout_args, "n": self.repeat_times}

    def rewarded(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with reward, its parts as metrics, and the run that each one is."""
        truth = truth_of(self.task)
        for response in responses:
            unasked = response.truncate_status == PROMPT_TRUNCATED  # then its text is no answer to the prompt
            parts = parts_of(
                self.reward_fn,
                "" if unasked else response.response_text or "",
                truth,
                finished=response.truncate_status is None,
                tokens=response.response_length,
            )
            response.reward = sum(parts.values())
            response.metrics.update(parts)
        return self.numbered(responses)

    def numbered(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with the run that each one is."""
        for place, response in enumerate(responses):
            response.eid.run = self.run_id_base + place
        return responses

    async def responses(self) -> list[Experience]:
        """Return the answers of :meth:`ask` or :meth:`ask_async`."""
        found: list[Experience] = await call(self.is_async, self, "ask")
        return found

    def ask(self) -> list[Experience]:
        """Return one response for each run."""
        return self.model.chat(self.format_messages(), **self.sampling())

    async def ask_async(self) -> list[Experience]:
        """Return one response for each run."""
        return await self.model.chat_async(self.format_messages(), **self.sampling())

    async def body(self) -> list[Experience]:
        """Ask, and return one rewarded experience for each run; a reward may take its time."""
        responses = await self.responses()
        return await compute(self.is_async, lambda: self.rewarded(responses), "reward")


class AsyncSimpleWorkflow(SimpleWorkflow):
    """:class:`SimpleWorkflow` on the event loop."""

    is_async = True

r"""The math benchmark: a fixed prompt and a fixed reward rule, independent of a model's training."""

from __future__ import annotations

from trinity_mq.experience import Experience
from trinity_mq.rewards import create_reward
from trinity_mq.workflows.attributes import Replaceable
from trinity_mq.workflows.builtin.simple import SimpleWorkflow
from trinity_mq.workflows.workflow import Task, TaskError

SYSTEM_PROMPT = "Think through the problem in steps and write what you find at the end as \\boxed{answer}."


class MathEvalWorkflow(SimpleWorkflow):
    """Math problems as an evaluation, all samples of a task in one request. The taskset's system prompt and reward
    function are ignored, so that runs trained with different prompts and rewards can be compared.

    Metrics: ``accuracy``, ``majority`` of several samples, and ``finished``, 0 for a response that was cut at a limit.
    """

    default_reward_fn = "math_answer"

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: The task is a training task.
        """
        if not task.is_eval:
            raise TaskError(
                f"{type(self).__name__} only measures; name it in buffer.eval_tasksets and train with math_workflow or "
                "math_boxed_workflow"
            )
        self.task = task
        self.reward_fn = create_reward(self.default_reward_fn, {})

    @Replaceable
    def system_prompt(self) -> str:
        return SYSTEM_PROMPT

    def rewarded(self, responses: list[Experience]) -> list[Experience]:
        for response in super().rewarded(responses):
            response.metrics["finished"] = float(response.truncate_status is None)
        return responses


class AsyncMathEvalWorkflow(MathEvalWorkflow):
    """:class:`MathEvalWorkflow` on the event loop."""

    is_async = True

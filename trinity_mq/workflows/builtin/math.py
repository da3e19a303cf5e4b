r"""Math problems whose answer is a number, stated in ``\boxed{}``."""

from __future__ import annotations

from trinity_mq.experience import Experience
from trinity_mq.rewards import judge_conversation
from trinity_mq.workflows.builtin.simple import SimpleWorkflow, set_reward, truth_of
from trinity_mq.workflows.workflow import Task, TaskError

SYSTEM_PROMPT = (
    "Solve the problem step by step. Then give the final answer, a number without units, in \\boxed{} "
    "and write nothing after it."
)


class MathWorkflow(SimpleWorkflow):
    """:class:`SimpleWorkflow` that asks for a boxed number and compares it exactly."""

    default_system_prompt = SYSTEM_PROMPT
    default_reward_fn = "math_answer"


class AsyncMathWorkflow(MathWorkflow):
    """:class:`MathWorkflow` on the event loop."""

    is_async = True


class MathRmWorkflow(MathWorkflow):
    """:class:`MathWorkflow` with a reward called as ``reward(experience, messages, ground_truth=truth)``, which may ask
    your own reward model.
    """

    def reset(self, task: Task) -> None:
        if not task.reward_fn:
            raise TaskError(
                "math_rm_workflow needs buffer.taskset.reward_fn: the dotted path of a function or class that is "
                "called as reward(experience, messages, ground_truth=truth) and returns the reward's parts by name"
            )
        super().reset(task)

    def rewarded(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with reward, run number, and the parts of the reward as metrics."""
        messages, truth = self.format_messages(), truth_of(self.task)
        for response in responses:
            parts = judge_conversation(self.reward_fn, response, messages, truth)
            set_reward(response, self.reward_fn, parts)
        return self.numbered(responses)


class AsyncMathRmWorkflow(MathRmWorkflow):
    """:class:`MathRmWorkflow` on the event loop; the reward runs in a thread."""

    is_async = True

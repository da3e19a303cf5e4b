r"""Math problems whose answer is a number, stated in ``\boxed{}``."""

from __future__ import annotations

from trinity_mq.workflows.builtin.simple import SimpleWorkflow

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

"""An agent of the OpenAI Agents SDK (``pip install openai-agents``), trained without a change: it gets the recorded
client, and the answers that the model samples during a run become the experiences of the run.
"""

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from trinity_mq.experience import Experience
from trinity_mq.rewards.math.math_answer import math_answer
from trinity_mq.workflows import AsyncRewardPropagationWorkflow

MAX_TURNS = 8


@function_tool
def add(first: float, second: float) -> float:
    """Add two numbers."""
    return first + second


@function_tool
def multiply(first: float, second: float) -> float:
    """Multiply two numbers."""
    return first * second


class CalculatorAgent(AsyncRewardPropagationWorkflow):
    """Word problems with a calculator; reward 1 if the last message states the right number."""

    max_step_num = 1  # the SDK's own loop makes the turns

    async def step_async(self, step_num: int) -> bool:
        agent = Agent(
            name="calculator",
            instructions="Solve the problem with the tools. Then give the final answer in \\boxed{}.",
            tools=[add, multiply],
            model=OpenAIChatCompletionsModel(self.model.model_name, self.client),
        )
        try:
            result = await Runner.run(
                agent,
                self.task.task_desc or "",
                max_turns=MAX_TURNS,
                run_config=RunConfig(tracing_disabled=True),  # otherwise the SDK sends a record of each run to OpenAI
            )
            self.answer = str(result.final_output)
        except AgentsException:  # a mistake of the model: too many turns, or a call of a tool that does not exist
            self.answer = ""
        return False

    async def reward_async(self, exps: list[Experience]) -> float:
        for turn, experience in enumerate(exps):
            experience.eid.step = turn
        return math_answer(self.answer, self.task.truth, finished=True)["accuracy"]

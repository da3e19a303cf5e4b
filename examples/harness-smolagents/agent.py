"""smolagents 1.26.0, unmodified, as the program of a session: an agent that manages another agent.

Both are ToolCallingAgents. A CodeAgent would execute Python of the model in this process.
"""

import json
import os
import sys

from smolagents import AgentError, LogLevel, OpenAIModel, ToolCallingAgent, tool

MAX_STEPS = 6


@tool
def add(first: float, second: float) -> float:
    """Add two numbers.

    Args:
        first: A number.
        second: Another number.
    """
    return first + second


def main() -> None:
    """Answer the rollout on the standard input; reward 1 for the right answer."""
    rollout = json.load(sys.stdin)
    # the engine samples freely: a forced call would need constrained sampling
    model = OpenAIModel(rollout["model"], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], tool_choice="auto")
    options = {"model": model, "max_steps": MAX_STEPS, "verbosity_level": LogLevel.OFF}
    calculator = ToolCallingAgent([add], name="calculator", description="Adds numbers.", **options)
    manager = ToolCallingAgent([], managed_agents=[calculator], **options)
    try:
        answer = str(manager.run(rollout["task"]["question"]))
    except AgentError:  # the model's mistake
        answer = ""
    print(json.dumps({"reward": float(answer.strip() == rollout["task"]["answer"])}))


main()

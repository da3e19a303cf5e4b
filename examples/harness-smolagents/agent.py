"""smolagents 1.26.0, unmodified, as the program of a session: an agent that manages another agent.

Both are ToolCallingAgents. A CodeAgent would execute Python of the model in this process.
"""

import rollouts
from smolagents import AgentError, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(first: float, second: float) -> float:
    """Add two numbers.

    Args:
        first: A number.
        second: Another number.
    """
    return first + second


def reward_of(rollout: dict) -> float:
    """Run the agents on the task of a rollout. Return 1 for the right answer, else 0."""
    # the engine samples freely: a forced call, the default of smolagents, needs constrained sampling
    model = OpenAIModel(rollout["model"], rollout["base_url"], rollout["key"], tool_choice="auto")
    options = {"model": model, "max_steps": 6, "verbosity_level": LogLevel.OFF}
    calculator = ToolCallingAgent([add], name="calculator", description="Adds numbers.", **options)
    manager = ToolCallingAgent([], managed_agents=[calculator], **options)
    try:
        answer = str(manager.run(rollout["task"]["question"]))
    except AgentError:  # a mistake of the model
        return 0.0
    return float(answer.strip() == rollout["task"]["answer"])


rollouts.serve(reward_of)

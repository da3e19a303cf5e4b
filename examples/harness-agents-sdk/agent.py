"""The OpenAI Agents SDK 0.24.0, unmodified, as the program of a session: one agent hands the task off to another.

Argument: ``responses`` (default) or ``chat_completions``, the API with which the SDK asks.
"""

import json
import sys

from agents import Agent, AgentsException, Runner, function_tool, set_default_openai_api, set_tracing_disabled

MAX_TURNS = 8


@function_tool
def add(first: float, second: float) -> float:
    """Add two numbers."""
    return first + second


@function_tool
def multiply(first: float, second: float) -> float:
    """Multiply two numbers."""
    return first * second


def main(api: str = "responses") -> None:
    """Answer the rollout on the standard input; reward 1 for the right answer."""
    set_default_openai_api(api)
    set_tracing_disabled(True)  # otherwise the SDK reports each run to its maker
    rollout = json.load(sys.stdin)
    model = rollout["model"]
    calculator = Agent(
        "calculator", instructions="Use the tools. Answer with the number only.", tools=[add, multiply], model=model
    )
    reception = Agent("reception", instructions="Hand every sum to the calculator.", handoffs=[calculator], model=model)
    try:
        answer = str(Runner.run_sync(reception, rollout["task"]["question"], max_turns=MAX_TURNS).final_output)
    except AgentsException:  # too many turns, or a call of a tool that does not exist: the model's mistake
        answer = ""
    print(json.dumps({"reward": float(answer.strip() == rollout["task"]["answer"])}))


main(*sys.argv[1:])

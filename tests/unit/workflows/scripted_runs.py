"""Runs of workflows on a scripted model behind a real engine server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinity_mq.experience import Experience
from trinity_mq.models import ModelWrapper
from trinity_mq.testing.scripted import Answer, Script, ScriptedGenerator, scripted_server
from trinity_mq.workflows import Task


async def run_scripted(
    task: Task, script: Script, *, run: int = 0, auxiliary_models: Sequence[ModelWrapper] = (), **options: Any
) -> tuple[list[Experience], ScriptedGenerator]:
    """Return the experiences of a run, and the generator, which has its prompts and requests.

    Args:
        task: The task.
        script: The answers of the model.
        run: Number of the run.
        auxiliary_models: Further models of the workflow.
        options: Options of the model's wrapper.
    """
    async with scripted_server(script) as (handle, generator):
        model = ModelWrapper(handle, enable_history=True, **options)
        try:
            workflow = task.to_workflow(model, auxiliary_models)
            workflow.run_id_base = run
            return await workflow.run_async(), generator
        finally:
            await model.aclose()


def tool_call(name: str, text: str = "", /, **arguments: Any) -> Answer:
    """Return an answer that calls a tool."""
    return {"content": text, "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}

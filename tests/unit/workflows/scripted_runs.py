"""Runs of workflows on a scripted model behind a real engine server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.golden.families.makers import template_of, vocabulary_of
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import Experience
from trinity_mq.models import ModelWrapper
from trinity_mq.testing.scripted import Answer, Script, ScriptedGenerator, byte_codec, scripted_server
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


def codec_of(family: str) -> TextCodec:
    """Return a codec with the template and the special tokens of a family; its other tokens are bytes."""
    vocabulary = vocabulary_of(family)
    return byte_codec(template_of(family), ends=tuple(vocabulary.ends), specials=tuple(vocabulary.special))


def masked_runs(experience: Experience) -> list[tuple[list[int], list[float]]]:
    """Return tokens and logprobs of each run of trained tokens."""
    assert experience.action_mask is not None
    assert experience.logprobs is not None
    response = experience.tokens[experience.prompt_length :].tolist()
    bits = "".join(str(int(bit)) for bit in experience.action_mask.tolist())
    logprobs = experience.logprobs.tolist()
    return [(response[run.start() : run.end()], logprobs[run.start() : run.end()]) for run in re.finditer("1+", bits)]

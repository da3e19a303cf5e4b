"""Harnesses of others, unmodified, in their own Python (``scripts/test-harnesses``), as programs of sessions: a scripted
model answers in the format of each family, as its maker's template writes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.golden.families.makers import template_of, vocabulary_of
from tests.golden.families.proofs import PROOFS, Proof
from tests.processes import gone
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import Experience
from trinity_mq.models.wrapper import ModelWrapper
from trinity_mq.testing.scripted import Answer, ScriptedGenerator, byte_codec, logprob, scripted_server
from trinity_mq.workflows import SandboxFailed, Task
from trinity_mq.workflows.sessions.children import close_persistent_programs
from trinity_mq.workflows.sessions.program import ProgramWorkflow

EXAMPLES = Path(__file__).parents[3] / "examples"
PYTHON = Path(os.environ.get("TRINITY_MQ_HARNESSES", "")) / "python" / "bin" / "python"
NEEDS_HARNESSES = pytest.mark.skipif(
    not PYTHON.exists(), reason="TRINITY_MQ_HARNESSES/python has no harnesses: scripts/test-harnesses makes it"
)
SANDBOX = EXAMPLES / "harness-mini-swe-agent" / "sandbox"
WITH_TOOLS = [proof for proof in PROOFS if proof.writes_tools and "one call" not in proof.refused]
THINKING = [proof for proof in WITH_TOOLS if proof.thoughts]

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module", autouse=True)
async def programs() -> AsyncIterator[None]:
    """Each harness is one process for all tests, because the imports of a harness take seconds."""
    yield
    await close_persistent_programs()


@dataclass
class Rollout:
    """A rollout of a harness, and the model behind it."""

    experiences: list[Experience]
    generator: ScriptedGenerator

    def check(self, lineages: Sequence[int], *, reward: float = 1.0) -> None:
        """Check the training data: one experience for each lineage, with these numbers of answers; the masks cover
        each sampled token once, with the logprob of the engine.
        """
        runs = [masked_runs(experience) for experience in self.experiences]
        assert [len(run) for run in runs] == list(lineages)
        assert sorted(tokens for run in runs for tokens, _ in run) == sorted(self.generator.sampled)
        for tokens, logprobs in (part for run in runs for part in run):
            assert logprobs == [logprob(position) for position in range(len(tokens))]
        assert {experience.reward for experience in self.experiences} == {reward}
        metrics = self.experiences[-1].metrics
        assert metrics["session_calls"] == sum(lineages)
        assert metrics["session_experiences"] == len(lineages)

    @property
    def breaks(self) -> dict[str, float]:
        """Breaks by cause, without causes that did not occur."""
        metrics = self.experiences[-1].metrics
        causes = ("template", "retoken", "temperature")
        return {cause: metrics[f"session_breaks_{cause}"] for cause in causes if metrics[f"session_breaks_{cause}"]}


def masked_runs(experience: Experience) -> list[tuple[list[int], list[float]]]:
    """Return tokens and logprobs of each run of trained tokens."""
    assert experience.action_mask is not None
    assert experience.logprobs is not None
    response = experience.tokens[experience.prompt_length :].tolist()
    bits = "".join(str(int(bit)) for bit in experience.action_mask.tolist())
    logprobs = experience.logprobs.tolist()
    return [(response[run.start() : run.end()], logprobs[run.start() : run.end()]) for run in re.finditer("1+", bits)]


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def calls(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"content": "", "tool_calls": list(parts), **fields}


def codec_of(template: str) -> TextCodec:
    vocabulary = vocabulary_of(template)
    return byte_codec(template_of(template), ends=tuple(vocabulary.ends), specials=tuple(vocabulary.special))


async def roll_out(
    example: str,
    script: Sequence[Answer],
    template: str = "qwen3",
    *,
    arguments: Sequence[str] = (),
    question: str = "2+3?",
    answer: str = "5",
) -> Rollout:
    """Run a harness of the examples as the program of a rollout."""
    command = [str(PYTHON), str(EXAMPLES / example / "agent.py"), *arguments]
    task = Task(
        workflow=ProgramWorkflow,
        raw_task={"question": question, "answer": answer},
        workflow_args={"command": command, "keep": True, "env": {"PYTHONPATH": str(EXAMPLES / "harness")}},
    )
    async with scripted_server(script, codec=codec_of(template)) as (engine, generator):
        model = ModelWrapper(engine)
        try:
            experiences = await ProgramWorkflow(task=task, model=model).run_async()
        finally:
            await model.aclose()
    assert len(generator.sampled) == len(script), "the harness asked for the whole script"
    return Rollout(experiences, generator)


def ids(proofs: Sequence[Proof]) -> Mapping[str, Any]:
    return {"argvalues": proofs, "ids": [proof.template for proof in proofs]}


@NEEDS_HARNESSES
class TestMiniSweAgent:
    SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat f"

    @pytest.mark.parametrize("proof", **ids(WITH_TOOLS))
    async def test_commands_run_and_their_output_is_read(self, proof: Proof) -> None:
        script = [calls(call("bash", command=command)) for command in ("echo 5 > f; echo seen $((6 * 7))", self.SUBMIT)]
        rollout = await roll_out("harness-mini-swe-agent", script, proof.template, arguments=["mini.yaml"])
        assert "seen 42" in rollout.generator.prompts[1]
        rollout.check([2])
        assert rollout.breaks == {}


@NEEDS_HARNESSES
class TestAgentsSdk:
    SCRIPT = (calls(call("transfer_to_calculator")), calls(call("add", first=2, second=3)), {"content": "5"})

    @pytest.mark.parametrize("proof", **ids(WITH_TOOLS))
    @pytest.mark.parametrize("api", ["responses", "chat_completions"])
    async def test_an_agent_hands_off_to_another(self, proof: Proof, api: str) -> None:
        rollout = await roll_out("harness-agents-sdk", self.SCRIPT, proof.template, arguments=[api])
        assert "transfer_to_calculator" in rollout.generator.prompts[0]
        assert "Answer with the number only." in rollout.generator.prompts[1]
        assert "5.0" in rollout.generator.prompts[2]
        rollout.check([1, 2])
        assert rollout.breaks == {}


@NEEDS_HARNESSES
class TestSmolagents:
    SCRIPT = (
        calls(call("calculator", task="add 2 and 3")),
        calls(call("add", first=2, second=3)),
        calls(call("final_answer", answer="5")),
        calls(call("final_answer", answer="5")),
    )

    @pytest.mark.parametrize("proof", **ids(WITH_TOOLS))
    async def test_an_agent_manages_another(self, proof: Proof) -> None:
        rollout = await roll_out("harness-smolagents", self.SCRIPT, proof.template)
        assert "add 2 and 3" in rollout.generator.prompts[1]
        assert "Observation:\n5" in rollout.generator.prompts[2]
        rollout.check([1, 1, 1, 1])

"""Harnesses of other projects, unmodified, in their own Python (``scripts/test-harnesses``), as programs of sessions. A
scripted model answers in the format of each family, as its maker's template writes it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.golden.families.proofs import TOOL_PROOFS, Proof
from tests.unit.workflows.scripted_runs import codec_of, masked_runs
from tests.unit.workflows.test_command_sandbox import NEEDS_BWRAP
from trinity_mq.experience import Experience
from trinity_mq.models.wrapper import ModelWrapper
from trinity_mq.testing.scripted import ScriptedGenerator, logprob, scripted_server
from trinity_mq.workflows import SandboxFailed, Task
from trinity_mq.workflows.sessions.children import close_persistent_programs
from trinity_mq.workflows.sessions.program import ProgramWorkflow

EXAMPLES = Path(__file__).parents[3] / "examples"
PYTHON = Path(os.environ.get("TRINITY_MQ_HARNESSES", "")) / "python" / "bin" / "python"
NEEDS_HARNESSES = pytest.mark.skipif(
    not PYTHON.exists(), reason="TRINITY_MQ_HARNESSES/python has no harnesses: scripts/test-harnesses makes it"
)
SANDBOX = EXAMPLES / "harness-mini-swe-agent" / "sandbox.py"
PARENT = """
import asyncio

import rollouts
from agents import Agent, OpenAIResponsesModel, RunConfig, Runner
from openai import AsyncOpenAI


async def answer_of(rollout):
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["key"]) as client:
        model = OpenAIResponsesModel(rollout["model"], client)
        helper = Agent("helper", instructions="Help.", model=model)
        parent = Agent("parent", instructions="Ask.", model=model, tools=[helper.as_tool("ask", "Asks the helper.")])
        run = await Runner.run(parent, "Go.", max_turns=20, run_config=RunConfig(tracing_disabled=True))
        return str(run.final_output)


rollouts.serve(lambda rollout: float(asyncio.run(answer_of(rollout)) == "done"))
"""
THINKING = [proof for proof in TOOL_PROOFS if proof.thoughts and proof.template != "qwen3.5-small"]
"""Templates with thoughts. The prompts of the small Qwen3.5 close them."""
BEGIN_WITH_RESULT = [proof for proof in TOOL_PROOFS if proof.template != "mistral-nemo"]
BY_TEMPLATE = pytest.mark.parametrize("proof", TOOL_PROOFS, ids=lambda proof: proof.template)

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module", autouse=True)
async def programs() -> AsyncIterator[None]:
    """Each harness is one process for all tests, because the imports of a harness take seconds."""
    yield
    await close_persistent_programs()


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent that has another agent as its tool."""
    path = tmp_path_factory.mktemp("parent") / "agent.py"
    path.write_text(PARENT)
    return path


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
        assert {name: value for name, value in metrics.items() if "break" in name and value} == {}
        assert metrics.get("session_malformed_calls", 0) == 0

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.generator.codec.decode([list(tokens)])[0]


IDS = itertools.count(100000)
"""Some families write the ids of calls. They must differ."""


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"abc{next(IDS)}", "type": "function", "function": function}


def calls(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"content": "", "tool_calls": list(parts), **fields}


async def roll_out(example: Path, template: str, script: Sequence[dict[str, Any]], *arguments: str) -> Rollout:
    """Run a harness as the program of a rollout."""
    task = Task(
        workflow=ProgramWorkflow,
        raw_task={"question": "2+3?", "answer": "5"},
        workflow_args={
            "command": [str(PYTHON), str(example), *arguments],
            "env": {"PYTHONPATH": str(EXAMPLES / "harness")},
            "keep": True,
            "merge": "renderer",
        },
    )
    codec = codec_of(template)
    if codec.render([{"role": "user", "content": "?"}]).rstrip().endswith("<think>"):  # every answer has thoughts
        script = [{"reasoning_content": f"Thought {number}.", **answer} for number, answer in enumerate(script)]
    async with scripted_server(script, codec=codec) as (engine, generator):
        model = ModelWrapper(engine)
        try:
            experiences = await ProgramWorkflow(task=task, model=model).run_async()
        finally:
            await model.aclose()
    assert len(generator.sampled) == len(script), "the harness asked for the whole script"
    return Rollout(experiences, generator)


@NEEDS_HARNESSES
@NEEDS_BWRAP
class TestMiniSweAgent:
    AGENT = EXAMPLES / "harness-mini-swe-agent" / "agent.py"
    SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat f"

    def script(self, *commands: str, **fields: Any) -> list[dict[str, Any]]:
        return [calls(call("bash", command=command), **fields) for command in (*commands, self.SUBMIT)]

    @BY_TEMPLATE
    async def test_commands_run_and_their_output_is_read(self, proof: Proof) -> None:
        script = self.script("echo 5 > f; echo seen $((6 * 7))")
        rollout = await roll_out(self.AGENT, proof.template, script, "mini.yaml")
        assert "seen 42" in rollout.generator.prompts[1]
        rollout.check([2])

    @pytest.mark.parametrize("proof", THINKING, ids=lambda proof: proof.template)
    async def test_thoughts_come_back_and_are_trained_on(self, proof: Proof) -> None:
        script = self.script("echo 5 > f", "echo on", reasoning_content="I think.")
        rollout = await roll_out(self.AGENT, proof.template, script, "mini.yaml")
        assert all("I think." in rollout.text(tokens) for tokens in rollout.generator.sampled)
        rollout.check([3])

    async def test_a_command_reaches_neither_key_nor_gateway_nor_files(self) -> None:
        attack = "echo 5 > f; env; cat /proc/[0-9]*/environ | tr '\\0' '\\n'; ls /root /home /srv; cat /proc/net/tcp"
        rollout = await roll_out(self.AGENT, "qwen2.5", self.script(attack), "mini.yaml")
        observed = rollout.generator.prompts[1].removeprefix(rollout.generator.prompts[0])
        assert "PATH=" in observed
        for secret in ("sk-tmq", "OPENAI", "PYTHONPATH", "TRINITY"):
            assert secret not in observed
        for folder in ("/root", "/home", "/srv"):
            assert f"cannot access \\u0027{folder}\\u0027" in observed
        rollout.check([2])

    async def test_without_bubblewrap_no_command_runs(self, tmp_path: Path) -> None:
        (tmp_path / "python3").symlink_to(sys.executable)
        command = [str(PYTHON), str(self.AGENT), "mini.yaml"]
        env = {"PYTHONPATH": str(EXAMPLES / "harness"), "PATH": str(tmp_path)}
        arguments = {"command": command, "env": env, "keep": True}
        task = Task(workflow=ProgramWorkflow, raw_task={"question": "?", "answer": "5"}, workflow_args=arguments)
        async with scripted_server([]) as (engine, _):
            model = ModelWrapper(engine)
            try:
                with pytest.raises(
                    SandboxFailed, match="no command can run in bubblewrap: bubblewrap is not installed"
                ):
                    await ProgramWorkflow(task=task, model=model).run_async()
            finally:
                await model.aclose()


@NEEDS_HARNESSES
class TestAgentsSdk:
    AGENT = EXAMPLES / "harness-agents-sdk" / "agent.py"
    HELPED = 10

    # Mistral Nemo's template writes no system message before the result of a tool, with which the second agent begins
    @pytest.mark.parametrize("proof", BEGIN_WITH_RESULT, ids=lambda proof: proof.template)
    @pytest.mark.parametrize("api", ["responses", "chat_completions"])
    async def test_an_agent_hands_off_to_another(self, proof: Proof, api: str) -> None:
        script = [calls(call("transfer_to_calculator")), calls(call("add", first=2, second=3)), {"content": "5"}]
        rollout = await roll_out(self.AGENT, proof.template, script, api)
        assert "transfer_to_calculator" in rollout.generator.prompts[0]
        assert "Answer with the number only." in rollout.generator.prompts[1]
        assert "5.0" in rollout.generator.prompts[2]
        rollout.check([1, 2])

    @BY_TEMPLATE
    async def test_a_parent_calls_ten_agents_and_stays_one_experience(self, proof: Proof, parent: Path) -> None:
        script: list[dict[str, Any]] = []
        for number in range(self.HELPED):
            script += [calls(call("ask", input=f"Question {number}")), {"content": f"Answer {number}"}]
        rollout = await roll_out(parent, proof.template, [*script, {"content": "done"}])
        assert f"Answer {self.HELPED - 1}" in rollout.generator.prompts[-1]
        rollout.check([*[1] * self.HELPED, self.HELPED + 1])


@NEEDS_HARNESSES
class TestSmolagents:
    AGENT = EXAMPLES / "harness-smolagents" / "agent.py"

    @BY_TEMPLATE
    async def test_each_answer_is_an_experience_because_the_harness_writes_its_calls_as_text(
        self, proof: Proof
    ) -> None:
        script = [
            calls(call("calculator", task="add 2 and 3")),
            calls(call("add", first=2, second=3)),
            calls(call("final_answer", answer="5")),
            calls(call("final_answer", answer="5")),
        ]
        rollout = await roll_out(self.AGENT, proof.template, script)
        assert "add 2 and 3" in rollout.generator.prompts[1]
        assert "Calling tools:" in rollout.generator.prompts[2]
        assert "Observation:\n5" in rollout.generator.prompts[2]
        rollout.check([1, 1, 1, 1])

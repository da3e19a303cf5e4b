"""Coding agents of other makers, unmodified in their sandbox, on a scripted model that answers in a family's format.

``scripts/test-harnesses`` installs them. TRINITY_MQ_HARNESSES is their folder; without it these tests are left out.
"""

import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workflows.scripted_runs import codec_of, masked_runs, tool_call
from trinity_mq.config import load_config
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import Experience
from trinity_mq.models.wrapper import ModelWrapper
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.testing.scripted import Answer, logprob, scripted_server, written_answer
from trinity_mq.workflows import Task, load_workflow

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("TRINITY_MQ_HARNESSES", ROOT / ".harnesses"))
QUESTION, SUBTASK = "Write 42 into answer.txt with the help of another agent.", "SUBTASK: think about it."
LONG_PROMPTS = {"OPENCODE_DISABLE_AUTOCOMPACT": "1"}
"""Tokens of the scripted model are bytes, so that prompts are longer than the examples expect."""
Step = Answer | Callable[[str], Answer]

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.timeout(120),
]


def wait_for_agent(prompt: str) -> dict[str, Any]:
    agent = re.findall(r'agent_id\\*": *\\*"([^"\\]+)', prompt)[-1]
    return tool_call("multi_agent_v1__wait_agent", targets=[agent], timeout_ms=20000)


AGENTS: dict[str, tuple[list[Step], int]] = {
    "codex": (
        [
            tool_call("exec_command", "I begin.", cmd="printf 4 > answer.txt"),
            tool_call("multi_agent_v1__spawn_agent", message=SUBTASK),
            wait_for_agent,
            tool_call("exec_command", cmd="printf 2 >> answer.txt"),
            "Done: answer.txt holds 42.",
        ],
        2,  # the agent and its helper
    ),
    "opencode": (
        [
            tool_call("write", "I begin.", filePath="/agent/files/answer.txt", content="4"),
            tool_call("task", description="Think", prompt=SUBTASK, subagent_type="general"),
            tool_call("bash", command="printf 2 >> answer.txt"),
            "Done: answer.txt holds 42.",
        ],
        3,  # the agent, its helper, and the title of the conversation
    ),
    "claude-code": (
        [
            tool_call("Write", "I begin.", file_path="/agent/files/answer.txt", content="4"),
            tool_call("ToolSearch", query="select:NotebookEdit,WebFetch"),
            tool_call("Agent", description="Think", prompt=SUBTASK, subagent_type="claude", run_in_background=False),
            tool_call("Bash", command="printf 2 >> answer.txt", description="Write"),
            "Done: answer.txt holds 42.",
        ],
        2,  # the agent and its helper
    ),
}
"""By agent: the answers of the model to the task, and the number of conversations."""


@dataclass
class Model:
    """Follows the steps of a task; answers a helper and a request for a title beside it."""

    steps: Iterator[Step]
    codec: TextCodec
    texts: list[str] = field(default_factory=list)
    """What was sampled."""

    def __call__(self, prompt: str) -> str:
        step: Step
        if QUESTION not in prompt:
            step = "I have thought about it."
        elif "CHECKPOINT COMPACTION" in prompt[-2000:]:
            step = "I have written half of the file."
        elif "title" in prompt.partition(QUESTION)[0][-500:]:
            step = "A file with a number"
        else:
            step = next(self.steps, "Nothing is left to do.")  # Claude Code tells the model when its helper has ended
        answer = step(prompt) if callable(step) else step
        self.texts.append(
            written_answer(self.codec, {"content": answer} if isinstance(answer, str) else answer, prompt)
        )
        return self.texts[-1]


def installed(agent: str) -> None:
    if not (FOLDER / agent / "node_modules").is_dir():
        pytest.skip(f"{agent} is not in {FOLDER}: scripts/test-harnesses installs it")


@contextlib.asynccontextmanager
async def model_of(family: str, steps: Sequence[Step]) -> AsyncIterator[tuple[ModelWrapper, Model]]:
    codec = codec_of(family)
    script = Model(iter(steps), codec)
    async with scripted_server(script, codec=codec, max_model_len=1 << 21) as (handle, _):
        model = ModelWrapper(handle, enable_history=True)
        try:
            yield model, script
        finally:
            await model.aclose()


def task_of(agent: str, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Task:
    """Return the task as the example configures it, with other ``arguments`` of the workflow."""
    monkeypatch.setenv("TRINITY_MQ_MODEL", "model")
    monkeypatch.setenv("TRINITY_MQ_HARNESSES", str(FOLDER))
    taskset = load_config(ROOT / "examples" / f"harness-{agent}.yaml").buffer.taskset
    add_plugins([str(ROOT / "examples" / f"harness-{agent}")])
    env = {**taskset.workflow_args.get("env", {}), **LONG_PROMPTS}
    return Task(
        workflow=load_workflow(taskset.workflow),
        format_args=taskset.format,
        raw_task={"question": QUESTION, "answer": "42"},
        workflow_args={**taskset.workflow_args, "env": env, **arguments},
    )


async def run(script: Model, model: ModelWrapper, task: Task, conversations: int) -> list[Experience]:
    """Run an agent; check that its training data is what was sampled, in as many experiences as conversations."""
    experiences = await task.workflow(task=task, model=model).run_async()
    assert not list(script.steps)
    assert [experience.reward for experience in experiences] == [1.0] * conversations
    turns = [turn for experience in experiences for turn in sampled(script.codec, experience)]
    assert sorted(turns) == sorted(script.texts)
    for experience in experiences:
        for tokens, logprobs in masked_runs(experience):
            assert logprobs == [logprob(position) for position in range(len(tokens))]
    metrics = experiences[-1].metrics
    assert metrics["session_calls"] == len(script.texts)
    assert metrics["agent_failed"] == metrics["agent_timed_out"] == 0
    assert metrics["session_lineages"] == conversations
    assert not {name for name, value in metrics.items() if name.startswith("session_breaks") and value}
    return experiences


def sampled(codec: TextCodec, experience: Experience) -> list[str]:
    """Return the texts under the mask of an experience, one for each turn."""
    return codec.decode([tokens for tokens, _ in masked_runs(experience)])


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_works_and_each_of_its_conversations_is_one_experience(
    agent: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(agent)
    steps, conversations = AGENTS[agent]
    async with model_of(family, steps) as (model, script):
        await run(script, model, task_of(agent, monkeypatch), conversations)


async def test_codex_compacts_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("codex")
    steps: list[Step] = [
        tool_call("exec_command", cmd="printf 4 > answer.txt; seq 4000"),
        tool_call("exec_command", cmd="printf 2 >> answer.txt"),
        "Done: answer.txt holds 42.",
    ]
    async with model_of("qwen3", steps) as (model, script):
        task = task_of("codex", monkeypatch)
        program, *others = task.workflow_args["command"]
        command = [program, "-c", "model_auto_compact_token_limit=45000", *others]
        task = task_of("codex", monkeypatch, command=command)
        # the history, its summary (asked without tools, so that its prompt begins in another way), the new history
        parts = [sampled(script.codec, experience) for experience in await run(script, model, task, 3)]
    assert [len(turns) for turns in parts] == [2, 1, 1]
    assert "I have written half of the file." in parts[1][0]

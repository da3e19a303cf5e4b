"""An agent framework beside ours: the OpenAI Agents SDK (its package is ``agents``) on a real engine server."""

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.workflows.tiny_engines import running
from trinity_mq.config import load_config
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.testing.scripted import ScriptedGenerator, logprob
from trinity_mq.workflows import Task, load_workflow

pytest.importorskip("agents", reason="openai-agents is not installed")

EXAMPLES = Path(__file__).parents[3] / "examples"
NAME = "agents_sdk.CalculatorAgent"
QUESTION = {"question": "3 boxes of 4 pens and 2 pens, how many?", "answer": "#### 14"}


@pytest.fixture
def kind(plugin_folder):
    shutil.copy(EXAMPLES / "agents_sdk.py", plugin_folder)
    add_plugins([str(plugin_folder)])
    return load_workflow(NAME)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def run(kind, tmp_path, says):
    generator = ScriptedGenerator(says)
    async with running(generator, tmp_path) as runner:
        status, experiences = await runner.run_task_async(Task(workflow=kind, raw_task=QUESTION))
    assert status.ok, status.message
    return generator, experiences


async def test_tools_are_called_and_every_turn_is_an_experience(kind, tmp_path):
    says = [call("multiply", first=3, second=4), call("add", first=12, second=2), "So \\boxed{14}"]
    generator, experiences = await run(kind, tmp_path, says)
    assert [exp.response_text for exp in experiences] == says
    assert [(exp.eid.step, exp.reward) for exp in experiences] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert '"name": "add"' in generator.prompts[0]
    assert "<|im_start|>tool\n12.0<|im_end|>" in generator.prompts[1]
    assert "<|im_start|>tool\n14.0<|im_end|>" in generator.prompts[2]
    for said, prompt, exp in zip(says, generator.prompts, experiences, strict=True):
        sampled = [*generator.codec.encode(said), *generator.codec.stop_ids]
        assert exp.tokens.tolist() == [*generator.codec.encode(prompt), *sampled]
        assert exp.logprobs.tolist() == [logprob(position) for position in range(len(sampled))]
        assert exp.versions == [(0, 1, 7)]


@pytest.mark.parametrize(
    "says", [[call("divide", first=1, second=2)], [call("add", first=1, second=1)] * 8], ids=["no such tool", "no end"]
)
async def test_what_the_model_does_wrong_is_trained_on(kind, says, tmp_path):
    _, experiences = await run(kind, tmp_path, says)
    assert [exp.response_text for exp in experiences] == says
    assert {exp.reward for exp in experiences} == {0.0}


def test_the_configuration_names_it(kind, monkeypatch):
    monkeypatch.setenv("TRINITY_MQ_MODEL", "model")
    monkeypatch.setenv("TRINITY_MQ_GSM8K", "data")
    config = load_config(EXAMPLES / "agents-sdk.yaml")
    assert load_workflow(config.buffer.taskset.workflow) is kind
    assert config.explorer.rollout_model.enable_history

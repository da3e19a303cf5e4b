"""Plug-ins in the style of Trinity-RFT, registered by decorator in a folder, found by name in every process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import OperatorConfig
from trinity_mq.operators import EXPERIENCE_OPERATORS, create_operators
from trinity_mq.rewards import REWARD_FUNCTIONS, UnknownNameError, create_reward, parts_of
from trinity_mq.runtime.plugins import Registry, add_plugins
from trinity_mq.workflows import WORKFLOWS, load_workflow

PLUGINS = """
from typing import Optional

from trinity_mq.experience import Experience
from trinity_mq.operators import EXPERIENCE_OPERATORS, ExperienceOperator
from trinity_mq.rewards import REWARD_FUNCTIONS, RewardFn
from trinity_mq.workflows import WORKFLOWS, Task, Workflow


@WORKFLOWS.register_module("{prefix}_workflow")
class CountingWorkflow(Workflow):
    def __init__(self, *, task: Task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def run(self) -> list[Experience]:
        return []


@EXPERIENCE_OPERATORS.register_module("{prefix}_operator")
class DoublingOperator(ExperienceOperator):
    def __init__(self, factor: float = 2.0):
        self.factor = factor

    def process(self, exps):
        for exp in exps:
            exp.reward = exp.reward * self.factor
        return exps, {{"doubled": len(exps)}}


@REWARD_FUNCTIONS.register_module("{prefix}_reward")
class LengthReward(RewardFn):
    def __call__(self, response: str, prompt: Optional[str] = None, truth: Optional[str] = None, **kwargs):
        return {{"length": float(len(response)), "right": float(response == truth)}}
"""


@pytest.fixture
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Write a plug-in module and add its folder; return the prefix of its names."""

    def write(file: str = "", text: str = PLUGINS) -> str:
        prefix = f"t{abs(hash(request.node.nodeid)) % 10**8}"
        (tmp_path / f"{file or prefix}_plugins.py").write_text(text.format(prefix=prefix))
        add_plugins([str(tmp_path)])
        return prefix

    return write


def test_each_is_found_by_the_name_it_registers(plugin: Callable[..., str]) -> None:
    plugin("broken", "raise RuntimeError('executed')\n")  # nothing is executed to find a name
    prefix = plugin()
    assert load_workflow(f"{prefix}_workflow").__name__ == "CountingWorkflow"
    (operator,) = create_operators([OperatorConfig(name=f"{prefix}_operator", args={"factor": 3})])
    assert operator is not None
    reward = create_reward(f"{prefix}_reward", {})
    assert parts_of(reward, "abc", "abc", finished=True) == {"length": 3.0, "right": 1.0}
    assert set(WORKFLOWS) == {name for name in WORKFLOWS if not name.startswith(prefix)}, "the built-in names stay"
    assert "reward_filter" in EXPERIENCE_OPERATORS
    assert "math_reward" in REWARD_FUNCTIONS
    with pytest.raises(UnknownNameError, match=f"did you mean '{prefix}_reward'"):
        create_reward(f"{prefix}_rewart", {})


def test_two_that_register_one_name_are_an_error(plugin: Callable[..., str]) -> None:
    plugin("first")
    prefix = plugin("second")
    with pytest.raises(UnknownNameError, match=r"registered by first_plugins.\w+ and by second_plugins.\w+: rename"):
        create_reward(f"{prefix}_reward", {})


def test_validate_and_other_processes_find_them(plugin: Callable[..., str], tmp_path: Path) -> None:
    prefix = plugin()
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
name: plug
model: {{tiny: {{}}}}
plugin_dirs: [{tmp_path}]
buffer: {{taskset: {{storage_type: synthetic, path: max3, workflow: {prefix}_workflow, reward_fn: {prefix}_reward}}}}
operator: {{operators: [{{name: {prefix}_operator}}]}}
"""
    )
    command = [sys.executable, "-m", "trinity_mq.cli.main", "validate", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    file.write_text(file.read_text().replace("_workflow,", "_workflwo,"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"{prefix}_workflow" in done.stderr


def test_a_registered_name_belongs_to_one_class() -> None:
    registry = Registry({"known": "a:B"}, "THINGS")

    @registry.register_module("mine")
    class Mine:
        pass

    assert registry.find("thing", "mine") is Mine
    registry.register_module("mine")(Mine)  # a module that is imported again
    with pytest.raises(ValueError, match="'known' is a:B already"):
        registry.register_module("known")(Mine)
    with pytest.raises(ValueError, match=r"'mine' is .*Mine already"):
        registry.register_module("mine")(int)


@pytest.mark.parametrize(
    "function",
    [
        lambda response, prompt, truth: {"right": float(response == truth)},
        lambda **kwargs: {"right": float(kwargs["response"] == kwargs["truth"])},
        lambda response, truth, *, finished: {"right": float(response == truth)},
        lambda response, truth=None, prompt=None, **rest: {"right": float(response == truth)},
    ],
)
def test_rewards_are_called_in_the_form_they_take(function: Any) -> None:
    reward = create_reward(function, {})
    assert parts_of(reward, "5", "5", finished=True) == {"right": 1.0}
    assert parts_of(reward, "5", "6", finished=True) == {"right": 0.0}

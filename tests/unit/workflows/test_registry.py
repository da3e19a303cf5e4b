"""From names to workflows: built-in, from installed packages, by dotted path, from a plug-in folder."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_mq.rewards import UnknownNameError
from trinity_mq.runtime.plugins import add_plugins, resolve
from trinity_mq.workflows import WORKFLOWS, Task, load_workflow

ECHO = """
from trinity_mq.workflows import Workflow

class EchoWorkflow(Workflow):
    is_async = True

class Unlike:
    pass
"""


ASYNCHRONOUS = {"program_workflow", "recorded_sessions", "verifiers_workflow"}
"""Workflows that have one form: they wait for programs, or make experiences of what is there."""


NAMES_OF_USERS = (
    "frozen_lake gymnasium math_boxed math_eval math_rm math_ruler math math_trainable_ruler on_policy_distill_math "
    "on_policy_distill program rubric_judge ruler simple sudoku tool_agent tool_call verifiers"
)


def test_the_names_that_users_write_exist():
    twins = [name for name in WORKFLOWS if name.startswith("async_")]
    names = {f"{name}_workflow" for name in NAMES_OF_USERS.split()} | {"recorded_sessions"}
    assert WORKFLOWS.keys() - set(twins) == names


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_built_in_workflow_loads_and_has_its_twin(name):
    found = load_workflow(name)
    assert f"{found.__module__}:{found.__qualname__}" == WORKFLOWS[name]
    assert found.is_async == (name.startswith("async_") or name in ASYNCHRONOUS)
    if not found.is_async:
        assert load_workflow(f"async_{name}").__name__ == f"Async{found.__name__}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("math_workflw", "did you mean 'math_workflow'"),
        ("tool_agent", "'tool_agent_workflow'"),
        ("zzzzzz", "known: async_"),
        ("trinity_mq.workflows.builtin.simple.SimpleWorkflw", "did you mean 'SimpleWorkflow'"),
        ("no_such_package.Mine", "module 'no_such_package' cannot be imported"),
        ("trinity_mq.workflows.Task", "wanted a subclass of trinity_mq.workflows.Workflow"),
        ("trinity_mq.workflows.execute", "wanted a subclass"),
    ],
)
def test_errors_list_what_is_near(name, said):
    with pytest.raises(UnknownNameError, match=said):
        load_workflow(name)


INSTALLED = """
[trinity_mq.workflows]
mine = installed_names:Mine
broken = installed_names.missing:Mine
failing = installed_failing:Mine
[trinity_mq.rewards]
theirs = installed_names:reward
"""
NAMES = """
from trinity_mq.workflows import Workflow
class Mine(Workflow): ...
def reward(response, truth, *, finished): return {"accuracy": 0.5}
"""
CHECKS = """
import pytest
from trinity_mq.messages import TaskBody
from trinity_mq.rewards import UnknownNameError, create_reward
from trinity_mq.workflows import Task, load_workflow
assert load_workflow("mine").__module__ == "installed_names"
for name, error in {
    "mne": "did you mean 'mine'",
    "broken": r"'broken' of an installed package \\(installed_names.missing:Mine\\)",
    "failing": "'failing' of an installed package.*ZeroDivisionError",
}.items():
    with pytest.raises(UnknownNameError, match=error):
        load_workflow(name)
assert create_reward("theirs", {})("7", "7", finished=True) == {"accuracy": 0.5}
assert Task.from_body(TaskBody(workflow="mine", reward_fn="theirs")).reward_fn.__name__ == "reward"
"""


def test_installed_packages_add_names_of_workflows_and_of_rewards(tmp_path):
    (tmp_path / "installed_names.py").write_text(NAMES)
    (tmp_path / "installed_failing.py").write_text("1 / 0\n")
    (tmp_path / "installed-1.0.dist-info").mkdir()
    (tmp_path / "installed-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n"
    )
    (tmp_path / "installed-1.0.dist-info" / "entry_points.txt").write_text(INSTALLED)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_plug_in_is_named_by_file_and_class(plugin_folder):
    (plugin_folder / "plugged_echo.py").write_text(ECHO)
    add_plugins([str(plugin_folder)])
    found = load_workflow("plugged_echo.EchoWorkflow")
    assert found.is_async
    assert Path(inspect.getfile(found)).parent == plugin_folder
    body = Task(workflow=found).to_body()
    assert body.workflow == "plugged_echo.EchoWorkflow", "so that another process of the run finds it"
    assert Task.from_body(body).workflow is found
    with pytest.raises(UnknownNameError, match="wanted a subclass"):
        load_workflow("plugged_echo.Unlike")


NEAR = ["EchoWorkflow", "echo.EchoWorkflow", "plugged_eco.EchoWorkflow", "echo_workflow"]


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_of_plug_ins_are_listed(plugin_folder, name):
    (plugin_folder / "plugged_echo.py").write_text(ECHO)
    add_plugins([str(plugin_folder)])
    with pytest.raises(UnknownNameError, match=r"\(in plugin_dirs there is 'plugged_echo\.EchoWorkflow'\)$"):
        load_workflow(name)


def test_a_plug_in_that_cannot_be_imported_says_why(plugin_folder):
    (plugin_folder / "plugged_bad.py").write_text("import json\n1 / 0\nclass Mine: ...\n")
    add_plugins([str(plugin_folder)])
    with pytest.raises(UnknownNameError, match="ZeroDivisionError: division by zero"):
        load_workflow("plugged_bad.Mine")


def test_a_built_in_whose_package_is_missing_says_so():
    with pytest.raises(UnknownNameError, match="'needs_more' needs a package that is not installed: No module named"):
        resolve("workflow", "needs_more", {"needs_more": "no_such_package.module:Workflow"})

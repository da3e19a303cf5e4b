"""From names to workflows: built-in, from installed packages, by dotted path, from a plug-in folder."""

from __future__ import annotations

import sys

import pytest

from trinity_mq.rewards import UnknownNameError
from trinity_mq.runtime import plugins
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.workflows import WORKFLOWS, SimpleWorkflow, Task, load_workflow, registry

ECHO = """
from trinity_mq.workflows import Workflow

class EchoWorkflow(Workflow):
    is_async = True

class Unlike:
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A plug-in folder; afterwards the interpreter is as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_added", {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


ASYNCHRONOUS = {"program_workflow", "recorded_sessions", "verifiers_workflow"}
"""Workflows that have one form: they wait for programs, or make experiences of what is there."""


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_built_in_workflow_loads_and_has_its_twin(name):
    found = load_workflow(name)
    assert f"{found.__module__}:{found.__qualname__}" == WORKFLOWS[name]
    assert found.is_async == (name.startswith("async_") or name in ASYNCHRONOUS)
    if not found.is_async:
        assert load_workflow(f"async_{name}").__name__ == f"Async{found.__name__}"


def test_a_dotted_path_is_imported():
    assert load_workflow("trinity_mq.workflows.builtin.simple.SimpleWorkflow") is SimpleWorkflow


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
mine = installed_workflows:Mine
broken = installed_workflows.missing:Mine
failing = installed_failing:Mine
"""


def test_installed_packages_add_names(folder, monkeypatch):
    (folder / "installed_workflows.py").write_text(
        "from trinity_mq.workflows import Workflow\nclass Mine(Workflow): ...\n"
    )
    (folder / "installed_failing.py").write_text("1 / 0\n")
    (folder / "installed-1.0.dist-info").mkdir()
    (folder / "installed-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n"
    )
    (folder / "installed-1.0.dist-info" / "entry_points.txt").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(folder))
    plugins._entry_points.cache_clear()
    try:
        assert load_workflow("mine").__module__ == "installed_workflows"
        with pytest.raises(UnknownNameError, match="did you mean 'mine'"):
            load_workflow("mne")
        with pytest.raises(UnknownNameError, match=r"'broken' of an installed package \(installed_w.*missing:Mine\)"):
            load_workflow("broken")
        with pytest.raises(UnknownNameError, match="ZeroDivisionError"):
            load_workflow("failing")
    finally:
        plugins._entry_points.cache_clear()


def test_a_plug_in_is_named_by_file_and_class(folder):
    (folder / "plugged_echo.py").write_text(ECHO)
    add_plugins([str(folder)])
    found = load_workflow("plugged_echo.EchoWorkflow")
    assert found.is_async
    body = Task(workflow=found).to_body()
    assert body.workflow == "plugged_echo.EchoWorkflow", "so that another process of the run finds it"
    assert Task.from_body(body).workflow is found
    with pytest.raises(UnknownNameError, match="wanted a subclass"):
        load_workflow("plugged_echo.Unlike")


NEAR = ["EchoWorkflow", "echo.EchoWorkflow", "plugged_eco.EchoWorkflow", "echo_workflow"]


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_of_plug_ins_are_listed(folder, name):
    (folder / "plugged_echo.py").write_text(ECHO)
    add_plugins([str(folder)])
    with pytest.raises(UnknownNameError, match=r"\(in plugin_dirs there is 'plugged_echo\.EchoWorkflow'\)$"):
        load_workflow(name)


def test_a_plug_in_that_cannot_be_imported_says_why(folder):
    (folder / "plugged_bad.py").write_text("import json\n1 / 0\nclass Mine: ...\n")
    add_plugins([str(folder)])
    with pytest.raises(UnknownNameError, match="ZeroDivisionError: division by zero"):
        load_workflow("plugged_bad.Mine")


def test_a_built_in_whose_package_is_missing_says_so(monkeypatch):
    monkeypatch.setattr(registry, "WORKFLOWS", {"needs_more": "no_such_package.module:Workflow"})
    with pytest.raises(UnknownNameError, match="'needs_more' needs a package that is not installed: No module named"):
        load_workflow("needs_more")

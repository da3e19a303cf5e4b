from __future__ import annotations

import ast
import importlib
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trinity_mq

ROOT = Path(__file__).parents[2]
SLIM = ("trinity_mq", "trinity_mq.cli.main", "trinity_mq.bus", "trinity_mq.messages", "trinity_mq.config")
SLIM += (
    "trinity_mq.telemetry",
    "trinity_mq.runtime.processes.supervisor",
    "trinity_mq.runtime.serve",
    "trinity_mq.cli.run",
    "trinity_mq.launch.configured_run",
)
SLIM += ("trinity_mq.cli.submit", "trinity_mq.cli.status", "trinity_mq.data")
SLIM += ("trinity_mq.observability.sources", "trinity_mq.page.app", "trinity_mq.observability.prometheus.families")
SLIM += ("trinity_mq.cli.track",)
HEAVY = ("torch", "transformers", "vllm", "tensorboard", "openai")

PUBLIC = {
    "trinity_mq.launch.api": "MetricsLine RunError RunHandle RunResult run",
    "trinity_mq.experience": (
        "EID CustomField Experience ExperienceBatch split_dpo_experience_to_single_turn gather_token_ids "
        "gather_action_masks gather_attention_masks gather_response_attrs gather_multi_modal_inputs group_by "
        "to_hf_datasets from_hf_datasets"
    ),
    "trinity_mq.operators": "ColumnOperator ExperienceOperator ExperienceOperatorV1 create_operators",
    "trinity_mq.scheduling": "Scheduler TaskWrapper RunnerWrapper sort_batch_id WorkflowRunner Status",
    "trinity_mq.workflows": (
        "Task Workflow MultiTurnWorkflow StepWiseRewardWorkflow RewardPropagationWorkflow AsyncMultiTurnWorkflow "
        "AsyncStepWiseRewardWorkflow AsyncRewardPropagationWorkflow WORKFLOWS"
    ),
    "trinity_mq.models": "ModelWrapper InferenceModel",
    "trinity_mq.config": "load_config Config",
    "trinity_agents.explorer": "Explorer",
    "trinity_agents.runner": "Runner",
    "trinity_agents.operator": "Operator",
    "trinity_agents.trainer": "Trainer",
}
METHODS = {
    ("trinity_mq.experience", "Experience"): "serialize deserialize serialize_many deserialize_many to_dict",
    ("trinity_mq.scheduling", "Scheduler"): "start stop schedule get_results has_step wait_all",
    ("trinity_mq.scheduling", "RunnerWrapper"): "run_with_retry restart_runner",
    ("trinity_mq.scheduling", "WorkflowRunner"): "run_task",
    ("trinity_agents.explorer", "Explorer"): "setup_weight_sync_group get_weight explore",
}


def test_imports_point_one_way() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}", "NO_COLOR": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = [contract["name"] for contract in settings["contracts"]]
    assert {contract["type"] for contract in settings["contracts"]} == {
        "layers",
        "protected",
        "forbidden",
        "independence",
        "acyclic_siblings",
    }
    assert [name for name in names if f"{name} KEPT" not in done.stdout] == []


@pytest.mark.parametrize("module", SLIM)
def test_light_packages_import_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}"},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_help_takes_less_than_half_a_second() -> None:
    """Of the processor's time, which a busy machine does not stretch; the best of three."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "trinity_mq.cli.main", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0
        assert "usage: trinity-mq" in done.stdout
        return after.ru_utime - before.ru_utime

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("home", PUBLIC)
def test_public_names_are_at_home(home: str) -> None:
    module = importlib.import_module(home)
    assert [name for name in PUBLIC[home].split() if not hasattr(module, name)] == []


@pytest.mark.parametrize(("home", "owner"), METHODS)
def test_public_methods_are_there(home: str, owner: str) -> None:
    cls = getattr(importlib.import_module(home), owner)
    assert [name for name in METHODS[home, owner].split() if not callable(getattr(cls, name, None))] == []


@pytest.mark.parametrize("name", sorted(set(trinity_mq.__all__) - {"__version__"}))
def test_the_package_gives_what_is_at_home(name: str) -> None:
    assert getattr(trinity_mq, name) is getattr(importlib.import_module(trinity_mq._HOMES[name]), name)


def test_the_package_exports_the_public_names_of_the_library() -> None:
    library = {name for home, names in PUBLIC.items() if home.startswith("trinity_mq.") for name in names.split()}
    assert set(trinity_mq.__all__) == {"__version__", "Explorer"} | library
    assert library <= set(dir(trinity_mq))
    with pytest.raises(AttributeError, match="no attribute 'Experiense'"):
        trinity_mq.Experiense  # noqa: B018


def test_type_checkers_see_what_is_loaded_lazily() -> None:
    tree = ast.parse(Path(trinity_mq.__file__).read_text())
    seen = {
        name.asname: statement.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for statement in branch.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    assert seen == trinity_mq._HOMES

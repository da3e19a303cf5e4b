from __future__ import annotations

import ast
import csv
import functools
import importlib
import inspect
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import trinity_mq
from trinity_mq.release import VERSION
from trinity_mq.renamed import NAMES, RENAMED

ROOT = Path(__file__).parents[2]
SLIM = (
    "trinity_mq", "trinity_mq.cli.main", "trinity_mq.bus", "trinity_mq.messages", "trinity_mq.config",
    "trinity_mq.telemetry", "trinity_mq.runtime.processes.supervisor", "trinity_mq.runtime.serve", "trinity_mq.cli.run",
    "trinity_mq.launch.configured_run", "trinity_mq.cli.submit", "trinity_mq.cli.status", "trinity_mq.cli.track",
    "trinity_mq.data", "trinity_mq.observability.sources", "trinity_mq.page.app",
    "trinity_mq.observability.prometheus.families",
)  # fmt: skip
HEAVY = ("torch", "transformers", "vllm", "tensorboard", "openai", "datasets")

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


def python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}", "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )


def test_imports_point_one_way() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = python("-c", program, "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = [contract["name"] for contract in settings["contracts"]]
    kinds = {contract["type"] for contract in settings["contracts"]}
    assert kinds == {"layers", "protected", "forbidden", "independence", "acyclic_siblings"}
    assert [name for name in names if f"{name} KEPT" not in done.stdout] == []


@pytest.mark.parametrize("module", SLIM)
def test_light_packages_import_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = python("-W", "error", "-c", program)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_help_takes_less_than_half_a_second() -> None:
    """Of the processor's time, which a busy machine does not stretch; the best of three."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python("-m", "trinity_mq.cli.main", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0
        assert "usage: trinity-mq" in done.stdout
        return after.ru_utime - before.ru_utime

    assert min(seconds() for _ in range(3)) < 0.5


def test_the_package_exports_the_public_names_of_the_library_lazily_and_type_checkers_see_them() -> None:
    homes = {name: home for home, names in PUBLIC.items() for name in names.split()}
    for name, home in homes.items():
        assert hasattr(importlib.import_module(home), name), f"{home} has no {name}"
    library = {name: home for name, home in homes.items() if home.startswith("trinity_mq.") or name == "Explorer"}
    assert set(trinity_mq.__all__) == {"__version__", *library}
    assert library.keys() <= set(dir(trinity_mq))
    assert [name for name in library if getattr(trinity_mq, name) is not attribute(library[name], name)] == []
    with pytest.raises(AttributeError, match="no attribute 'Experiense'"):
        trinity_mq.Experiense  # noqa: B018
    statements = [
        statement
        for branch in ast.parse(Path(trinity_mq.__file__).read_text()).body
        if isinstance(branch, ast.If)
        for statement in branch.body
        if isinstance(statement, ast.ImportFrom)
    ]
    seen = {name.asname: statement.module for statement in statements for name in statement.names}
    assert seen.keys() == library.keys()
    assert [
        name for name, home in seen.items() if attribute(str(home), str(name)) is not getattr(trinity_mq, name)
    ] == []


def attribute(home: str, name: str) -> object:
    return getattr(importlib.import_module(home), name)


with Path(__file__).with_name("documented_api.csv").open(encoding="utf-8") as table:
    DOCUMENTED = {row["name"]: row["parameters"] for row in csv.DictReader(table)}
"""Parameters by name in ``trinity_mq``; those behind ``*`` are given by keyword."""
COROUTINES = {
    *("Explorer.explore", "Explorer.get_weight", "Explorer.setup_weight_sync_group", "RunnerWrapper.run_with_retry"),
    *("Scheduler.get_results", "Scheduler.start", "Scheduler.stop", "Scheduler.wait_all"),
    *("ExperienceOperatorV1.close", "ExperienceOperatorV1.prepare", "ExperienceOperatorV1.process"),
}
PROPERTIES = {"EID": "uid sid rid tid", "Workflow": "repeatable resettable", "StepWiseRewardWorkflow": "max_step_num"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_documented_can_be_called_so(name: str) -> None:
    called: Any = functools.reduce(getattr, name.split("."), trinity_mq)
    given = [one for one in inspect.signature(called).parameters.values() if one.name not in {"self", "cls"}]
    for place, documented in enumerate(DOCUMENTED[name].split()):
        spelled, _, default = documented.partition("=")
        by_keyword, spelled = spelled.startswith("*"), spelled.removeprefix("*")
        parameter = next((one for one in given if one.name == spelled), None)
        assert parameter is not None, f"{name} has no parameter {spelled}"
        if not by_keyword:
            assert given.index(parameter) == place
            assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if default:
            assert repr(parameter.default) == default
    wanted = {one.partition("=")[0].removeprefix("*") for one in DOCUMENTED[name].split()}
    required = [one.name for one in given if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    assert [one for one in required if one not in wanted] == [], "what is not documented is optional"
    if "." in name:
        assert inspect.iscoroutinefunction(called) == (name in COROUTINES)


def test_documented_properties() -> None:
    for owner, names in PROPERTIES.items():
        kind = getattr(trinity_mq, owner)
        assert [name for name in names.split() if not isinstance(getattr(kind, name, None), property)] == []


PAGE = Path(trinity_mq.__file__).parents[1] / "docs" / "renamed.md"


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_gives_the_new_module_and_warns(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(RENAMED[old])
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=f"{RENAMED[old]}; the old name goes with release"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is spec
    assert f"| `{old}` | `{RENAMED[old]}` |" in PAGE.read_text(encoding="utf-8")


def test_a_module_of_a_renamed_package_is_found_too_and_an_unknown_one_is_not() -> None:
    with pytest.warns(DeprecationWarning, match="is now trinity_mq.engines"):
        from trinity_mq.models.engines.api_errors import ApiError
    from trinity_mq.engines import api_errors

    assert ApiError is api_errors.ApiError
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trinity_mq.nothing")
    release = tuple(int(part) for part in VERSION.split(".")[:2])
    assert release < (0, 3), "delete trinity_mq/renamed.py, its calls of install and the tests of them"


@pytest.mark.timeout(240)
def test_old_names_of_classes_and_functions_give_the_new_ones() -> None:
    text = PAGE.read_text(encoding="utf-8")
    count = 0
    for home, words in NAMES.items():
        module = importlib.import_module(home)
        for old, new in (word.split("=") for word in words.split()):
            assert f"`{old.removeprefix('.')}` → `{new}`" in text or old == "wanted", (
                f"{home}: {old} is not on the page"
            )
            if old.startswith("."):
                owners = [cls for cls in vars(module).values() if isinstance(cls, type) and new in vars(cls)]
                assert any(vars(cls).get(old[1:]) is vars(cls)[new] for cls in owners), f"{home}: {old}"
            else:
                with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
                    assert getattr(module, old) is getattr(module, new)
            count += 1
    assert count > 300

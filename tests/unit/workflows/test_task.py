import copy
import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field
from structlog.testing import capture_logs

from trinity_mq.messages import TaskBody, TaskSubmission, decode, encode
from trinity_mq.rewards import UnknownNameError
from trinity_mq.rewards.text import char_match
from trinity_mq.runtime.plugins import add_plugins, resolve
from trinity_mq.workflows import (
    WORKFLOWS,
    AsyncSimpleWorkflow,
    FormatArgs,
    RolloutArgs,
    SimpleWorkflow,
    Task,
    TaskError,
    Workflow,
    load_workflow,
)
from trinity_mq.workflows.arguments import Arguments, arguments_of, check_arguments

BODY = TaskBody(
    workflow="async_simple_workflow",
    raw_task={"prompt": "1+1", "answer": "2"},
    repeat_times=4,
    format_args={"prompt_key": "prompt", "response_key": "answer", "system_prompt": None},
    rollout_args={"temperature": 0.5},
    workflow_args={"a": 1},
    reward_fn="char_match",
    reward_fn_args={},
    is_eval=True,
    index={"taskset": "t", "index": 3},
)


class Mine(Workflow):
    pass


def test_a_body_becomes_a_task_and_again_the_same_body():
    task = Task.from_body(BODY, "3/t", 7)
    assert task.workflow is AsyncSimpleWorkflow
    assert task.reward_fn is char_match
    assert (task.task_desc, task.truth) == ("1+1", "2")
    assert (task.batch_id, task.task_id, task.repeat_times, task.is_eval) == ("3/t", 7, 4, True)
    assert task.to_dict() == {"prompt": "1+1", "answer": "2"}
    assert task.to_body() == BODY
    assert decode(encode(TaskSubmission(task=task.to_body())), TaskSubmission).task == BODY
    assert Task.from_body(BODY.model_copy(update={"reward_fn": ""})).reward_fn is None, "the workflow chooses"


def test_a_task_made_by_hand_travels_under_its_dotted_path():
    body = Task(workflow=Mine, raw_task={"question": "q"}).to_body()
    assert body.workflow == f"{__name__}.Mine"
    assert Task.from_body(body).workflow is Mine


def test_what_no_other_process_can_import_is_refused():
    class Inner(Workflow):
        pass

    with pytest.raises(UnknownNameError, match="cannot be imported by another process"):
        Task(workflow=Inner).to_body()
    with pytest.raises(UnknownNameError, match="cannot be imported by another process"):
        Task(workflow=Mine, reward_fn=lambda response, truth, *, finished: {}).to_body()


class Reads(Workflow):
    """Asks as workflows of the reference system do."""

    def reset(self, task):
        self.task = task

    def run(self):
        args = self.task.rollout_args
        return self.model.chat([], n=args.n, temperature=args.temperature)


class Keeps(SimpleWorkflow):
    """Keeps what it is handed in attributes of its own."""

    def reset(self, task):
        super().reset(task)
        self.raw_task, self.task_desc, self.truth = task.raw_task, task.task_desc, f"{task.truth}!"
        self.format_args, self.reward_fn_args, self.rollout_args = task.format_args, {}, task.rollout_args
        self.system_prompt = "Be brief."


def asked(**keys):
    return Task(workflow=Reads, raw_task={"question": "q", "answer": 7, "more": [1]}, **keys)


def test_a_workflow_has_what_its_task_has(stub_model):
    workflow = Reads(task=asked(reward_fn_args={"a": 1}, workflow_args={"b": 2}), model=stub_model([]))
    assert (workflow.raw_task["more"], workflow.task_desc, workflow.truth) == ([1], "q", 7)
    assert workflow.format_args.prompt_key == "question"
    assert (workflow.reward_fn_args, workflow.workflow_args, workflow.is_eval) == ({"a": 1}, {"b": 2}, False)
    workflow.reset(Task(workflow=Reads, raw_task={"question": "another"}))
    assert (workflow.task_desc, workflow.truth) == ("another", None)
    with capture_logs() as logs:
        workflow.logger.info("begun")
    assert logs == [{"event": "begun", "log_level": "info"}]
    other = Keeps(task=asked(), model=stub_model([]))
    assert (other.truth, other.system_prompt, other.reward_fn_args) == ("7!", "Be brief.", {}), "it may replace them"
    assert other.format_messages()[0]["content"] == "Be brief."


def test_sampling_parameters_are_attributes_too(stub_model):
    model = stub_model(["a", "b"])
    model.sampling = {"temperature": 0.9, "top_p": 1.0}
    workflow = asked(rollout_args={"temperature": 0.5}).to_workflow(model)
    assert (workflow.rollout_args, workflow.rollout_args.top_p) == ({"temperature": 0.5, "n": 1}, 1.0)
    workflow.set_repeat_times(2, 4)
    assert len(workflow.run()) == 2
    assert model.calls[0][1] == {"n": 2, "temperature": 0.5}
    assert workflow.task.rollout_args == {"temperature": 0.5}, "n is passed on only where it is asked for"
    assert workflow.rollout_args == {"temperature": 0.5, "n": 2}
    workflow.task.rollout_args.n = 3
    assert copy.deepcopy(workflow.task).copy_for_run().rollout_args == {"temperature": 0.5, "n": 3}
    with pytest.raises(AttributeError, match="rollout_args has no 'temprature', only temperature, top_p"):
        _ = workflow.rollout_args.temprature


@dataclasses.dataclass
class TheirSampling:
    """Sampling parameters as another system keeps them."""

    temperature: float | None = None
    top_k: int = -1
    n: int = 1


def test_sampling_parameters_are_a_dataclass_and_a_dict(stub_model):
    model = stub_model([])
    model.sampling = {"temperature": 0.9, "top_p": 1.0, "max_tokens": 8}
    args = asked(rollout_args={"temperature": 0.5, "min_response_tokens": 2}).to_workflow(model).rollout_args
    fields = dataclasses.asdict(args)
    assert {name: value for name, value in fields.items() if value is not None} == {
        "temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_tokens": 8, "n": 1, "min_tokens": 2,
    }  # fmt: skip
    assert set(fields) >= {"logprobs", "stop", "ignore_eos"}
    assert dict(args) == {"temperature": 0.5, "min_tokens": 2, "n": 1}, "only what was set is passed on"
    assert dict(dataclasses.replace(args, temperature=0.7)) == {
        "temperature": 0.7, "top_p": 1.0, "max_tokens": 8, "min_tokens": 2,
    }  # fmt: skip
    args.temperature, args.stop = None, ["x"]
    assert (args.temperature, dict(args)) == (0.9, {"min_tokens": 2, "n": 1, "stop": ["x"]})
    assert RolloutArgs(temperature=0.1, n=1, top_k=-1) == {"temperature": 0.1}
    with pytest.raises(ValueError, match="min_tokens is 1 and min_response_tokens"):
        RolloutArgs({"min_tokens": 1, "min_response_tokens": 2})


def test_other_sampling_parameters_and_keys_may_be_assigned():
    task = asked(rollout_args=TheirSampling(temperature=0.3))
    assert dict(task.rollout_args) == {"temperature": 0.3}
    task.rollout_args = {"top_p": 0.5, "seed": None}
    assert (task.rollout_args.top_p, dict(task.rollout_args)) == (0.5, {"top_p": 0.5})
    task.rollout_args = RolloutArgs(n=4)
    assert task.to_body().rollout_args == {"n": 4}
    task.format_args = {"prompt_key": "more"}
    assert (task.task_desc, task.format_args) == ([1], FormatArgs(prompt_key="more"))
    task.format_args.reply_prefix = "So"
    other = task.copy_for_run()
    other.format_args.reply_prefix = "Well"
    assert (dataclasses.asdict(task.format_args)["reply_prefix"], task.format_args.messages_key) == ("So", "messages")
    assert task.to_body().format_args == {
        "prompt_key": "more", "response_key": "answer", "system_prompt": None, "reply_prefix": "So",
    }, "what released peers know, and what is set"  # fmt: skip
    assert Task.from_body(task.to_body()).format_args == task.format_args


@pytest.mark.parametrize(
    ("record", "prompt"),
    [({"sys": "Be brief."}, "Be brief."), ({"sys": ""}, "Ours."), ({"sys": None}, "Ours."), ({}, "Ours.")],
)
def test_a_record_may_have_its_own_system_prompt(record, prompt):
    body = BODY.model_copy(
        update={"raw_task": record, "format_args": {"system_prompt": "Ours.", "system_prompt_key": "sys"}}
    )
    task = Task.from_body(body)
    assert task.format_args.system_prompt == prompt
    assert Task.from_body(task.to_body()) == task


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_args": {"system_prompt_key": "prompt"}, "raw_task": {"prompt": ["x"]}}, "'prompt' holds a list"),
        ({"format_args": {"prompt_key": ["x"]}}, r"format_args\.prompt_key: Input should be a valid string"),
        ({"workflow": ""}, "names no workflow"),
        ({"workflow": "async_simple_workflw"}, "did you mean 'async_simple_workflow'"),
        ({"workflow": "trinity_mq.workflows.Task"}, "wanted a subclass"),
        ({"reward_fn": "exactmatch"}, "did you mean 'exact_match'"),
        ({"format_args": {"promt_key": "x"}}, r"format_args\.promt_key.*known keys: .*prompt_key"),
    ],
)
def test_bad_bodies_teach(change, said):
    with pytest.raises((TaskError, UnknownNameError), match=said):
        Task.from_body(BODY.model_copy(update=change))


# -- arguments that the record of a task from outside may give


class Play(Arguments):
    seed: int = 0
    env_args: dict[str, str] = Field(default_factory=dict)


def arguments(record_args):
    record = {"question": "x", "seed": 3, "env_args": {"path": "/"}}
    body = TaskBody(workflow="math_workflow", raw_task=record, record_args=record_args)
    return arguments_of(Task.from_body(body), Play, record_keys=["seed", "env_args"])


def test_a_task_from_outside_gives_the_arguments_that_are_open_and_another_task_all():
    assert arguments(None) == arguments(["seed", "env_args"]) == Play(seed=3, env_args={"path": "/"})
    with pytest.raises(TaskError, match=r"raw_task\.env_args .* outsiders\.record_args"):
        arguments(["seed"])
    task = Task.from_body(TaskBody(workflow="math_workflow", record_args=["seed"]))
    assert task.copy_for_run().to_body().record_args == ["seed"], "also on the way through a runner"


@pytest.mark.parametrize("env_args", [{"API_KEY": ["s3cr3t"]}, f"{'x' * 60} API_KEY=s3cr3t-s3cr3t"])
def test_a_wrong_argument_shows_no_secret(env_args):
    with pytest.raises(TaskError, match=r"env_args.* is .*\*\*\*.*: Input should be") as caught:
        check_arguments({"env_args": env_args}, Play)
    assert "s3c" not in str(caught.value)


# -- from names to workflows: built-in, from installed packages, by dotted path, from a plug-in folder


ECHO = """
from trinity_mq.workflows import Workflow

class EchoWorkflow(Workflow):
    is_async = True

class Unlike:
    pass
"""


ENVIRONMENTS = (
    "RAFT_alfworld RAFT_reflect_alfworld agentscope_react_math agentscope_react agentscope_v1_react_search alfworld "
    "as_react cod_grid_navigation email_search frozen_lake intercode_sql sciworld step_wise_alfworld textworld webshop"
)
ADAPTERS = {"agentscope_workflow_adapter", "agentscope_workflow_adapter_v1"}
ASYNCHRONOUS = (
    {
        "on_policy_distill_math_workflow",
        "on_policy_distill_workflow",
        "program_workflow",
        "recorded_sessions",
        "tool_call_workflow",
        "toolcall_workflow",
        "verifiers_workflow",
    }
    | {f"{name}_workflow" for name in ENVIRONMENTS.split()}
    | ADAPTERS
)
"""Workflows that have one form: they wait for programs, make experiences of what is there, or are those of Trinity-RFT.
"""


NAMES_OF_USERS = (
    "boxed_answer distill frozen_lake_game gymnasium math math_answer math_answer_ruler math_benchmark math_boxed "
    "math_distill math_eval math_rm math_ruler math_trainable_ruler on_policy_distill on_policy_distill_math program "
    "reward_model rubric rubric_judge rubric_judge_openai ruler self_ruler simple sudoku sudoku_game tool_agent "
    f"thinking_budget tool_call tool_choice toolcall verifiers {ENVIRONMENTS}"
)


def test_the_names_that_users_write_exist():
    twins = [name for name in WORKFLOWS if name.startswith("async_")]
    names = {f"{name}_workflow" for name in NAMES_OF_USERS.split()} | {"recorded_sessions"} | ADAPTERS
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
        ("zzzzzz", "known: .*async_"),
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
    for near in ("EchoWorkflow", "echo.EchoWorkflow", "plugged_eco.EchoWorkflow", "echo_workflow"):
        with pytest.raises(UnknownNameError, match=r"\(in plugin_dirs there is 'plugged_echo\.EchoWorkflow'\)$"):
            load_workflow(near)


def test_a_plug_in_that_cannot_be_imported_says_why(plugin_folder):
    (plugin_folder / "plugged_bad.py").write_text("import json\n1 / 0\nclass Mine: ...\n")
    add_plugins([str(plugin_folder)])
    with pytest.raises(UnknownNameError, match="ZeroDivisionError: division by zero"):
        load_workflow("plugged_bad.Mine")


def test_a_built_in_whose_package_is_missing_says_so():
    with pytest.raises(UnknownNameError, match="'needs_more' needs a package that is not installed: No module named"):
        resolve("workflow", "needs_more", {"needs_more": "no_such_package.module:Workflow"})

"""The allow list: what a task from outside may name and set."""

import sys
from typing import Any

import pytest

from trinity_mq.config import Config
from trinity_mq.messages import SessionReplay, TaskBody
from trinity_mq.rewards.outsiders import NotAllowed, replay_refusal, restrict_task

PROGRAM = {"command": ["solve", "--fast"], "cwd": "/srv"}
GYM = {"env": "module:Id-v0", "env_args": {"size": 3}}


def config(**outsiders: Any) -> Config:
    training = {
        "name": "a",
        "storage_type": "synthetic",
        "path": "max3",
        "workflow": "program_workflow",
        "workflow_args": PROGRAM,
        "reward_fn": "math_dapo",
        "reward_fn_args": {"max_response_length": 9},
        "rollout_args": {"temperature": 0.5},
        "format": {"system_prompt": "Be brief."},
    }
    evaluation = {"name": "b", "storage_type": "synthetic", "path": "max3", "workflow": "gymnasium_workflow"}
    buffer = {
        "taskset": training,
        "eval_tasksets": [{**evaluation, "workflow_args": GYM, "reward_fn": "char_match"}],
        "total_steps": 1,
    }
    return Config.model_validate({"name": "t", "model": {"tiny": {}}, "buffer": buffer, "outsiders": outsiders})


def test_what_a_task_leaves_out_comes_from_the_taskset() -> None:
    task = restrict_task(config(), TaskBody(raw_task={"question": "x"}))
    assert (task.workflow, task.workflow_args) == ("program_workflow", PROGRAM)
    assert (task.reward_fn, task.reward_fn_args) == ("math_dapo", {"max_response_length": 9})
    assert (task.rollout_args, task.format_args["system_prompt"]) == ({"temperature": 0.5}, "Be brief.")
    assert task.raw_task == {"question": "x"}


def test_a_workflow_has_the_arguments_of_its_own_taskset() -> None:
    task = restrict_task(config(), TaskBody(workflow="gymnasium_workflow"))
    assert (task.workflow_args, task.reward_fn) == (GYM, "char_match")
    task = restrict_task(config(), TaskBody(workflow="gymnasium_workflow", reward_fn="math_dapo"))
    assert task.reward_fn_args == {"max_response_length": 9}


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"workflow": "verifiers_workflow"}, "outsiders.workflows"),
        ({"workflow": "recorded_sessions"}, "outsiders.workflows"),
        ({"workflow": "subprocess.Popen"}, "outsiders.workflows"),
        ({"workflow_args": {"command": ["sh"]}}, "outsiders.workflows"),
        ({"workflow_args": {**PROGRAM, "env": {"LD_PRELOAD": "x"}}}, "outsiders.workflows"),
        ({"workflow": "gymnasium_workflow", "workflow_args": {"env": "os:x"}}, "outsiders.workflows"),
        ({"workflow": "gymnasium_workflow", "workflow_args": {"keep": True}}, "outsiders.workflows"),
        ({"reward_fn": "os.system"}, "outsiders.rewards"),
        ({"reward_fn": "math_equal_format"}, "outsiders.rewards"),
        ({"reward_fn_args": {"args": "touch x", "shell": True}}, "outsiders.rewards"),
        ({"rollout_args": {"model": "judge"}}, "outsiders.rollout_args"),
        ({"rollout_args": {"temperature": 2.0}}, "outsiders.rollout_args"),
        ({"format_args": {"system_prompt": "Obey."}}, "outsiders.format_args"),
        ({"repeat_times": 4097}, "outsiders.max_runs"),
    ],
)
def test_what_is_not_open_is_refused_with_the_setting_that_opens_it(fields: dict[str, Any], setting: str) -> None:
    with pytest.raises(NotAllowed, match=setting):
        restrict_task(config(), TaskBody(**fields))


def test_nothing_is_imported_for_the_answer() -> None:
    assert "this" not in sys.modules, "this test needs a module that nothing else imports"
    for fields in ({"workflow": "this.s"}, {"reward_fn": "this.s"}):
        with pytest.raises(NotAllowed):
            restrict_task(config(), TaskBody(**fields))
    assert "this" not in sys.modules


def test_equal_arguments_are_no_change() -> None:
    own = restrict_task(config(), TaskBody())
    assert restrict_task(config(), own) == own


def test_the_record_of_a_task_from_outside_chooses_among_the_allowed_names() -> None:
    whole = config().model_dump()
    whole["buffer"]["taskset"] |= {"allowed_workflows": ["simple_workflow"], "allowed_reward_fns": ["char_match"]}
    whole["buffer"]["taskset"]["format"] |= {"workflow_key": "wf", "reward_fn_key": "rf"}
    chosen = Config.model_validate(whole)
    task = restrict_task(chosen, TaskBody(raw_task={"wf": "simple_workflow", "rf": "char_match"}))
    assert (task.workflow, task.reward_fn, task.workflow_args) == ("simple_workflow", "char_match", PROGRAM)
    assert restrict_task(chosen, task) == task
    for name, value in (("wf", "verifiers_workflow"), ("wf", "os.system"), ("rf", "math_reward"), ("rf", ["x"])):
        with pytest.raises(NotAllowed, match="raw_task: "):
            restrict_task(chosen, TaskBody(raw_task={name: value}))
    with pytest.raises(NotAllowed, match=r"outsiders\.workflows"):
        restrict_task(chosen, TaskBody(workflow="simple_workflow", raw_task={}))
    with pytest.raises(NotAllowed, match=r"outsiders\.format_args"):
        restrict_task(config(), TaskBody(raw_task={"wf": "simple_workflow"}, format_args={"workflow_key": "wf"}))


def test_an_open_key_may_be_set_and_no_other() -> None:
    opened = config(
        workflows={"program_workflow": ["cwd"], "my.Workflow": ["turns"]},
        rewards={"math_equal_format": ["tolerance"]},
        rollout_args=["temperature"],
        format_args=["system_prompt"],
        record_args=["seed"],
        max_runs=2,
    )
    task = restrict_task(opened, TaskBody(workflow_args={"cwd": "/tmp"}, rollout_args={"temperature": 1.0}))
    assert task.workflow_args == {**PROGRAM, "cwd": "/tmp"}
    assert task.rollout_args == {"temperature": 1.0}
    task = restrict_task(opened, TaskBody(reward_fn="math_equal_format", reward_fn_args={"tolerance": 1}))
    assert (task.reward_fn, task.reward_fn_args) == ("math_equal_format", {"tolerance": 1})
    task = restrict_task(opened, TaskBody(workflow="my.Workflow", workflow_args={"turns": 2}, repeat_times=2))
    assert (task.workflow, task.workflow_args) == ("my.Workflow", {"turns": 2}), "and none of another workflow"
    for fields in (
        {"workflow_args": {"command": ["sh"]}},
        {"reward_fn": "math_equal_format", "reward_fn_args": {"other": 1}},
        {"workflow": "my.Workflow", "workflow_args": {"cwd": "/tmp"}},
        {"rollout_args": {"n": 9}},
        {"repeat_times": 3},
    ):
        with pytest.raises(NotAllowed):
            restrict_task(opened, TaskBody(**fields))


def test_a_task_from_outside_opens_nothing_for_itself() -> None:
    claimed = TaskBody(record_args=["env_args"], index={"taskset": "a", "index": 0})
    task = restrict_task(config(record_args=["seed"]), claimed)
    assert (task.record_args, task.index) == (["seed"], {})


def test_text_of_a_stranger_is_spelled_out_in_the_reason() -> None:
    for fields in ({"workflow": "\x1b]0;x\x07" * 99}, {"workflow_args": {"\x1b[2J" * 99: 1}}):
        with pytest.raises(NotAllowed) as refused:
            restrict_task(config(), TaskBody(**fields))
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 500


def test_a_replay_is_a_task_from_outside() -> None:
    assert replay_refusal(config(), SessionReplay(workflow="gymnasium_workflow", runs=2)) is None
    refusal = replay_refusal(config(max_runs=8), SessionReplay(workflow="gymnasium_workflow", runs=9))
    assert refusal is not None
    assert "outsiders.max_runs" in refusal

"""Environments of the real Gymnasium as workflows."""

import asyncio
import sys
import threading

import gymnasium
import pytest
from gymnasium import spaces

from tests.unit.workflows import text_environments
from tests.unit.workflows.text_environments import CREATED
from tests.waiting import until
from trinity_mq.runtime.threads import in_thread
from trinity_mq.workflows import Task, TaskError, check_arguments, execute
from trinity_mq.workflows.environments import (
    AsyncGymnasiumWorkflow,
    Environment,
    EnvironmentFailedError,
    GymnasiumArguments,
    GymnasiumWorkflow,
)
from trinity_mq.workflows.environments.workflow import (
    DiscreteActions,
    IllegalActionError,
    TextActions,
    check_observations,
    observation_text,
)

BOTH = pytest.mark.parametrize("kind", [GymnasiumWorkflow, AsyncGymnasiumWorkflow])
HERE = "tests.unit.workflows.text_environments"
COUNTING = f"{HERE}.Counting"
MAP = ["SFF", "FHF", "HFG"]
LAKE = {
    "env": "FrozenLake-v1",
    "env_args": {"desc": MAP, "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


@pytest.fixture(autouse=True)
def created():
    CREATED.clear()
    yield CREATED
    CREATED.clear()


async def run(kind, stub_model, *answers, raw_task=None, index=0, **args):
    model = stub_model(answers, enable_history=True)
    place = {"taskset": "t", "index": index}
    made = Task(workflow=kind, raw_task=raw_task or {}, workflow_args=args, index=place)
    return await execute(lambda: made.to_workflow(model), kind), model


def shown(model, call):
    return model.calls[call][0][-1]["content"]


@BOTH
async def test_a_lake_of_gymnasium_is_walked_by_names_and_numbers(kind, stub_model):
    answers = ["I go <action>right</action>", "2", "<action>DOWN</action>", "<action> 1 </action>", "never"]
    experiences, model = await run(kind, stub_model, *answers, **LAKE)
    assert {exp.reward for exp in experiences} == {1.0}
    assert len(experiences) == 4
    assert experiences[0].metrics == {
        "steps": 4.0,
        "illegal_actions": 0.0,
        "ended": 1.0,
        "prompt_too_long": 0.0,
        "actual_env_steps": 4,
        "ended_truncated": 0.0,
    }
    assert [shown(model, call) for call in range(4)] == ["0", "1", "2", "5"]
    system = model.calls[0][0][0]
    assert system["role"] == "system"
    assert "such as <action>left</action>" in system["content"]
    assert "The actions are left, down, right, up." in system["content"]


@BOTH
@pytest.mark.parametrize(("reward", "worth"), [("sum", 0.5 - 0.25 - 0.25), ("last", -0.25)])
async def test_texts_are_seen_and_written(kind, reward, worth, stub_model, created):
    first = text_environments.Counting()
    number, _ = first.reset(seed=4)
    answers = [f"<action>{number[-1]}</action>", "77", "77"]
    args = {"env": f"{HERE}:Counting-v0", "instructions": "Count.", "reward": reward}
    experiences, model = await run(kind, stub_model, *answers, index=4, **args)
    environment = created[1]
    assert environment.actions == [number[-1], "77", "77"]
    assert shown(model, 0) == number
    assert {exp.reward for exp in experiences} == {worth}
    assert experiences[0].metrics["success"] == 0.0, "that of the last step"
    system = model.calls[0][0][0]["content"]
    assert system.startswith("Count.\n\n")
    assert "An action is a text of 1 to 2 characters out of 0123456789." in system
    assert environment.closed == 1
    assert kind is GymnasiumWorkflow or threading.current_thread().name not in environment.threads


@BOTH
async def test_an_answer_that_is_no_action_is_told_and_costs_a_step(kind, stub_model, created):
    experiences, model = await run(kind, stub_model, "walk on", "__import__('os')", "", "7", env=COUNTING, max_steps=4)
    assert created[0].actions == ["7"]
    assert experiences[0].metrics["illegal_actions"] == 3.0
    assert experiences[0].metrics["steps"] == 1.0
    assert experiences[0].metrics["ended"] == 0.0
    comment, _, observation = shown(model, 1).partition("\n\n")
    assert comment == "'walk on' is no action. An action is a text of 1 to 2 characters out of 0123456789."
    assert observation == shown(model, 0), "what is there is shown again"
    assert "is no action" in shown(model, 3)


@BOTH
async def test_runs_of_a_task_have_the_same_episode_and_tasks_differ(kind, stub_model):
    first = [
        shown((await run(kind, stub_model, "1", env=COUNTING, max_steps=1, index=index, raw_task=record))[1], 0)
        for index, record in ((3, {}), (3, {}), (4, {}), (3, {"seed": 4}))
    ]
    assert first[0] == first[1] != first[2] == first[3]


@BOTH
async def test_the_record_gives_arguments_and_chooses_no_environment(kind, stub_model, created):
    record = {"env": f"{HERE}.no_environment", "env_args": {"reports": False}, "max_steps": 1, "reward": "x"}
    experiences, _ = await run(kind, stub_model, "1", env=COUNTING, raw_task=record)
    assert len(experiences) == 1
    assert not created[0].reports
    assert "success" not in experiences[0].metrics, "the environment says nothing about it"


@BOTH
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("make", "failed while it was made: RuntimeError: no memory"),
        ("reset", r"failed in reset\(\): ValueError: it cannot be reset"),
        ("step", r"failed in step\(\): KeyError: 'broken door'"),
        ("reward", r"failed in step\(\): TypeError"),
        ("observation", "gave the observation b'bytes', which is not of its space"),
    ],
)
async def test_a_fault_of_the_environment_fails_the_run_and_names_it(kind, fails, said, stub_model, created):
    with pytest.raises(EnvironmentFailedError, match=rf"environment '{HERE}.Counting' {said}"):
        await run(kind, stub_model, "1", "1", env=COUNTING, env_args={"fails": fails})
    assert [one.closed for one in created] == ([] if fails == "make" else [1])


@BOTH
async def test_an_environment_that_cannot_be_closed_costs_nothing(kind, stub_model, created):
    experiences, _ = await run(kind, stub_model, "1", env=COUNTING, max_steps=1, env_args={"fails": "close"})
    assert len(experiences) == 1
    assert created[0].closed == 1


@BOTH
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"env": "FrozenLak-v1"}, r"'FrozenLak-v1' cannot be made with env_args \{\}: NameNotFound: .*FrozenLake"),
        ({"env": "nowhere:Counting-v0"}, "cannot be made .*nowhere"),
        ({"env": f"{HERE}.Countin"}, "did you mean 'Counting'|Countin"),
        (
            {"env": COUNTING, "env_args": {"speed": 3}},
            "cannot be made with env_args .*speed.*callable that takes env_args",
        ),
        ({"env": f"{HERE}.no_environment"}, "made a object, wanted a gymnasium.Env"),
        ({"env": f"{HERE}.Boxes"}, "has actions Box.*put it into a gymnasium.ActionWrapper"),
        ({"env": f"{HERE}.SeesBoxes"}, "has observations Box.*put it into a gymnasium.ObservationWrapper"),
        ({"env": COUNTING, "actions": ["a"]}, "names a, and actions of '.*' are texts"),
        ({**LAKE, "actions": ["left", "right"]}, r"names 2 actions \(left, right\), and the environment has 4"),
        ({**LAKE, "actions": ["l", "d", "r", "L"]}, "has a name twice"),
        ({}, "workflow_args.env is missing"),
        ({"env": COUNTING, "reward": "mean"}, "workflow_args.reward is 'mean'"),
        ({"env": COUNTING, "partial_credit": 1}, "workflow_args.partial_credit does not exist"),
    ],
)
async def test_environments_that_cannot_be_are_the_tasks_fault(kind, args, said, stub_model, created):
    with pytest.raises(TaskError, match=said):
        await run(kind, stub_model, "1", **args)
    assert all(one.closed == 1 for one in created)


async def test_a_cancelled_run_closes_its_environment_when_the_step_returns(stub_model, created):
    model = stub_model(["1"], enable_history=True)
    made = Task(workflow=AsyncGymnasiumWorkflow, workflow_args={"env": COUNTING, "env_args": {"fails": "hang"}})
    running_task = asyncio.create_task(execute(lambda: made.to_workflow(model), AsyncGymnasiumWorkflow))
    await until(lambda: bool(created))
    environment = created[0]
    await in_thread(environment.entered.wait, "waits")
    running_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running_task
    assert environment.closed == 0, "its thread is in a step"
    environment.may_go_on.set()
    await until(lambda: environment.closed > 0)
    assert environment.closed == 1


async def test_cancelled_while_the_model_is_asked_it_is_closed_at_once(created):
    asked = asyncio.Event()

    class Silent:
        enable_history = True

        async def chat_async(self, messages, **keys):
            asked.set()
            await asyncio.Event().wait()

    made = Task(workflow=AsyncGymnasiumWorkflow, workflow_args={"env": COUNTING})
    running_task = asyncio.create_task(execute(lambda: made.to_workflow(Silent()), AsyncGymnasiumWorkflow))
    await asked.wait()
    running_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running_task
    assert created[0].closed == 1


def test_closed_twice_it_is_closed_once_and_used_no_more(created):
    environment = Environment(COUNTING, {})
    environment.close()
    with pytest.raises(EnvironmentFailedError, match="is closed already"):
        environment.reset(0)
    environment = Environment(COUNTING, {})
    environment.reset(0)
    environment.close()
    environment.close()
    assert [one.closed for one in created] == [1]


@BOTH
def test_arguments_are_checked_before_a_run_starts(kind, monkeypatch):
    check_arguments({"env": "FrozenLake-v1"}, kind.arguments_kind)
    with pytest.raises(TaskError, match=r"workflow_args\.env_arg does not exist; did you mean 'env_args'"):
        check_arguments({"env": "FrozenLake-v1", "env_arg": {}}, kind.arguments_kind)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(TaskError, match=r"pip install 'trinity-mq\[gymnasium\]'"):
        check_arguments({"env": "FrozenLake-v1"}, GymnasiumArguments)


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("left", 5),
        ("I turn <action>right</action>, no: <action> Left </action>", 5),
        ("</action><action>right", None),
        (" 6. ", 6),
        ("<action>6</action>", 6),
        ("7", None),
        ("-1", None),
        ("0", None),
        ("6 and more", None),
        ("\u0666", None),
        ("9" * 5000, None),
        ("<action>" * 5000, None),
        ("", None),
        ("int(6)", None),
    ],
)
def test_discrete_actions_are_read(answer, action):
    actions = DiscreteActions(spaces.Discrete(2, start=5), ["left", "RIGHT"])
    if action is not None:
        assert actions.read(answer) == action
        return
    with pytest.raises(IllegalActionError, match=r"is no action\. The actions are left, RIGHT\."):
        actions.read(answer)


def test_discrete_actions_without_names_are_numbers_and_names_come_before_numbers():
    actions = DiscreteActions(spaces.Discrete(3), [])
    assert (actions.read("2"), actions.example, actions.form) == (2, "0", "The actions are the numbers from 0 to 2")
    assert DiscreteActions(spaces.Discrete(2), ["1", "0"]).read("1") == 0


def test_a_text_is_an_action_as_a_whole():
    actions = TextActions(spaces.Text(5, min_length=2))
    assert actions.read("go on <action> stop </action>") == "stop"
    for answer in ("s", "stopping", "st op", "<action></action>"):
        with pytest.raises(IllegalActionError):
            actions.read(answer)


def test_observations_of_several_parts():
    environment = text_environments.Mixed()
    check_observations(environment.observation_space, "Mixed")
    observation, _ = environment.reset(seed=0)
    assert observation_text(observation) == "place: 1 2\ncard: 7, 0 1\nsaid: hello"
    blackjack = gymnasium.make("Blackjack-v1")
    assert [int(part) for part in observation_text(blackjack.reset(seed=1)[0]).split(", ")]
    blackjack.close()

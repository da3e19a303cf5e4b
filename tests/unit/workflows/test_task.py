import copy

import pytest
from pydantic import Field
from structlog.testing import capture_logs

from trinity_mq.messages import TaskBody, TaskSubmission, decode, encode
from trinity_mq.rewards import UnknownNameError
from trinity_mq.rewards.text import char_match
from trinity_mq.workflows import (
    AsyncSimpleWorkflow,
    SimpleWorkflow,
    Task,
    TaskError,
    Workflow,
)
from trinity_mq.workflows.arguments import Arguments, arguments_of

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


def test_a_workflow_may_replace_what_its_task_has(stub_model):
    workflow = Keeps(task=asked(), model=stub_model([]))
    assert (workflow.truth, workflow.system_prompt, workflow.reward_fn_args) == ("7!", "Be brief.", {})
    assert workflow.format_messages()[0]["content"] == "Be brief."


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
    with pytest.raises(AttributeError, match="rollout_args has no 'temprature', only n, temperature, top_p"):
        _ = workflow.rollout_args.temprature


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workflow": ""}, "names no workflow"),
        ({"workflow": "async_simple_workflw"}, "did you mean 'async_simple_workflow'"),
        ({"workflow": "trinity_mq.workflows.Task"}, "wanted a subclass"),
        ({"reward_fn": "exactmatch"}, "did you mean 'exact_match'"),
        ({"format_args": {"promt_key": "x"}}, r"format_args\.promt_key.*known keys: prompt_key"),
    ],
)
def test_bad_bodies_teach(change, said):
    with pytest.raises((TaskError, UnknownNameError), match=said):
        Task.from_body(BODY.model_copy(update=change))


def test_an_empty_reward_function_leaves_it_to_the_workflow():
    assert Task.from_body(BODY.model_copy(update={"reward_fn": ""})).reward_fn is None


# -- arguments that the record of a task from outside may give


class Play(Arguments):
    seed: int = 0
    env_args: dict[str, str] = Field(default_factory=dict)


def arguments(record_args):
    record = {"question": "x", "seed": 3, "env_args": {"path": "/"}}
    body = TaskBody(workflow="math_workflow", raw_task=record, record_args=record_args)
    return arguments_of(Task.from_body(body), Play, record_keys=["seed", "env_args"])


def test_a_task_of_the_taskset_gives_all():
    assert arguments(None) == Play(seed=3, env_args={"path": "/"})


def test_a_task_from_outside_gives_those_that_are_open():
    with pytest.raises(TaskError, match=r"raw_task\.env_args .* outsiders\.record_args"):
        arguments(["seed"])
    assert arguments(["seed", "env_args"]).seed == 3


def test_it_stays_so_on_the_way_through_a_runner():
    task = Task.from_body(TaskBody(workflow="math_workflow", record_args=["seed"]))
    assert task.copy_for_run().to_body().record_args == ["seed"]

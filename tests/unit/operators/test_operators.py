import asyncio
import inspect
import math
import random
import sys
import threading

import numpy as np
import pytest
import torch

from trinity_mq.config import AlgorithmConfig, OperatorConfig
from trinity_mq.experience import EID, CustomField, Experience, ExperienceBatch, encode
from trinity_mq.operators import (
    AdvantageOperator,
    ExperienceOperator,
    ExperienceOperatorV1,
    OperatorConfigError,
    OperatorError,
    ThreadedOperator,
    create_operators,
    run_chain,
)
from trinity_mq.rewards import UnknownNameError
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.threads import stuck_threads
from trinity_mq.testing.virtual_time import run_virtually

THIS = __name__


def exp(task=0, run=0, step=0, reward=1.0, **keys):
    eid = EID(batch=1, task=task, run=run, step=step)
    return Experience(eid=eid, tokens=[1, 2, 3, 4], prompt_length=2, logprobs=[-1.0, -2.0], reward=reward, **keys)


async def chain(name, exps, **args):
    kept, metrics = await run_chain(create_operators([OperatorConfig(name=name, args=args)]), exps)
    return list(kept), metrics


class Acting(ExperienceOperatorV1):
    """Does what a test says."""

    asked = False

    def __init__(self, act=lambda exps: (exps, {})):
        self.act = act

    async def prepare(self):
        self.prepared = True

    async def process(self, exps):
        self.asked = True
        done = self.act(exps)
        return await done if inspect.isawaitable(done) else done


async def test_filters_keep_what_reaches_the_threshold_and_what_is_valid():
    rewards = (0.4, 0.5, None, math.nan, -math.inf)
    exps = [exp(run=run, reward=reward) for run, reward in enumerate(rewards)]
    kept, metrics = await chain("reward_filter", exps, threshold=0.5)
    assert [each.eid.run for each in kept] == [1]
    assert metrics["experience_pipeline/0_RewardFilter/filtered_count"] == 4
    assert metrics["experience_pipeline/experience_count"] == 1
    assert metrics["time/operator/0_RewardFilter"] >= 0
    kept, metrics = await chain("invalid_reward_filter", exps)
    assert [each.eid.run for each in kept] == [0, 1]
    assert metrics["experience_pipeline/0_InvalidRewardFilter/filtered_count"] == 3
    last = Acting()
    kept, metrics = await run_chain(
        [*create_operators([OperatorConfig(name="reward_filter", args={"threshold": 9})]), last], exps
    )
    assert (len(kept), last.asked, metrics["experience_pipeline/experience_count"]) == (0, False, 0), "the chain ends"


async def test_reward_std_filter_looks_at_runs_not_at_steps():
    even = [exp(task=0, run=run, step=step, reward=float(step)) for run in range(2) for step in range(2)]
    differing = [exp(task=1, run=0, reward=0.0), exp(task=1, run=1, reward=1.0)]
    alone = [exp(task=2, run=0, reward=1.0)]
    equal = [exp(task=3, run=run, reward=0.1) for run in range(3)]
    kept, metrics = await chain("reward_std_filter", even + differing + alone + equal)
    assert kept == differing
    assert metrics["experience_pipeline/0_RewardStdFilter/operator_filtered_count"] == 8
    assert metrics["origin_group_advantages/reward_std/max"] == 0.5
    assert metrics["origin_group_advantages/reward_mean/min"] == pytest.approx(0.1)
    assert (await chain("reward_std_filter", differing, threshold=0.5))[0] == []


async def test_mask_response_truncated():
    view = torch.ones(2, dtype=torch.bool)
    exps = [exp(run=0, truncate_status="response_truncated", action_mask=view), exp(run=1)]
    kept, metrics = await chain("mask_response_truncated", exps)
    assert [each.action_mask.tolist() for each in kept] == [[False, False], [True, True]]
    assert view.all()
    assert metrics["experience_pipeline/0_MaskResponseTruncated/masked_truncated_count"] == 1


async def test_advantages_come_last_and_what_they_need_is_looked_for():
    config = AlgorithmConfig(repeat_times=2, std_level="none")
    operators = [*create_operators([OperatorConfig(name="invalid_reward_filter")]), AdvantageOperator(config)]
    exps = [exp(run=0, reward=0.0), exp(run=1, reward=1.0), exp(task=1, run=0), exp(task=1, run=1, reward=None)]
    kept, metrics = await run_chain(operators, exps)
    assert [each.advantages.tolist() for each in kept] == [[-0.5, -0.5], [0.5, 0.5]]
    assert metrics["rollout/partial_groups"] == 1
    assert "time/operator/1_AdvantageOperator" in metrics

    weight = CustomField("weight", "loss_weight", torch.float32)
    exps = [exp(run=run, reward=float(run), custom_fields=[weight], info={"weight": 1}) for run in range(2)]
    assert len((await run_chain([AdvantageOperator(config)], exps))[0]) == 2
    del exps[1].info["weight"]
    with pytest.raises(OperatorError, match=r"0_AdvantageOperator: .*has no info\['weight'\]"):
        await run_chain([AdvantageOperator(config)], exps)

    roles = [AdvantageOperator(AlgorithmConfig(algorithm_type="rae"))]
    exps = [exp(run=run, reward=float(run), info={"role": "player"}) for run in range(2)]
    kept, _ = await run_chain(roles, exps)
    assert [each.advantages for each in kept] == [None, None], "the trainer computes them"
    del exps[1].info["role"]
    with pytest.raises(OperatorError, match=rf"experience {exps[1].eid.uid} has info\['role'\] None, wanted the name"):
        await run_chain(roles, exps)


def doubled(rewards, *, factor=2.0):
    return [factor * reward for reward in rewards]


async def test_a_function_of_ones_own_is_checked_before_the_first_batch():
    given = {"kind": f"{THIS}.doubled", "args": {"factor": 3.0}}
    operator = AdvantageOperator(AlgorithmConfig(repeat_times=2, estimator=given))
    kept, _ = await run_chain([operator], [exp(run=run, reward=float(run)) for run in range(2)])
    assert [each.advantages.tolist() for each in kept] == [[0.0, 0.0], [3.0, 3.0]]
    with pytest.raises(FatalError, match=r"cannot be called with rewards and args .*facto.*it is doubled\(rewards"):
        AdvantageOperator(AlgorithmConfig(repeat_times=2, estimator=given | {"args": {"facto": 1.0}}))
    with pytest.raises(UnknownNameError, match="did you mean 'doubled'"):
        AdvantageOperator(AlgorithmConfig(repeat_times=2, estimator={"kind": f"{THIS}.doubld"}))


async def test_an_operator_gets_columns_or_objects_as_it_wants():
    exps = [exp(run=run, reward=float(run)) for run in range(4)]
    filters = create_operators([OperatorConfig(name="reward_filter", args={"threshold": low}) for low in (1.0, 2.0)])
    left, metrics = await run_chain(
        [*filters, AdvantageOperator(AlgorithmConfig(min_group_runs=2))], ExperienceBatch.of(exps)
    )
    assert isinstance(left, ExperienceBatch)
    assert [each.eid.run for each in left] == [2, 3]
    assert left.dense("advantages").shape == (4,)
    assert metrics["experience_pipeline/1_RewardFilter/filtered_count"] == 1
    recording = Acting()
    again, _ = await run_chain([filters[0], recording, filters[1]], ExperienceBatch.of(exps))
    assert recording.asked
    assert isinstance(again, ExperienceBatch)
    assert [each.eid.run for each in again] == [2, 3]


async def test_an_operator_that_writes_in_place_does_not_reach_the_received_body():
    def write(exps):
        for each in exps:
            each.action_mask[:] = False
            each.logprobs.zero_()
        return exps, {}

    body = encode([exp()])
    received = bytes(bytearray(body))
    left, _ = await run_chain([Acting(write)], ExperienceBatch.decode(received))
    assert not left[0].action_mask.any()
    assert left[0].logprobs.tolist() == [0.0, 0.0]
    assert received == body


def fail(exps):
    raise ArithmeticError("two and two")


async def test_a_failing_operator_is_named_with_its_place_and_the_line_of_its_file():
    line = inspect.getsourcelines(fail)[1] + 1
    said = rf"^operator 1_Acting: ArithmeticError: two and two \(tests/unit/operators/test_operators.py:{line}\)$"
    with pytest.raises(OperatorError, match=said) as caught:
        await run_chain([Acting(), Acting(fail)], [exp()])
    assert caught.value.operator == "1_Acting"


async def forever(exps=None):
    await asyncio.Event().wait()


def test_the_limit_is_that_of_the_chain_and_who_was_at_work_is_named():
    async def slow(exps):
        await asyncio.sleep(40)
        return exps, {}

    said = r"operator 2_Acting: .* not done within 100 s \(operator.timeout\)"
    with pytest.raises(OperatorError, match=said) as caught:
        run_virtually(run_chain([Acting(slow), Acting(slow), Acting(slow)], [exp()], timeout=100))
    assert caught.value.operator == "2_Acting"


async def own_timeout(exps):
    async with asyncio.timeout(0):
        await forever()


async def grouping(exps):
    async with asyncio.TaskGroup() as group:
        group.create_task(Acting(fail).process(exps))


def cancel_itself(exps):
    raise asyncio.CancelledError


class Threaded(ThreadedOperator):
    def __init__(self, error):
        self.error = error

    def apply(self, exps):
        raise self.error


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (Acting(own_timeout), "0_Acting: TimeoutError"),
        (Acting(lambda exps: sys.exit(3)), "0_Acting: SystemExit: 3"),
        (Acting(grouping), "0_Acting: ArithmeticError: two and two"),
        (Acting(cancel_itself), "0_Acting: cancelled itself"),
        (Acting(lambda exps: exps), "wanted a list of experiences and a dict of metrics"),
        (Threaded(SystemExit(3)), "0_Threaded: SystemExit: 3"),
        (Threaded(StopIteration()), "0_Threaded: .*StopIteration"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_whatever_an_operator_does_is_its_failure(operator, said):
    with pytest.raises(OperatorError, match=said):
        await run_chain([operator], [exp()], timeout=30)


async def test_a_chain_that_is_cancelled_is_cancelled():
    task = asyncio.create_task(run_chain([Acting(forever)], [exp()], timeout=30))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_auxiliary_models_are_handed_over_and_numbers_of_other_libraries_are_metrics():
    (operator,) = create_operators([OperatorConfig(name=f"{THIS}.Acting")], {"judge": []})
    await operator.prepare()
    assert operator.prepared
    numbers = {"narrow": np.float32(0.5), "whole": np.int64(3), "tensor": torch.ones(1), "none": None}
    operator.act = lambda exps: (exps[1:], {"models": len(operator.auxiliary_models), **numbers})
    kept, metrics = await run_chain([operator], [exp(run=0), exp(run=1)])
    assert [each.eid.run for each in kept] == [1]
    measured = {key.rpartition("/")[2]: value for key, value in metrics.items() if "/0_" in key and "time" not in key}
    assert measured == {"models": 1.0, "narrow": 0.5, "whole": 3.0}
    assert {type(value) for value in metrics.values()} == {float}
    operator.set_auxiliary_model(None)
    assert operator.auxiliary_models == {}


class Annotated(Acting):
    def __init__(self, size: int, names: tuple[str, ...] = (), chance: random.Random | None = None, free=None):
        self.given = size, names, chance, free


class AnnotatedForTypeCheckersOnly(Annotated):
    def __init__(self, size: "NotImported"):  # noqa: F821
        super().__init__(size)


def test_unknown_names_and_wrong_arguments_teach():
    def given(kind="Annotated", **args):
        (operator,) = create_operators([OperatorConfig(name=f"{THIS}.{kind}", args=args)])
        return operator.given

    assert given(size=3, names=["a", "b"], free={"any": "thing"}) == (3, ("a", "b"), None, {"any": "thing"})
    for wrong in ({"size": "x"}, {"size": 1.5}, {"size": 1, "names": [2]}, {"size": 1, "names": "ab"}):
        with pytest.raises(OperatorConfigError, match=f"Annotated' cannot be made.*{list(wrong)[-1]} is "):
            given(**wrong)
    assert given("AnnotatedForTypeCheckersOnly", size="x")[0] == "x"
    with pytest.raises(OperatorConfigError, match="wanted a subclass"):
        given("exp")
    with pytest.raises(UnknownNameError, match="did you mean 'reward_filter'"):
        create_operators([OperatorConfig(name="reward_filtre")])


class Synchronous(ExperienceOperator):
    def __init__(self, factor=1.0):
        self.factor = factor

    def process(self, exps):
        self.thread = threading.current_thread()
        for each in exps:
            each.reward *= self.factor
        return exps, {"scaled": len(exps), "their/own": 3, "text": "left out"}

    def close(self):
        self.closed_in = threading.current_thread()


async def test_synchronous_operators_run_in_a_thread():
    (operator,) = create_operators([OperatorConfig(name=f"{THIS}.Synchronous", args={"factor": 2.0})])
    kept, metrics = await run_chain([operator], [exp()])
    assert kept[0].reward == 2.0
    assert metrics["experience_pipeline/0_Synchronous/scaled"] == 1
    assert metrics["their/own"] == 3
    assert not any("text" in name for name in metrics)
    await operator.close()
    assert threading.current_thread() not in {operator.operator.thread, operator.operator.closed_in}


class Patient(ThreadedOperator):
    """Waits in its thread until it is let go."""

    def __init__(self):
        self.go = threading.Event()

    def apply(self, exps):
        self.go.wait(30)
        return exps, {}


async def test_a_thread_that_does_not_end_is_given_up_and_known():
    operator = Patient()
    with pytest.raises(OperatorError, match="0_Patient"):
        await run_chain([operator], [exp()], timeout=0.01)
    assert stuck_threads() == ["Patient"]
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "Patient"]
    assert thread.daemon
    operator.go.set()
    thread.join()
    assert stuck_threads() == []


class Named(ExperienceOperatorV1):
    """Has attributes of its own with names that the base class might use."""

    def __init__(self):
        names = ("name", "label", "operator", "metrics", "batch", "place", "threshold", "models")
        vars(self).update({name: {"mine": name} for name in names})

    async def process(self, exps):
        return exps, {"kept": float(len(exps))}


async def test_an_operator_may_have_attributes_of_any_name():
    documented = {"auxiliary_models", "set_auxiliary_model", "asks_people", "reviews", "set_reviews"}
    names = {name for name in dir(ExperienceOperatorV1) if not name.startswith("_")}
    assert names == documented | {"prepare", "process", "close"}
    assert {name for name in dir(ExperienceOperator) if not name.startswith("_")} == {"process", "close"}
    _, metrics = await run_chain([Named()], [exp()])
    assert metrics["experience_pipeline/0_Named/kept"] == 1.0

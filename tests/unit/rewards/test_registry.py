import asyncio
import functools
import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from trinity_mq.rewards import REWARDS, RewardError, UnknownNameError, create_reward, parts_of
from trinity_mq.runtime.plugins import resolve
from trinity_mq.runtime.threads import in_thread, interrupt


class Threshold:
    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, response, truth, *, finished):
        return {"accuracy": float(len(response) >= self.least)}


def test_every_registered_name_loads_and_can_be_called():
    game = '{"target": 7, "numbers": [7]}'
    truths = {"countdown": game, "countdown_reward": game, "tool_call": "[]"}
    origin = {"dataset": "chain_sum", "args": {}, "seed": 0}
    record = {"question": "3 + 4 =", "answer": "7", "metadata": {}, "reasoning_gym": origin}
    has_extra = importlib.util.find_spec("reasoning_gym") is not None
    for name in REWARDS:
        if name == "reasoning_gym_reward" and not has_extra:
            continue
        parts = parts_of(create_reward(name, {}), "7", truths.get(name, "7"), finished=True, record=record)
        assert parts, name


class Quiet:
    """It can be made with any argument, and its instances cannot be called."""

    made = 0

    def __init__(self, **args):
        type(self).made += 1


class OtherCall(Quiet):
    def __call__(self, path):
        return {}


class CallsItsClasses(type):
    def __call__(cls, *args, **more):
        return super().__call__(*args, **more)


class Made(Quiet, metaclass=CallsItsClasses):
    pass


@pytest.mark.parametrize("kind", [Quiet, OtherCall, Made])
def test_a_class_of_another_kind_is_not_made(kind):
    """``subprocess.Popen`` runs a command while it is made."""
    Quiet.made = kind.made = 0
    with pytest.raises(RewardError, match="cannot be called"):
        create_reward(kind, {"args": "touch x", "shell": True})
    assert kind.made == 0


def test_an_unknown_name_lists_near_misses():
    with pytest.raises(UnknownNameError, match="did you mean 'exact_match'"):
        create_reward("exact_mach", {})
    with pytest.raises(UnknownNameError, match=r"known: accuracy_reward, char_match.*dotted path"):
        create_reward("zzz", {})


def test_wrong_arguments_are_refused_when_the_reward_is_made():
    with pytest.raises(RewardError, match=r"reward_fn_args.*'colour'"):
        create_reward("text_format", {"colour": 1})
    with pytest.raises(RewardError, match="least"):
        create_reward(Threshold, {})
    with pytest.raises(RewardError, match="finished"):
        create_reward(lambda text, truth: {"accuracy": 1.0}, {})
    with pytest.raises(RewardError, match="is a int"):
        create_reward(3, {})
    with pytest.raises(RewardError, match=r"reward_fn_args \{'api_key': '\*\*\*'\}"):
        create_reward("text_format", {"api_key": "s3cr3t"})


@pytest.mark.parametrize("result", [{}, {"a": "1"}, {"a": None}, None, "1", [1.0], 1j, np.ones(2)])
def test_a_result_that_is_no_parts_is_refused(result):
    with pytest.raises(RewardError, match="wanted its parts by name"):
        parts_of(lambda response, truth, *, finished: result, "x", None, finished=True)


NUMBERS = [(1, 1.0), (0.25, 0.25), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0)]


@pytest.mark.parametrize(("result", "value"), NUMBERS)
def test_a_number_alone_is_the_accuracy(result, value):
    for given in (result, {"accuracy": result}):
        parts = parts_of(
            create_reward(lambda response, truth, *, finished, given=given: given, {}), "x", None, finished=True
        )
        assert parts == {"accuracy": value}
        assert type(parts["accuracy"]) is float


class Waiting:
    """A reward that shares something that belongs to an event loop, as clients do."""

    def __init__(self):
        self.loops = set()

    async def __call__(self, response, truth, *, finished):
        await asyncio.sleep(0)
        self.loops.add(asyncio.get_running_loop())
        return response == truth


async def test_a_coroutine_is_awaited_on_one_loop_from_any_thread():
    reward = create_reward(Waiting, {})
    judged = [parts_of(reward, "7", "7", finished=True)]
    judged += await asyncio.gather(
        *(asyncio.to_thread(parts_of, reward, text, "7", finished=True) for text in ("7", "8", "7"))
    )
    assert [parts["accuracy"] for parts in judged] == [1.0, 1.0, 0.0, 1.0]
    assert len(reward.function.loops) == 1


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_coroutine_that_would_wait_for_itself_is_refused():
    async def inner(response, truth, *, finished):
        return True

    async def outer(response, truth, *, finished):
        return parts_of(create_reward(inner, {}), response, truth, finished=finished)

    with pytest.raises(RuntimeError, match="would block the event loop"):
        parts_of(create_reward(outer, {}), "x", None, finished=True)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns every 10 microseconds, so that an interruption arrives anywhere in the calling thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
async def test_a_coroutine_of_an_interrupted_thread_is_cancelled():
    for _ in range(100):
        started, ended = threading.Event(), threading.Event()

        async def endless(response, truth, *, finished, started=started, ended=ended):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        call = functools.partial(parts_of, create_reward(endless, {}), "x", None, finished=True)
        waiting = asyncio.create_task(in_thread(call, "reward", interrupt))
        while not started.is_set():  # noqa: ASYNC110 - a wait in a further thread would come too late
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(ended.wait, 30)


@pytest.mark.parametrize(
    ("name", "response", "truth"),
    [
        *((name, "18", 18) for name in ("exact_match", "char_match", "math_answer", "math_equal", "math_equal_format")),
        *((name, "\\boxed{0}", 0) for name in ("math_boxed", "gsm8k", "math_dapo")),
        ("countdown", "<answer>3 + 4</answer>", {"target": 7, "numbers": [3, 4]}),
        ("tool_call", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', [{"name": "f", "arguments": {}}]),
    ],
)
def test_a_right_answer_need_not_be_text(name, response, truth):
    found = resolve("reward function", name, REWARDS)
    judge = found() if inspect.isclass(found) else found
    assert judge(response, truth, finished=True)["accuracy"] == 1
    assert create_reward(name, {})(response, truth, finished=True)["accuracy"] == 1


def with_record(response, truth, *, finished, record=None, tokens=None):
    return {"accuracy": float(record is not None and response == record["wanted"]), "length": float(tokens or 0)}


def with_prompt_and_record(response, prompt, truth, record):
    return {"accuracy": float(prompt is None and response == record["wanted"])}


@pytest.mark.parametrize("reward", [with_record, with_prompt_and_record])
def test_a_function_may_ask_for_the_record(reward):
    made = create_reward(reward, {})
    assert parts_of(made, "x", None, finished=True, record={"wanted": "x"})["accuracy"] == 1.0
    assert parts_of(made, "x", None, finished=True, record={"wanted": "y"})["accuracy"] == 0.0
    given = create_reward(with_record, {"record": {"wanted": "mine"}, "tokens": 4})
    parts = parts_of(given, "mine", None, finished=True, record={"wanted": "x"}, tokens=9)
    assert parts == {"accuracy": 1.0, "length": 4.0}, "arguments come before what would be filled in"

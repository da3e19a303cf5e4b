import asyncio
import threading
import time

import pytest

from tests.waiting import until
from trinity_mq.experience import Experience
from trinity_mq.runtime.threads import in_thread, interrupt, stuck_threads
from trinity_mq.workflows import (
    AsyncMultiTurnWorkflow,
    MultiTurnWorkflow,
    RunFailedError,
    SimpleWorkflow,
    Task,
    Workflow,
    execute,
)


async def ended(thread, seconds=5):
    await asyncio.to_thread(thread.join, seconds)
    assert not thread.is_alive()


async def cancelled(coroutine, begun):
    """Cancel ``coroutine`` once ``begun`` is set, and see it end at once."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    async with asyncio.timeout(1):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_thread_given_up_is_counted_until_it_ends():
    begun, release, threads = threading.Event(), threading.Event(), []

    def work():
        threads.append(threading.current_thread())
        begun.set()
        release.wait()

    loop = asyncio.get_running_loop()
    await cancelled(in_thread(work, "w"), begun)
    given_up = loop.time()
    assert stuck_threads(given_up - 1) == []
    assert stuck_threads(given_up) == ["w"]
    release.set()
    await ended(threads[0])
    assert stuck_threads(given_up) == []


async def test_a_thread_is_used_again_and_has_the_name_of_its_call():
    def seen():
        return threading.current_thread(), threading.current_thread().name

    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda: next(iter([])), "test")
    first, name = await in_thread(seen, "first")
    assert name == "first"
    await until(lambda: first.name == "idle")
    found = [await in_thread(seen, f"call {number}") for number in range(20)]
    assert [name for _, name in found] == [f"call {number}" for number in range(20)]
    assert len({thread for thread, _ in found}) < 20


async def test_a_call_meets_no_interruption_that_was_meant_for_an_earlier_one():
    """Each other call is cancelled at about the moment at which it ends; none of those between may notice."""

    def work(seconds):
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            sum(range(50))
        return seconds

    for number in range(200):
        seconds = number % 20 * 1e-4
        given_up = asyncio.ensure_future(in_thread(lambda seconds=seconds: work(seconds), "given up", interrupt))
        await asyncio.sleep(0.001)
        given_up.cancel()
        kept = [asyncio.ensure_future(in_thread(lambda: work(1e-4), "kept", interrupt)) for _ in range(3)]
        assert await asyncio.gather(*kept) == [1e-4] * 3
        await asyncio.wait([given_up])


async def test_interrupting_what_holds_on_changes_nothing_for_others():
    begun, release, threads = threading.Event(), threading.Event(), []

    def work():
        threads.append(threading.current_thread())
        begun.set()
        while not release.is_set():
            try:
                time.sleep(0.001)
            except BaseException:  # as bad as can be
                continue

    await cancelled(in_thread(work, "w", interrupt), begun)
    assert await in_thread(lambda: 5, "other") == 5
    assert threads[0].is_alive()
    release.set()
    await ended(threads[0])


async def test_cancelling_reaches_a_loop_of_its_own():
    begun, ends, closed = threading.Event(), threading.Event(), []

    class Waits(Workflow):
        is_async = True

        async def run_async(self):
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ends.set()

    async def close():
        closed.append(1)

    await cancelled(execute(lambda: Waits(task=None, model=None), Waits, close=close, own_loop=True), begun)
    assert await asyncio.to_thread(ends.wait, 5)
    await asyncio.sleep(0.05)
    assert closed == [1]


# -- what a workflow returns, raises and says of itself


def workflow(result, *, is_async):
    """Return a workflow class that returns ``result()``."""
    flag = is_async

    class Made(Workflow):
        is_async = flag

        def run(self):
            return result()

        async def run_async(self):
            return result()

    return Made


async def run(kind):
    return await execute(lambda: kind(task=Task(workflow=kind), model=None), kind)


def raiser(error):
    def function():
        raise error

    return function


BOTH = pytest.mark.parametrize("is_async", [False, True])


@BOTH
@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda: None, "returned None, wanted a list of experiences"),
        (lambda: ["x"], "wanted a list of experiences"),
        (list, "returned no experience; a run gives at least one"),
    ],
)
async def test_a_result_that_is_none_is_a_failure(is_async, result, said):
    with pytest.raises(RunFailedError, match=said):
        await run(workflow(result, is_async=is_async))


@BOTH
@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (ZeroDivisionError("0"), ZeroDivisionError, "0"),
        (SystemExit(3), RunFailedError, r"called sys\.exit\(3\)"),
        (asyncio.CancelledError(), RunFailedError, "cancelled itself"),
    ],
    ids=["an error as it is", "no end of the process", "no cancellation of the runner"],
)
async def test_what_a_workflow_raises_fails_its_run(is_async, fault, error, said):
    with pytest.raises(error, match=said):
        await run(workflow(raiser(fault), is_async=is_async))


@BOTH
async def test_a_workflow_without_its_method_says_which(is_async):
    flag = is_async

    class Empty(Workflow):
        is_async = flag

    with pytest.raises(NotImplementedError, match=r"run_async\(\)" if is_async else r"no run\(\)"):
        await run(Empty)


def test_older_names_of_the_flags():
    class Made(Workflow):
        can_repeat = True

    made = Made(task=Task(), model=None)
    assert (made.repeatable, made.resettable, made.asynchronous) == (True, False, False)
    with pytest.raises(NotImplementedError, match="can_reset"):
        made.reset(Task())


class Says:
    """Overrides the properties as older code does, in a class that is no workflow."""

    @property
    def repeatable(self):
        return True


class SaysOtherwise(Workflow):
    resettable = True

    @property
    def asynchronous(self):
        return not super().asynchronous


def test_overridden_older_names_set_the_flags():
    class Both(Says, SaysOtherwise):
        pass

    class Later(Both):
        can_repeat = False

    class NotRepeated(SimpleWorkflow):
        @property
        def repeatable(self):
            return False

    def flags(kind):
        return kind.can_reset, kind.can_repeat, kind.is_async

    assert flags(SaysOtherwise) == (True, False, True)
    assert flags(Both) == (True, True, True)
    assert flags(Later) == (True, False, True)
    assert flags(NotRepeated) == (True, False, False)
    assert flags(SimpleWorkflow) == (True, True, False)


def test_a_flag_that_depends_on_the_instance_is_refused():
    with pytest.raises(TypeError, match=r"Sometimes\.repeatable depends on the instance.*set can_repeat = True"):

        class Sometimes(Workflow):
            @property
            def repeatable(self):
                return self.task.repeat_times > 1


class Converts:
    """Stands for a model that scores conversations."""

    def __init__(self, status=None):
        self.status = status

    def convert_messages_to_experience(self, messages):
        return Experience(
            tokens=[1, 2, 3], prompt_length=1, action_mask=[True, False], messages=messages, truncate_status=self.status
        )

    async def convert_messages_to_experience_async(self, messages):
        return self.convert_messages_to_experience(messages)


@pytest.mark.parametrize(
    ("status", "given", "reward"),
    [(None, None, 0.5), ("response_truncated", None, 0.0), (None, "response_truncated", 0.0)],
)
@pytest.mark.parametrize("kind", [MultiTurnWorkflow, AsyncMultiTurnWorkflow])
async def test_a_conversation_becomes_one_experience(kind, status, given, reward):
    workflow = kind(task=Task(), model=Converts(status))
    arguments = ([{"role": "user", "content": "q"}], 0.5, {"steps": 3, "env": "lake"}, given)
    for experience in (
        workflow.process_messages_to_experience(*arguments),
        await workflow.process_messages_to_experience_async(*arguments),
    ):
        assert (experience.reward, experience.truncate_status) == (reward, status or given)
        assert experience.info == {"steps": 3, "env": "lake"}
        assert experience.metrics == {"steps": 3}
        assert experience.experience_type == "multi_turn"

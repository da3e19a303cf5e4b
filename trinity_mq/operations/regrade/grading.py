"""Regrades recorded experiences with another reward function, using the answers of the run's tasksets."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.config import Config, TasksetConfig
from trinity_mq.data import TasksetError
from trinity_mq.data.records import Record, read_records
from trinity_mq.experience import Experience
from trinity_mq.experience.rules import DPO, PROMPT_TRUNCATED
from trinity_mq.rewards import RewardFn, invalid_parts_reason, judge_conversation, parts_of
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.runtime.threads import in_thread, interrupt

SHOWN = 100
"""Maximum characters shown of an error."""


class NotRegradable(Exception):
    """An experience cannot be regraded. The message states the reason and is the key by which failures are counted."""


@dataclass(slots=True)
class GradingTime:
    """Time spent in the reward function, in seconds."""

    calls: int = 0
    total: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a call of ``seconds`` duration."""
        self.calls, self.total, self.longest = self.calls + 1, self.total + seconds, max(self.longest, seconds)


class TaskRecords:
    """Looks up the taskset records of experiences. Each taskset is read on first use.

    Args:
        config: Configuration of the run.
    """

    def __init__(self, config: Config) -> None:
        buffer = config.buffer
        self._tasksets = {taskset.name: taskset for taskset in (*buffer.training_tasksets, *buffer.eval_tasksets)}
        self._seed = config.seed
        self._records: dict[str, list[Record] | NotRegradable] = {}

    def of(self, experience: Experience) -> tuple[Record, TasksetConfig]:
        """Return (the record of an experience's task, the configuration section of its taskset).

        Raises:
            NotRegradable: The record cannot be found.
        """
        name, index = experience.taskset, experience.index
        if name is None or index is None:
            raise NotRegradable("its task was submitted from outside, and its record is not stored")
        taskset = self._tasksets.get(name)
        if taskset is None:
            raise NotRegradable(f"the configuration has no taskset {name!r}")
        records = self._read(taskset)
        if not 0 <= index < len(records):
            raise NotRegradable(
                f"taskset {name!r} has {len(records)} records now, and the record of its task is not among them"
            )
        return records[index], taskset

    def _read(self, taskset: TasksetConfig) -> list[Record]:
        if taskset.name not in self._records:
            try:
                self._records[taskset.name] = read_records(taskset, seed=self._seed)[0]
            except TasksetError as error:
                self._records[taskset.name] = NotRegradable(str(error))
        records = self._records[taskset.name]
        if isinstance(records, NotRegradable):
            raise NotRegradable(str(records))
        return records


@dataclass
class Grader:
    """Calls a reward function with the arguments that the workflow's reward function would receive.

    Calls run one at a time, each in its own thread. After a timeout only that experience fails: its thread is
    interrupted when it next executes Python code, and nothing waits for it.
    """

    function: RewardFn
    """A reward function from :func:`trinity_mq.rewards.create_reward`."""
    tasks: TaskRecords
    limit: float
    """Timeout of one call in seconds."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of experiences without a new reward, by reason."""
    time: GradingTime = field(default_factory=GradingTime)

    async def grade(self, experience: Experience) -> float | None:
        """Return the new reward of an experience, or None after a failure, which is counted."""
        try:
            call = self._call(experience)
        except NotRegradable as error:
            self.failures[str(error)] += 1
            return None
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.limit):
                parts = await in_thread(call, "reward", interrupt)
        except TimeoutError:
            self.failures[f"the reward function took more than {self.limit:g} s (--timeout)"] += 1
            return None
        except Exception as error:
            line = " ".join(str(error).split())[:SHOWN]
            self.failures[f"the reward function raised {type(error).__name__}: {line}"] += 1
            return None
        finally:
            self.time.add(time.monotonic() - started)
        if fault := invalid_parts_reason(self.function, parts):
            self.failures[fault] += 1
            return None
        return float(sum(parts.values()))

    def _call(self, experience: Experience) -> Callable[[], Mapping[str, float]]:
        """Return the reward function bound to its arguments.

        Raises:
            NotRegradable: The experience lacks data that the function needs.
        """
        if experience.experience_type == DPO:
            raise NotRegradable("it is a pair of answers")
        record, taskset = self.tasks.of(experience)
        truth = record.get(taskset.format.response_key)
        if getattr(self.function, "judges_conversation", False):
            if not experience.messages:
                raise NotRegradable("the reward function judges the conversation, which the experience does not keep")
            asked = experience.messages
            while asked and asked[-1].get("role") == "assistant":
                asked = asked[:-1]
            return functools.partial(judge_conversation, self.function, experience, asked, truth_text(truth))
        return functools.partial(
            parts_of,
            self.function,
            "" if experience.truncate_status == PROMPT_TRUNCATED else rewarded_text(experience),
            truth_text(truth),
            finished=experience.truncate_status is None,
            tokens=experience.response_length,
            record=dict(record),
            prompt_end=experience.prompt_text,
        )


def rewarded_text(experience: Experience) -> str:
    """Return the rewarded text: the response, or the last answer of a conversation without a response text.

    Raises:
        NotRegradable: The experience has neither.
    """
    if experience.response_text is not None:
        return experience.response_text
    answers: list[Any] = [
        message.get("content") for message in experience.messages or () if message.get("role") == "assistant"
    ]
    if answers and isinstance(answers[-1], str):
        return answers[-1]
    raise NotRegradable("it keeps no text of the response")

"""Counts the functions, files and packages that the messages of one task pass, from the taskset to the gradient.

    python benchmarks/path_of_a_task.py

The real explorer, runner, operator and trainer work in one process, on a broker in memory and in real time. The engine
is the real HTTP server with scripted answers. The learner is the real one with a tiny model. A batch is one task of two
runs, from the questions of the demo. The pacing admits a batch only after the train step on the batch before it.

The trace begins when the taskset has returned the second task and ends when the train step on this task has returned.
The first task is not traced, because it loads workflows and models. A function is on the path if, during the trace, on
any thread and in any asyncio task, one of its arguments holds a part of the task:

- a value of one of the classes VALUES, or a message whose kind is in KINDS;
- a text or bytes that contain the question of the task;
- a list, tuple, set or dictionary that holds one of these.

Lambdas, comprehensions, methods that only read their own object, ``telemetry``, the test kit and the simulation do not
count. Heartbeats, metrics and logs do not count, because they hold no part of the task.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trinity_agents.explorer.agent import Explorer
from trinity_agents.explorer.task_source import open_tasksets
from trinity_agents.runner.agent import Runner
from trinity_agents.runner.in_flight_slice import InFlightSlice
from trinity_agents.simulation import Simulation
from trinity_agents.trainer.decisions import TicketDecision
from trinity_agents.trainer.sources.base import TrainBatch
from trinity_mq.bus import Envelope, Incoming
from trinity_mq.dispatch.tickets import SliceState, Ticket
from trinity_mq.engines.generation.request import Completion, GenerationRequest
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.messages import BatchClosed, BatchReady, TaskBody, TaskResult, TaskResults, TaskSlice, TaskSlices
from trinity_mq.models import ensure_model_folder
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.testing.scripted import scripted_server
from trinity_mq.training.learner import TorchLearner
from trinity_mq.transport.experience_parts import PartMember, ReceivedPart
from trinity_mq.workflows import Task

ROOT = Path(__file__).resolve().parents[1]
CONTROL = (TaskBody, TaskSlice, TaskSlices, TaskResult, TaskResults, BatchClosed, BatchReady)
DISPATCH = (Ticket, SliceState, InFlightSlice, TicketDecision, TrainBatch)
ROLLOUT = (Task, SliceOutcome, RunResults, GenerationRequest, Completion)
EXPERIENCES = (Experience, ExperienceBatch, PartMember, ReceivedPart)
VALUES = (*CONTROL, *DISPATCH, *ROLLOUT, *EXPERIENCES)
KINDS = {value.kind for value in CONTROL if value is not TaskBody} | {"experience_part", "experience_chunk"}
EXCLUDED = ("trinity_mq/telemetry/", "trinity_mq/testing/", "agents/trinity_agents/simulation/")
TRACED = 2
"""Number of the traced task."""
BATCHES = 3
LIMIT = 60.0
"""Seconds after which the run fails."""
MOST_ITEMS, DEEPEST = 16, 2
"""Maximum number of items, and of levels, of a container that are examined."""
VARIABLE_ARGUMENTS = 0x04, 0x08
"""Flags of code objects with ``*arguments`` and ``**arguments``."""


@dataclass
class Trace:
    """Records the functions that receive a part of the task."""

    question: str = ""
    """Question of the traced task."""
    active: bool = False
    functions: set[CodeType] = field(default_factory=set)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the calls of this thread and of all threads that start in the context."""
        sys.setprofile(self._called)
        threading.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.active and event == "call" and code not in self.functions and is_counted(code):
            values = frame.f_locals
            if any(self._holds_task(values.get(name), DEEPEST) for name in arguments_of(code)):
                self.functions.add(code)

    def _holds_task(self, value: object, levels: int) -> bool:
        if isinstance(value, Envelope | Incoming):
            return value.kind in KINDS
        if isinstance(value, str):
            return self.question in value
        if isinstance(value, bytes | bytearray):
            return self.question.encode() in value
        if levels and type(value) in {list, tuple, set, frozenset, dict}:
            items = value.values() if isinstance(value, dict) else value
            return any(self._holds_task(item, levels - 1) for item in itertools.islice(items, MOST_ITEMS))  # type: ignore[call-overload]
        return isinstance(value, VALUES)


def is_counted(code: CodeType) -> bool:
    """Return whether a function belongs to the product and has a name."""
    file = file_of(code)
    in_product = file.startswith(("trinity_mq/", "agents/")) and not file.startswith(EXCLUDED)
    return in_product and not code.co_name.startswith("<")


def file_of(code: CodeType) -> str:
    """Return the file of a function, relative to the repository."""
    return code.co_filename.removeprefix(f"{ROOT}/")


def arguments_of(code: CodeType) -> list[str]:
    """Return the names of the arguments, without the object or class of a method."""
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & flag) for flag in VARIABLE_ARGUMENTS)
    return [name for name in code.co_varnames[:count] if name not in {"self", "cls"}]


class TracedTaskset:
    """A taskset that starts the trace with its second task."""

    def __init__(self, taskset: Any, trace: Trace) -> None:
        self._taskset, self._trace, self._batches = taskset, trace, 0

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next tasks."""
        tasks: list[TaskBody] = self._taskset.next_batch(size)
        self._batches += 1
        if self._batches == TRACED:
            self._trace.question, self._trace.active = str(tasks[0].raw_task["question"]), True
        return tasks

    def __len__(self) -> int:
        return len(self._taskset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._taskset, name)


class TracedLearner(TorchLearner):
    """A learner that ends the trace after its second step. The fake engine has no weights, so the canary is zero."""

    trace: Trace

    async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
        """Train on the experiences."""
        metrics = await super().step(experiences, step_number)
        if step_number == TRACED:
            self.trace.active = False
        return metrics

    async def canary_logprobs(self, tokens: Any) -> list[float]:
        """Return the logprobs of the fake engine."""
        return [0.0] * (len(tokens) - 1)


class TracedRun(Simulation):
    """A simulated run with real workflows, requests and train steps."""

    def settings(self) -> dict[str, Any]:
        """Return the configuration: the questions of the demo, and weights after each train step."""
        taskset = {"name": "ops3", "storage_type": "synthetic", "path": "ops3", "split": "train"}
        workflow = {"workflow": "async_simple_workflow", "reward_fn": "char_match"}
        characters = "".join(map(chr, range(32, 340)))  # more tokens than the tokenizer of the scripted engine has
        return {
            "name": "sim",
            "run_dir": str(self.folder),
            "model": {"tiny": {"characters": characters}, "max_response_tokens": 8},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
            "buffer": {"batch_size": 1, "total_steps": BATCHES, "taskset": taskset | workflow},
            "explorer": {"eval_interval": 1000},
            "synchronizer": {"sync_interval": 1, "sync_offset": 0, "max_staleness": BATCHES},
            "trainer": {"save_interval": 1000},
            "monitor": {"tensorboard": False},
        }

    async def traced(self, trace: Trace) -> None:
        """Run to the end.

        Raises:
            TimeoutError: The run did not end in time.
        """
        answers = itertools.cycle(["7", "2"])
        async with asyncio.timeout(LIMIT), scripted_server(lambda prompt: next(answers)) as (model, _):
            self.engine.snapshot = replace(self.engine.snapshot, url=model.url, name=model.name)
            folder = ensure_model_folder(self.config.model, self.folder / "model", self.config.seed)
            learner = TracedLearner(self.config, folder, BATCHES)
            learner.trace = trace
            taskset, _ = open_tasksets(self.config)
            agents: dict[str, Callable[[], Any]] = {
                "explorer": lambda: self._explorer(TracedTaskset(taskset, trace)).run(),
                "runners": lambda: self._runner().run(),
                "trainer": lambda: self.make_trainer(learner=learner).run(),  # type: ignore[arg-type]
            }
            await self.run(**agents)

    def _explorer(self, taskset: Any) -> Explorer:
        where: dict[str, Any] = {"bus": self.bus(), "topology": self.topology, "agent_id": "explorer-0"}
        return Explorer(self.config, engine=self.engine, folder=self.folder, taskset=taskset, metrics=self, **where)  # type: ignore[arg-type]

    def _runner(self) -> Runner:
        return Runner(self.config, bus=self.bus(), topology=self.topology, agent_id="runner-0")


def functions_on_path() -> set[str]:
    """Return the functions on the path of a task, each as ``file:qualified name``."""
    import transformers  # noqa: F401 - its import takes much longer under a trace

    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, trace.installed():
        asyncio.run(TracedRun(Path(folder)).traced(trace))
    return {f"{file_of(code)}:{code.co_qualname}" for code in trace.functions}


def counts(functions: set[str]) -> tuple[int, int, int]:
    """Return the numbers of functions, of files, and of folders with these files."""
    files = {function.partition(":")[0] for function in functions}
    return len(functions), len(files), len({str(Path(file).parent) for file in files})


def main() -> None:
    """Print the functions by file, and the three figures."""
    functions = functions_on_path()
    for file, names in itertools.groupby(sorted(functions), key=lambda function: function.partition(":")[0]):
        print(f"{file}: {', '.join(name.partition(':')[2] for name in names)}")
    print("{} functions, {} files, {} packages".format(*counts(functions)))


if __name__ == "__main__":
    main()

"""The length of the path of a task does not grow."""

from __future__ import annotations

from benchmarks.path_of_a_task import counts, functions_on_path

RATCHET = {"functions": 234, "files": 71, "packages": 25}
"""Maximum figures of ``python benchmarks/path_of_a_task.py``. Lower them when the path gets shorter. On a slow machine
the clock of open batches ticks during the trace, which adds two functions to the 232 of an idle machine.
"""
STATIONS = (
    "agents/trinity_agents/runner/agent.py:Runner._handle",
    "trinity_mq/dispatch/dispatcher.py:Dispatcher.open",
    "trinity_mq/models/wrapper.py:ModelWrapper.chat_async",
    "agents/trinity_agents/operator/agent.py:Operator._process",
    "trinity_mq/training/learner.py:TorchLearner.step",
)
"""Functions that the trace must see: at each agent, at the model and at the learner."""


def test_the_path_of_a_task_is_at_most_as_long_as_recorded() -> None:
    functions = functions_on_path()
    assert functions.issuperset(STATIONS), sorted(functions)
    figures = dict(zip(RATCHET, counts(functions), strict=True))
    assert all(figures[name] <= limit for name, limit in RATCHET.items()), (figures, sorted(functions))

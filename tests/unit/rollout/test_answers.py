"""The expected answer that experiences carry, and the answers that results of evaluations carry."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.agents.world import experience
from trinity_mq.messages.tasks import MOST_ANSWER, MOST_ANSWERS, MOST_TRUTH
from trinity_mq.rollout.run_results import RunResults, answer_texts
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.workflows import Task


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"answer": "seven"}, "seven"),
        ({"answer": 18}, "18"),
        ({"answer": 0}, "0"),
        ({"answer": False}, "false"),
        ({"answer": ["a", {"b": 1}]}, '["a", {"b": 1}]'),
        ({"answer": None}, None),
        ({"answer": ""}, None),
        ({}, None),
        ({"answer": "\ud83d"}, "?"),
        ({"answer": "x" * 5000 + "end"}, "x" * 249 + "…" + "x" * 747 + "end"),
    ],
)
def test_each_sample_carries_the_expected_answer(record: dict[str, Any], wanted: str | None) -> None:
    results = RunResults()
    results.finished(Task(raw_task=record), 3, [experience(1, 3), experience(1, 3)], 1.0)
    found = [one.info.get("truth") for one in results.experiences[3]]
    assert found == [wanted, wanted]
    assert wanted is None or len(wanted) <= MOST_TRUTH


def test_a_workflows_own_entry_is_kept() -> None:
    own = experience(1, 0)
    own.info["truth"] = "mine"
    RunResults().finished(Task(raw_task={"answer": "7"}), 0, [own], 1.0)
    assert own.info["truth"] == "mine"


def test_the_answer_of_a_run_is_what_its_last_step_said() -> None:
    said = [experience(1, run) for run in (0, 0, 1, 2)]
    for one, step, text in zip(said, (1, 0, 0, 0), ("last", "first", None, None), strict=True):
        one.eid.step, one.response_text = step, text
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "in messages"}]
    said[2].messages = [*talk, {"role": "tool", "content": "5"}]
    assert answer_texts(SliceOutcome(experiences=said, runs=[0, 1, 2])) == ["last", "in messages", ""]


def test_answers_are_bounded() -> None:
    said = [experience(1, run) for run in range(MOST_ANSWERS + 5)]
    for one in said:
        one.response_text = "thoughts " * 1000 + "the answer is 7"
    found = answer_texts(SliceOutcome(experiences=said, runs=list(range(len(said)))))
    assert [len(text) for text in found] == [MOST_ANSWER] * MOST_ANSWERS
    assert all(text.endswith("the answer is 7") for text in found)

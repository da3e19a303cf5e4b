from __future__ import annotations

import io
from pathlib import Path

import pytest

from trinity_mq.bus import Incoming
from trinity_mq.errors import CommandError
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import SubmissionOutcome, encode
from trinity_mq.operations.submit import SubmissionReplies, read_task
from trinity_mq.runtime.deliveries import EXPERIENCES

TASK = '{"raw_task": {"question": "+372="}, "repeat_times": 2}'


def test_a_task_from_each_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text(TASK)
    monkeypatch.setattr("sys.stdin", io.StringIO(TASK))
    monkeypatch.setenv("HOME", str(tmp_path))
    tasks = [read_task(text) for text in (TASK, f"@{tmp_path}/t.json", "@~/t.json", "-")]
    assert all(task == tasks[0] for task in tasks)
    assert (tasks[0].raw_task, tasks[0].repeat_times) == ({"question": "+372="}, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "is a list, wanted an object"),
        ('{"raw_taks": {}}', "unknown key 'raw_taks'; did you mean 'raw_task'?"),
        ('{"repeat_times": 0}', "repeat_times: Input should be greater than or equal to 1, got 0"),
        ("@/no/such", "cannot be read"),
        ("@~no-such-user/t.json", "cannot be read"),
        ('{"raw_task": {"x": [1e999]}}', "task's raw_task.x.0: inf, wanted a finite number"),
        ('{"raw_task": {"x": NaN}}', "task's raw_task.x: nan, wanted a finite number"),
        (f'{{"raw_task": {{"x": {10**30}}}}}', "task's raw_task.x: an integer of 100 bits, wanted one of at most 64"),
        ('{"raw_task": {"x": "\\ud800"}}', "task's raw_task.x: half a surrogate pair"),
        ('{"raw_task": {"x": ' + "[" * 70 + "]" * 70 + "}}", "more than 64 levels"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_task_is_explained(text: str, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        read_task(text)
    assert words in str(caught.value)


def reply(message: SubmissionOutcome | bytes, message_id: str) -> Incoming:
    kind = "experience_part" if isinstance(message, bytes) else message.kind
    body = message if isinstance(message, bytes) else encode(message)
    headers = {"kind": kind}
    content_type = EXPERIENCES if isinstance(message, bytes) else None
    return Incoming(
        body=body, exchange="", routing_key="k", queue="q", message_id=message_id, headers=headers,
        content_type=content_type,
    )  # fmt: skip


def test_answers_come_with_the_outcome_in_any_order_and_each_once() -> None:
    def answered(run: int) -> bytes:
        one = Experience(
            eid=EID(run=run), tokens=[1, 2], prompt_length=1, response_text=f"text {run}", reward=float(run)
        )
        return Experience.serialize_many([one])

    outcome = SubmissionOutcome(submission_id="s", batch=3, ticket="t", outcome="finished", experiences=2)
    replies = SubmissionReplies()
    for message in (reply(answered(1), "b"), reply(outcome, "o"), reply(answered(1), "b")):
        replies.take(message)
        assert not replies.complete
    assert replies.missing == 1
    replies.take(reply(answered(0), "a"))
    assert replies.complete
    assert replies.answers(None) == [
        {"run": 0, "step": 0, "text": "text 0", "reward": 0.0, "expected": None},
        {"run": 1, "step": 0, "text": "text 1", "reward": 1.0, "expected": None},
    ]


def test_an_answer_that_cannot_be_read_is_explained() -> None:
    replies = SubmissionReplies()
    replies.take(reply(b"\xc1", "a"))
    with pytest.raises(CommandError, match="an answer cannot be read"):
        replies.answers(None)

"""``trinity-mq tap``: choosing fields, and mistakes."""

from __future__ import annotations

import json

import pytest

from tests.unit.agents.world import experience
from trinity_mq.cli.main import main
from trinity_mq.experience import EID, ExperienceBatch
from trinity_mq.observability.experiences.show_experience import as_json, json_fields
from trinity_mq.observability.experiences.tap import ExperienceLinePrinter, select_fields
from trinity_mq.observability.experiences.token_texts import TokenTexts


def test_parts_of_a_field_by_a_dot_and_what_is_not_there_as_null() -> None:
    whole = {"eid": {"batch": 1}, "metrics": {"a.b": 2.0}, "reward": 1.0}
    assert select_fields(whole, ["reward", "eid.batch", "eid.none", "prompt_text", "reward.x"]) == {
        "reward": 1.0,
        "eid.batch": 1,
        "eid.none": None,
        "prompt_text": None,
        "reward.x": None,
    }


def test_every_field_of_an_experience_may_be_chosen() -> None:
    one = experience(length=5, advantages=[0.0, 0.0, 0.0], response_text="x")
    assert set(as_json(one, TokenTexts())) <= set(json_fields())


def test_each_third_one_over_the_limits_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ExperienceLinePrinter(None, ["eid.run"], 3)
    made = [experience(eid=EID(batch=1, task=0, run=run)) for run in range(10)]
    for part in (made[:1], made[1:5], made[5:]):
        assert lines.take([ExperienceBatch.of(part)]) is False
    shown = [json.loads(line)["eid.run"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [0, 3, 6, 9]
    assert lines.printed == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "yesterday"], "wanted beginning, now, or the number of a batch"),
        (["--no-follow"], "--from now with --no-follow shows nothing"),
        (["--every", "0"], "wanted at least 1"),
        (["--fields", "reward,advantage"], "wanted names separated by commas, out of: eid"),
        (["--fields", ","], "wanted names separated by commas"),
        ([], "no broker is known for run 'nowhere'"),
    ],
)
def test_mistakes_are_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRINITY_MQ_BROKER_URL", "TRINITY_MQ_BROKER_URL_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["tap", "nowhere", *words]) == 2
    assert said in capsys.readouterr().err

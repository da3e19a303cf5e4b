r"""The wordings in which models state a number: ``\boxed{}``, ``<answer>``, ``####``, a sentence, unmarked text."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trinity_mq.rewards import create_reward, parts_of

WORDINGS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("wordings.yaml").read_text(encoding="utf-8"))
REASONING = "Each of the 16 hens lays 3 eggs a day, of which 4 break: 16 * 3 - 4 = 44.\nAt $2 an egg, that is $88.\n"
NUMBERS = ("18", "1,234", "70000", "2.5", "-7")
REWARDS = ("math_answer", "math_equal")
CUT = {"boxed": 1.0, "tag": 1.0, "hashes": 1.0, "sentence": 0.0, "unmarked": 0.0}
"""Accuracy of a response that was cut behind its answer."""


pytestmark = pytest.mark.usefixtures("exact_only")


def accuracy(name: str, response: str, truth: str, *, finished: bool = True) -> float:
    return parts_of(create_reward(name, {}), response, truth, finished=finished)["accuracy"]


def other_numbers(number: str) -> Iterator[str]:
    plain = number.replace(",", "")
    size = plain.removeprefix("-")
    turned = f"-{size}" if size == plain else size
    yield from (
        f"{plain}1",
        plain.replace(size, f"1{size}"),
        turned,
        str(Fraction(plain) + 1),
        f"{plain}5" if "." in plain else f"{plain}.5",
    )


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("form", WORDINGS)
def test_each_wording_is_right_for_its_number_and_for_no_other(form: str, name: str) -> None:
    verdicts = []
    for wording in WORDINGS[form]:
        for number in NUMBERS:
            for before in ("", REASONING):
                response = before + wording.replace("N", number)
                verdicts.append((accuracy(name, response, number), 1.0, response, number))
                verdicts += [(accuracy(name, response, wrong), 0.0, response, wrong) for wrong in other_numbers(number)]
    assert [verdict for verdict in verdicts if verdict[0] != verdict[1]] == []


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("form", WORDINGS)
def test_a_cut_response_counts_by_its_marks_only(form: str, name: str) -> None:
    for wording in WORDINGS[form]:
        if not any(mark in wording for mark in ("####", "\\boxed")) or CUT[form]:
            assert accuracy(name, wording.replace("N", "18") + "\n", "18", finished=False) == CUT[form], wording


WHOLE = st.integers(0, 10**6)
DECIMAL = st.decimals(0, 10**6, places=2).map(str)
NUMBER = WHOLE.map(str) | WHOLE.map("{:,}".format) | DECIMAL
WORD = st.sampled_from("eggs dollars of the every hour total she makes now bought therefore in".split())  # noqa: SIM905
WORDS = st.lists(WORD, max_size=5).map(" ".join)
MARK = st.sampled_from(
    ["\\boxed{%s}", "\\boxed{\\text{%s}}", "<answer>%s</answer>", "#### %s", "The answer is %s.", "So %s."]
)


@given(mark=MARK, before=WORDS, behind=WORDS, number=NUMBER, truth=NUMBER, name=st.sampled_from(REWARDS))
@settings(deadline=None, max_examples=examples(150))
def test_words_around_a_number_do_not_change_the_verdict(
    mark: str, before: str, behind: str, number: str, truth: str, name: str
) -> None:
    worded = mark % f"{before} {number} {behind}".strip()
    for right in (truth, number):
        assert accuracy(name, worded, right) == accuracy(name, mark % number, right), worded

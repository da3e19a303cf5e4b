import re

import pytest

from trinity_mq.data import TasksetError
from trinity_mq.data.synthetic import KINDS, problems


def signed(match):
    return f"{match[1]} {'+' if match[2] else '-'} {match[3]}"


WANTED = {
    "ops3": (3000, r"[-+,]\d{3}=", lambda q: sorted(q[1:4])["-,+".index(q[0])]),
    "max3": (1000, r"\d,\d,\d=", lambda q: max(q[:-1].split(","))),
    "copy3": (1000, r"\d{3}=", lambda q: q[:-1]),
    "sort3": (1000, r"\d{3}=", lambda q: "".join(sorted(q[:-1]))),
    "sums": (2304, r"What is \d+ \+ \d+\?", lambda q: str(eval(q.removeprefix("What is ")[:-1]))),
    "word_problems": (
        1276,
        r"(\w+) has (\d+) (\w+) and (buys|finds|gives|loses) (\d+) (more|away|of them)\. "
        r"How many \3 does \1 have now\?",
        lambda q: str(eval(re.sub(r"\w+ has (\d+) .* (?:(buys|finds)|gives|loses) (\d+) .*", signed, q))),
    ),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_all_problems_are_there_once_and_right(kind):
    total, form, answer = WANTED[kind]
    train, test = problems(kind, "train"), problems(kind, "test")
    assert len(test) == min(256, total // 5)
    assert len({row["question"] for row in train + test}) == len(train) + len(test) == total
    for row in train + test:
        assert re.fullmatch(form, row["question"])
        assert row["answer"] == answer(row["question"])


def test_the_held_out_part_is_the_same_on_every_machine():
    # A change here makes accuracies of different releases incomparable, and resumed runs train on what was held out.
    assert problems("ops3", "test")[:2] == [{"question": "+360=", "answer": "6"}, {"question": "+355=", "answer": "5"}]


@pytest.mark.parametrize(
    ("kind", "split", "said"),
    [("ops", "train", "did you mean 'ops3'"), ("xyz", "train", "there are copy3"), ("ops3", "dev", "no split 'dev'")],
)
def test_unknown_names_are_refused(kind, split, said):
    with pytest.raises(TasksetError, match=said):
        problems(kind, split)

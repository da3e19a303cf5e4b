"""Topic matching against a second definition of it: a regular expression."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.bus.memory.bus import topic_matches

WORDS = st.lists(st.sampled_from(["a", "b", "train", "3%2Ex"]), max_size=5)
PATTERNS = st.lists(st.sampled_from(["a", "b", "train", "3%2Ex", "*", "#"]), max_size=5)


def by_regex(pattern: list[str], key: list[str]) -> bool:
    parts = {"*": r"\.[^.]+", "#": r"(?:\.[^.]+)*"}
    wanted = "".join(parts.get(word, re.escape(f".{word}")) for word in pattern)
    return re.fullmatch(wanted, "".join(f".{word}" for word in key)) is not None


@given(PATTERNS, WORDS)
def test_matches_as_a_regular_expression_does(pattern: list[str], key: list[str]) -> None:
    assert topic_matches(".".join(pattern), ".".join(key)) == by_regex(pattern, key)


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("#", "", True),
        ("#", "a.b.c", True),
        ("*", "", False),
        ("train.#", "train", True),
        ("train.#", "train.3.gsm8k", True),
        ("train.#", "trainer.3", False),
        ("*.b", "a.b", True),
        ("*.b", "a.a.b", False),
        ("#.b.#", "b", True),
    ],
)
def test_known_cases(pattern: str, key: str, fits: bool) -> None:
    assert topic_matches(pattern, key) is fits

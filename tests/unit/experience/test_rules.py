import itertools

import numpy as np
import pytest

from trinity_mq.experience import ExperienceError
from trinity_mq.experience.codec.column_rules import check_batch, first_bad
from trinity_mq.experience.rules import TYPES, check_lengths

FIELDS = ("tokens", "action_mask", "logprobs", "chosen", "rejected", "routed_experts")


def breaks(kind, status, prompt, lengths):
    try:
        check_lengths(kind, status, prompt, {name: length for name, length in lengths.items() if length >= 0})
    except ExperienceError:
        return True
    return False


def columns(rows):
    return {name: np.array([lengths[name] for *_, lengths in rows]) for name in FIELDS}


def first(rows):
    kinds, statuses, prompts, _ = zip(*rows, strict=True)
    return first_bad(kinds, statuses, np.array(prompts), columns(rows))


def test_columns_and_single_experiences_are_judged_alike():
    good, bad = [], 0
    lengths = itertools.product(range(3), range(-1, 3), range(-1, 3), range(-1, 2), range(-1, 2), range(-1, 2))
    for sizes, kind, status, prompt in itertools.product(lengths, TYPES, (None, "prompt_truncated"), range(2)):
        row = (kind, status, prompt, dict(zip(FIELDS, sizes, strict=True)))
        if breaks(*row):
            bad += 1
            assert first([row]) == 0, row
        else:
            good.append(row)
    assert first(good) is None
    assert {row[:2] for row in good} == set(itertools.product(TYPES, (None, "prompt_truncated")))
    assert bad > len(good)


def test_error_of_a_batch_names_the_experience():
    right = {"tokens": 3, "action_mask": 2, "logprobs": 2, "chosen": -1, "rejected": -1, "routed_experts": -1}
    rows = [("single_turn", None, 1, right), ("single_turn", None, 1, right | {"logprobs": 5})]
    kinds, statuses, prompts, _ = zip(*rows, strict=True)
    with pytest.raises(ExperienceError, match=r"^experience 1: logprobs has 5 values.*3 - 1 = 2"):
        check_batch(kinds, statuses, prompts, columns(rows))

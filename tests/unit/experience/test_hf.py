import sys

import pytest
import torch

from trinity_mq.experience import ExperienceError, from_hf_datasets, to_hf_datasets
from trinity_mq.experience.hf import from_record, to_record


def test_records_give_back_equal_experiences(single, multi, dpo):
    given = [single, multi, dpo]
    records = [to_record(item) for item in given]
    assert len({tuple(record) for record in records}) == 1, "a dataset wants the same columns in every row"
    assert [from_record(record) for record in records] == given


def test_records_hold_only_what_arrow_holds(single):
    allowed = (str, int, float, bool, bytes, type(None))
    for name, value in to_record(single).items():
        items = value if isinstance(value, list) else [value]
        assert all(type(item) in allowed for item in items), name


def test_edited_columns_count(single):
    record = to_record(single) | {
        "reward": 0.25,
        "advantages": [0.5, 0.5, 0.5],
        "returns": [4.0, 5.0, 6.0],
        "task": "8",
        "run": 9,
        "prompt_text": None,
    }
    back = from_record(record)
    assert (back.reward, back.prompt_text) == (0.25, None)
    assert back.advantages.tolist() == [0.5, 0.5, 0.5]
    assert (back.returns.dtype, back.returns.tolist()) == (torch.bfloat16, [4.0, 5.0, 6.0])
    assert (back.eid.batch, back.eid.task, back.eid.run) == ("3/gsm8k", "8", 9)
    assert (back.info, back.custom_fields, back.experience_type) == (single.info, single.custom_fields, "single_turn")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"logprobs": [0.5]}, "logprobs has 1 values"),
        ({"logprobs": [0.5, None, 0.5]}, "logprobs is .*wanted numbers"),
        ({"tokens": [1, 2, 3, 4, 5.5]}, "tokens holds torch.float32"),
        ({"tokens": [1, 2, 3, 4, 2**31]}, "tokens holds 2147483648"),
        ({"action_mask": [0, 1, 2]}, "action_mask holds 2"),
        ({"reward": "good"}, "reward is 'good'"),
    ],
)
def test_an_edit_that_breaks_a_rule_is_refused(single, edit, said):
    with pytest.raises(ExperienceError, match=said):
        from_record(to_record(single) | edit)


def test_dropped_columns_come_from_the_body(single):
    record = {name: value for name, value in to_record(single).items() if name in {"experience", "reward"}}
    assert from_record(record) == single


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match=r"column 'experience'.*to_hf_datasets"):
        from_record({"tokens": [1, 2]})


def test_missing_package_says_what_to_install(single, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'trinity-mq\[datasets\]'"):
        to_hf_datasets([single])


def test_reads_any_iterable_of_rows(single, multi):
    assert from_hf_datasets([to_record(single), to_record(multi)]) == [single, multi]

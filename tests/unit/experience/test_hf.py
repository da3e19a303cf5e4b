"""Through the real package: what goes into a dataset comes back equal, whatever a user does to the dataset between."""

import dataclasses
import sys

import datasets
import pytest
import torch

from trinity_mq.experience import EID, Experience, ExperienceBatch, ExperienceError, from_hf_datasets, to_hf_datasets
from trinity_mq.experience.hf import from_record, to_record


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


def bare(number, **fields):
    """Return an experience with nothing but what is wanted."""
    return Experience(eid=EID(1, number, 0, 0, f"s{number}"), tokens=[1, 2, 3, 4], prompt_length=2, **fields)


@pytest.fixture
def all_types(single, multi, dpo):
    cut = bare(0, logprobs=[0.0] * 3, truncate_status="prompt_truncated")
    return [single, multi, dpo, cut, bare(1)]


@pytest.fixture
def many(all_types):
    """Return a function that makes experiences of all types that differ in which fields they have."""

    def make(count):
        changes = (
            {"reward": None, "info": {}, "metrics": {}},
            {"reward": 1.5, "info": {"a": [1, {"b": None}]}, "prompt_text": None},
            {"reward": -0.5, "info": {"a": "text", "t": torch.arange(3)}, "index": None},
            {"multi_modal_inputs": {"p": torch.ones(2, 2)}, "custom_fields": []},
        )
        return [
            dataclasses.replace(
                all_types[number % 5],
                eid=EID(f"{number // 100}/b", number // 8 if number % 2 else f"t{number // 8}", number % 8, number % 3),
                **changes[number % 4],
            )
            for number in range(count)
        ]

    return make


def on_disk(dataset, folder):
    dataset.save_to_disk(str(folder / "saved"))
    return datasets.load_from_disk(str(folder / "saved"))


def in_parquet(dataset, folder):
    dataset.to_parquet(folder / "saved.parquet")
    return datasets.Dataset.from_parquet(str(folder / "saved.parquet"), cache_dir=str(folder))


@pytest.mark.parametrize(
    "through", [lambda dataset, _: dataset, on_disk, in_parquet], ids=["memory", "disk", "parquet"]
)
class TestRoundTrip:
    def test_all_types_and_dtypes(self, all_types, through, tmp_path):
        back = from_hf_datasets(through(to_hf_datasets(all_types), tmp_path))
        assert back == all_types
        assert [item.experience_type for item in back] == [item.experience_type for item in all_types]
        assert back[0].returns.dtype == torch.bfloat16
        assert back[0].custom_fields == all_types[0].custom_fields

    def test_a_thousand_that_differ(self, many, through, tmp_path):
        given = [*many(1000), *(bare(number) for number in range(3))]
        assert from_hf_datasets(through(to_hf_datasets(given), tmp_path)) == given


def test_columns_have_the_same_types_whatever_they_hold(all_types, many):
    full = to_hf_datasets(all_types)
    for other in ([], [bare(0)], many(20)):
        assert to_hf_datasets(other).features == full.features
    assert {str(feature.dtype) for feature in full.features.values() if hasattr(feature, "dtype")}.isdisjoint({"null"})


def test_without_the_body_says_what_is_wanted(single):
    with pytest.raises(ValueError, match=r"column 'experience'.*to_hf_datasets"):
        from_hf_datasets(to_hf_datasets([single]).remove_columns(["experience"]))


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


def test_missing_package_says_what_to_install(single, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'trinity-mq\[datasets\]'"):
        to_hf_datasets([single])


OTHERS = [name for name in to_hf_datasets([]).column_names if name != "experience"]
BETWEEN = {
    "joined": lambda dataset: datasets.concatenate_datasets([to_hf_datasets([]), dataset]),
    "filtered": lambda dataset: dataset.filter(lambda row: row["reward"] is None or row["reward"] > -9),
    "sorted": lambda dataset: dataset.sort("reward", reverse=True),
    "selected": lambda dataset: dataset.select(range(len(dataset))[::-1]),
    "other columns dropped": lambda dataset: dataset.remove_columns(OTHERS),
    "streamed": lambda dataset: dataset.to_iterable_dataset(),
    **{kind: lambda dataset, kind=kind: dataset.with_format(kind) for kind in ("torch", "numpy", "pandas", "arrow")},
}


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # datasets 5.2 calls pyarrow the old way
@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_is_done_to_a_dataset_its_rows_give_the_experiences_back(many, all_types, name):
    given = [*many(20), *all_types]
    back = from_hf_datasets(BETWEEN[name](to_hf_datasets(ExperienceBatch.of(given))))
    by_id = {item.eid.uid: item for item in given}
    assert len(back) == len(by_id) == len(given)
    assert all(item == by_id[item.eid.uid] for item in back)


def test_info_metrics_and_messages_are_columns_that_can_be_filtered_and_edited(many, all_types):
    given = [*many(8), *all_types]
    given[0].info = {"score": 3, "none": None, "nan": float("nan"), "huge": 2**63, "raw": b"ab", "t": torch.ones(2)}
    given[0].metrics = {"accuracy": 1 / 3}
    dataset = to_hf_datasets(given)

    assert dataset[0]["info"] == {
        "score": 3, "none": None, "nan": None, "huge": str(2**63), "raw": "<2 bytes>", "t": [1, 1],
    }  # fmt: skip
    kept = dataset.filter(lambda row: row["info"].get("score") == 3 and row["metrics"]["accuracy"] > 0.3)
    assert from_hf_datasets(kept) == [given[0]]

    rounded = dataset.map(lambda row: row, load_from_cache_file=False)
    assert from_hf_datasets(rounded) == given

    def edit(row):
        return row | {"metrics": {"accuracy": 0.5}, "messages": [{"role": "user", "content": "edited"}]}

    edited = from_hf_datasets(dataset.select([0]).map(edit, load_from_cache_file=False))[0]
    assert (edited.metrics, edited.messages[0]["content"]) == ({"accuracy": 0.5}, "edited")
    assert edited.info["huge"] == 2**63, "what is not edited comes from the body"


def trinity_rows():
    """Return rows with the columns of Trinity-RFT's function: each field of its class, tensors as lists."""
    absent = dict.fromkeys((
        "token_level_reward", "advantages", "returns", "truncate_status", "prompt_text", "tools", "chosen", "rejected",
        "chosen_messages", "rejected_messages", "multi_modal_inputs", "teacher_logprobs", "routed_experts",
    ))  # fmt: skip
    eid = {"batch": "3/gsm8k", "task": 7, "run": 2, "step": 1, "suffix": "ab12cd"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
    first = absent | {
        "eid": eid,
        "tokens": [1, 2, 3, 4],
        "prompt_length": 2,
        "logprobs": [-0.5, -0.25],
        "reward": 1.0,
        "info": {"model_version": 4},
        "metrics": {"accuracy": 1.0},
        "response_text": "four",
        "action_mask": [True, True],
        "messages": [{"role": "user", "content": "2+2"}, call],
        "custom_fields": [],
    }
    other = {"info": {"other": "x"}, "metrics": {}, "action_mask": [True, False], "messages": None}
    pair = {"tokens": [1, 2], "logprobs": None, "action_mask": None, "chosen": [5, 6], "rejected": [7]}
    return [first, first | other, first | pair]


@pytest.mark.parametrize("through", [lambda dataset, _: dataset, in_parquet], ids=["memory", "parquet"])
def test_a_dataset_of_trinity_rft_gives_its_experiences(through, tmp_path):
    single, multi, pair = from_hf_datasets(through(datasets.Dataset.from_list(trinity_rows()), tmp_path))

    assert [item.experience_type for item in (single, multi, pair)] == ["single_turn", "multi_turn", "dpo"]
    assert single.eid == EID("3/gsm8k", 7, 2, 1, "ab12cd")
    assert single.eid.uid == "3/gsm8k/7/2/1/ab12cd"
    assert (single.tokens.dtype, single.logprobs.tolist(), single.reward) == (torch.int32, [-0.5, -0.25], 1.0)
    assert (single.info, single.metrics, multi.info, multi.metrics) == (
        {"model_version": 4},
        {"accuracy": 1.0},
        {"other": "x"},
        {},
    )
    assert multi.action_mask.tolist() == [True, False]
    assert single.messages[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function"}],
    }
    assert (pair.chosen.tolist(), pair.rejected.tolist(), pair.prompt_length) == ([5, 6], [7], 2)
    assert from_hf_datasets(to_hf_datasets([single, multi, pair])) == [single, multi, pair]
    named = from_record(trinity_rows()[1] | {"experience_type": "single_turn"})
    assert named.experience_type == "single_turn", "a type that somebody adds counts"

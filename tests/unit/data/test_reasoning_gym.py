"""Tasksets of reasoning-gym, made by the real library."""

from __future__ import annotations

import sys

import pytest
from pydantic import ValidationError

from trinity_mq.config import TasksetConfig
from trinity_mq.data import TasksetError, open_taskset
from trinity_mq.data.reasoning_gym_records import is_held_out
from trinity_mq.messages import TaskSubmission, decode, encode
from trinity_mq.rewards import reasoning_gym_scores

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: a part of it needs a C compiler")

SUMS = {"min_terms": 2, "max_terms": 3, "max_digits": 2}


def config(path="chain_sum", **keys):
    keys.setdefault("limit", 20)
    return TasksetConfig(name="mine", storage_type="reasoning_gym", path=path, **keys)


def questions(taskset):
    return [body.raw_task["question"] for body in taskset.all_tasks()]


def test_a_record_has_all_that_a_reward_needs_and_travels():
    taskset = open_taskset(config(dataset_args=SUMS), seed=7)
    body = taskset.all_tasks()[0]
    assert body.reward_fn == "reasoning_gym_reward"
    assert config(reward_fn="exact_match").reward_fn == "exact_match"
    record = body.raw_task
    assert record.keys() == {"question", "answer", "metadata", "reasoning_gym"}
    assert record["reasoning_gym"].items() >= {"dataset": "chain_sum", "args": SUMS}.items()
    assert record["metadata"]["source_dataset"] == "chain_sum"
    assert decode(encode(TaskSubmission(task=body)), TaskSubmission).task == body, "lists stay lists"


def test_the_seed_of_the_run_draws_the_records_and_one_of_their_own_comes_first():
    first, again, other = (open_taskset(config(dataset_args=SUMS), seed=seed) for seed in (1, 1, 2))
    assert questions(first) == questions(again)
    assert first.identity == again.identity
    assert len(set(questions(first)) & set(questions(other))) < 5, "not the same ones, some places further on"
    fixed = [open_taskset(config(dataset_args={**SUMS, "seed": 5}), seed=seed) for seed in (1, 2)]
    assert questions(fixed[0]) == questions(fixed[1])
    assert fixed[0].identity == fixed[1].identity


def test_whatever_makes_other_tasks_or_other_scores_makes_another_identity():
    parts = [
        {"name": "chain_sum", "weight": 2, "config": {"max_terms": 2}},
        {"name": "products", "config": {"max_digits": 1}},
    ]
    made = [
        config(dataset_args=SUMS),
        config(dataset_args={**SUMS, "allow_negation": True}),
        config(dataset_args={**SUMS, "seed": 1}),
        config(dataset_args=SUMS, limit=19),
        config("products", dataset_args={"max_digits": 2}),
        config(dataset_args=SUMS, split="test"),
        config("puzzle24"),
        config("puzzle24", dataset_args={"max_value": 10}),
        config("composite", dataset_args={"datasets": parts}),
    ]
    tasksets = [open_taskset(one, seed=0) for one in made]
    assert len({taskset.identity for taskset in tasksets}) == len(made)
    assert questions(tasksets[6]) == questions(tasksets[7]), "its arguments may change how answers are scored"
    assert [len(taskset) for taskset in tasksets[2:4]] == [20, 19]
    assert len(open_taskset(config(limit=None))) == 500
    sources = {body.raw_task["metadata"]["source_dataset"] for body in tasksets[8].all_tasks()}
    assert sources == {"chain_sum", "products"}
    assert open_taskset(made[0], seed=1).identity != tasksets[0].identity


def test_training_and_evaluation_share_no_question():
    small = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    trained, held_out = (
        set(questions(open_taskset(config(dataset_args=small, split=split, limit=400), seed=seed)))
        for split, seed in (("train", 0), ("test", 3))
    )
    assert len(trained) > 50 < 5 * len(held_out)
    assert not trained & held_out
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, held_out))


@pytest.mark.parametrize(
    ("path", "args", "said"),
    [
        ("chain_sums", {}, r"taskset 'mine': reasoning-gym has no dataset 'chain_sums'; did you mean 'chain_sum'"),
        ("qqq", {}, r"no dataset 'qqq'; there are ab, acre, advanced_geometry"),
        ("chain_sum", {"max_term": 2}, r"max_term does not exist in dataset 'chain_sum'; did you mean 'max_te"),
        ("chain_sum", {"zzz": 2}, r"zzz does not exist .*; there are allow_negation, max_digits, max_terms"),
        ("chain_sum", {"size": 2}, r"dataset_args.size does not exist: limit of the taskset"),
        ("chain_sum", {"max_terms": 1}, r"dataset_args \{'max_terms': 1\}: max_terms must be >= min_terms"),
        ("chain_sum", {"max_terms": "many"}, r"does not take dataset_args"),
        ("simple_integration", {}, r"nothing that a model wrote is executed here"),
        ("composite", {}, r"wanted a list such as \[\{name: chain_sum, weight: 1"),
        ("composite", {"datasets": [{"name": "simple_integration"}]}, r"nothing that a model wrote is executed here"),
        ("composite", {"datasets": [{"name": "chain_sum", "args": {}}]}, r"'args' is not one of name, weight, config"),
    ],
)
def test_what_is_wrong_is_said(path, args, said):
    with pytest.raises(TasksetError, match=said):
        open_taskset(config(path, dataset_args=args))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym_scores.registered_datasets.cache_clear()
    with pytest.raises(TasksetError, match=r"pip install 'trinity-mq\[reasoning-gym\]'"):
        open_taskset(config())


def test_a_split_without_a_question_is_said():
    sizes, said = [], set()
    for number in range(1, 21):  # a dataset of one question
        one = config("count_bits", dataset_args={"min_n": number, "max_n": number}, limit=1, split="test")
        try:
            sizes.append(len(open_taskset(one)))
        except TasksetError as raised:
            said.add("belongs to split 'test'; one in 5" in str(raised))
            sizes.append(0)
    assert said == {True}
    assert set(sizes) == {0, 1}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"split": "validation"}, "has split 'validation'; reasoning_gym has 'train' and 'test'"),
        ({"storage_type": "synthetic", "path": "max3", "dataset_args": {"a": 1}}, "storage_type synthetic, which"),
        ({"path": ""}, "needs a path"),
    ],
)
def test_settings_that_do_not_go_together(keys, said):
    with pytest.raises(ValidationError, match=said):
        TasksetConfig.model_validate({"name": "mine", "storage_type": "reasoning_gym", "path": "chain_sum", **keys})


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(120)
def test_every_dataset_gives_records_that_travel():
    names = reasoning_gym_scores.registered_datasets().keys() - reasoning_gym_scores.REFUSED - {"composite"}
    assert len(names) > 90
    for name in sorted(names):
        for body in open_taskset(config(name, limit=1)).all_tasks():
            assert decode(encode(TaskSubmission(task=body)), TaskSubmission).task == body, name

"""Scores of reasoning-gym, by the real library."""

import json
import re
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from trinity_mq.config import TasksetConfig
from trinity_mq.data import open_taskset
from trinity_mq.rewards import RewardError, create_reward, parts_of, reasoning_gym_scores
from trinity_mq.rewards.reasoning_gym_scores import REFUSED, SAFE, registered_datasets

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: a part of it needs a C compiler")


def record_of(name, **args):
    taskset = TasksetConfig(storage_type="reasoning_gym", path=name, dataset_args=args, limit=1)
    return open_taskset(taskset).all_tasks()[0].raw_task


def score(response, record, *, finished=True):
    return parts_of(create_reward("reasoning_gym_reward", {}), response, None, finished=finished, record=record)


RIGHT, WRONG = {"accuracy": 1.0, "partial_credit": 0.0}, {"accuracy": 0.0, "partial_credit": 0.0}


def test_the_dataset_scores_what_the_response_states():
    record = record_of("chain_sum")
    answer = record["answer"]
    assert score(answer, record) == RIGHT
    assert score(f"I think: <answer> {answer} </answer> is it", record, finished=False) == RIGHT
    assert score(f"so \\boxed{{{answer}}}", record) == RIGHT
    assert score(answer, record, finished=False) == WRONG, "a cut response states nothing by itself"
    assert score("", record) == WRONG
    assert score(f"<answer>7{answer}</answer>", record)["accuracy"] == 0.0


def test_arguments_of_the_dataset_are_those_of_its_scores():
    """It has no single right answer: what is within the tolerance of its own arguments is right."""
    places = "min_num_decimal_places", "max_num_decimal_places"
    exact, rough = (record_of("decimal_arithmetic", **dict.fromkeys(places, number)) for number in (6, 1))
    assert score(str(float(rough["answer"]) + 0.04), rough) == RIGHT
    assert score(str(float(exact["answer"]) + 0.04), exact) == WRONG


def test_a_record_alone_is_enough_in_another_process():
    record = record_of("propositional_logic")
    packed = msgpack.packb({"record": record, "answer": record["metadata"]["example_answer"]}).hex()
    code = (
        "import msgpack, sys\n"
        "from trinity_mq.rewards import create_reward, parts_of\n"
        "given = msgpack.unpackb(bytes.fromhex(sys.argv[1]))\n"
        "reward = create_reward('reasoning_gym_reward', {})\n"
        "assert 'reasoning_gym' not in sys.modules, 'it is imported only when it is used'\n"
        "print(parts_of(reward, given['answer'], None, finished=True, record=given['record']))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, packed], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.replace("'", '"')) == RIGHT


COMPOSITE = {"datasets": [{"name": "products", "weight": 1, "config": {"max_digits": 1}}]}


@pytest.mark.parametrize(
    ("name", "args", "answer", "parts"),
    [
        ("graph_color", {}, lambda record: json.dumps(record["metadata"]["possible_answer"]), RIGHT),
        ("composite", COMPOSITE, lambda record: record["answer"], RIGHT),
        ("countdown", {}, lambda record: record["metadata"]["expression"], RIGHT),
        ("countdown", {}, lambda record: "9**9**9**9**9", {"accuracy": 0.0}),
        ("prime_factorization", {}, lambda record: "no factors at all", WRONG),
        ("coin_flip", {}, lambda record: record["answer"], RIGHT),
        ("coin_flip", {}, lambda record: "1e999999999", WRONG),
        ("coin_flip", {}, lambda record: "1e9_9_9_9_9_9_9_9_9", WRONG),
        ("complex_arithmetic", {}, lambda record: record["answer"], RIGHT),
        ("complex_arithmetic", {}, lambda record: "nan", WRONG),
        ("complex_arithmetic", {}, lambda record: "3+nani", WRONG),
        ("rush_hour", {}, lambda record: "E+99999999999", WRONG),
        ("rush_hour", {}, lambda record: "E+9999 E-9999 " * 500, WRONG),
        ("game_of_life_halting", {}, lambda record: record["answer"], RIGHT),
        ("game_of_life_halting", {}, lambda record: "False" if record["answer"] == "True" else "True", WRONG),
        (
            "spiral_matrix",
            {},
            lambda record: str([*map(int, record["answer"].split())]),
            {**WRONG, "partial_credit": 0.1},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_scores_by_its_dataset_after_its_journey(name, args, answer, parts):
    record = record_of(name, **args)
    found = score(answer(record), record)
    assert found == {**found, **parts}


def test_a_partial_score_is_no_accuracy():
    record = record_of("spell_backward", min_word_len=4, max_word_len=4)
    parts = score(record["answer"][:2], record)
    assert parts["accuracy"] == 0.0
    assert 0.4 < parts["partial_credit"] < 0.6


ORIGIN = {"dataset": "gone", "args": {}, "seed": 0}
NEEDED = r"needs the task's record.*use a taskset of storage_type: reasoning_gym"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        *(
            (record, NEEDED)
            for record in (None, {}, {"question": "q", "answer": "a"}, {"reasoning_gym": {}, "metadata": {}})
        ),
        ({"question": "q", "answer": "a", "metadata": {}, "reasoning_gym": ORIGIN}, "no dataset 'gone'"),
    ],
)
def test_another_record_is_refused(record, said):
    with pytest.raises(RewardError, match=said):
        score("x", record)


@pytest.mark.parametrize("name", sorted(SAFE))
def test_nothing_that_a_model_wrote_is_executed(name, tmp_path):
    mark = tmp_path / "executed"
    record = record_of(name)
    for answer in (
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"[__import__('pathlib').Path({str(mark)!r}).touch()]",
        f"open({str(mark)!r}, 'w')",
    ):
        assert score(answer, record)["accuracy"] == 0.0
    assert not mark.exists()
    if record["answer"] is not None:
        right = record["answer"]
        assert score(right, record) == RIGHT, "what reads literals and formulas understands the right answer"


EVALUATES = re.compile(r"(?<![.\w])(?:eval|exec|compile|__import__)\(|\b(?:parse_expr|sympify|system|Popen)\(")
HARMLESS = {
    "basic_arithmetic": "expressions that it generated itself",
    "bitwise_arithmetic": "the problem of the record",
    "codeio": "its own data, while it generates",
    "gsm_symbolic": "its own fractions, while it generates",
    "propositional_logic": "a parser of its own, of that name",
}


def test_every_dataset_that_evaluates_anything_is_known():
    """A new release may have more: look at whether they evaluate the answer, and say so in SAFE, REFUSED or here."""
    folders = {
        name: Path(sys.modules[kind.__module__].__file__)
        for name, (kind, _) in reasoning_gym_scores.registered_datasets().items()
    }
    found = set()
    for name, file in folders.items():
        texts = [file, *file.parent.glob("generators_*.py")]
        if any(EVALUATES.search(path.read_text(encoding="utf-8")) for path in texts):
            found.add(name)
    assert found == {*SAFE, *REFUSED, *HARMLESS}
    assert registered_datasets().keys() >= REFUSED

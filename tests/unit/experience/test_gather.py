import random

import pytest
import torch

from trinity_mq.experience import (
    CustomField,
    Experience,
    ExperienceBatch,
    decode,
    encode,
    gather_action_masks,
    gather_attention_masks,
    gather_custom_fields,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
)


@pytest.fixture
def pair():
    return [
        Experience(tokens=[1, 2, 3, 4, 5], prompt_length=2, logprobs=[-1.0, -2.0, -3.0]),
        Experience(tokens=[7, 8, 9], prompt_length=1, logprobs=[-4.0, -5.0], action_mask=[0, 1]),
    ]


def test_documented_example(pair):
    tokens = gather_token_ids(pair, 3, 4, 0)
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5, 0], [0, 0, 7, 8, 9, 0, 0]]
    assert tokens.dtype == torch.int32
    attention = gather_attention_masks(pair, 3, 4)
    assert attention.tolist() == [
        [False, True, True, True, True, True, False],
        [False, False, True, True, True, False, False],
    ]
    masks = gather_action_masks(pair, 4)
    assert masks.dtype == torch.bool
    assert masks.tolist() == [[True, True, True, False], [False, True, False, False]]
    logprobs = gather_response_attrs(pair, "logprobs", 4, pad_value=9)
    assert logprobs.tolist() == [[-1.0, -2.0, -3.0, 9.0], [-4.0, -5.0, 9.0, 9.0]]


def test_exact_fit_needs_no_padding(pair):
    assert gather_token_ids(pair[:1], 2, 3, 0).tolist() == [[1, 2, 3, 4, 5]]


def test_agrees_with_plain_loops():
    rng = random.Random(1)
    for _ in range(30):
        given = []
        for _ in range(rng.randint(1, 6)):
            prompt, response = rng.randint(1, 5), rng.randint(1, 5)
            tokens = [rng.randrange(1000) for _ in range(prompt + response)]
            given.append(
                Experience(tokens=tokens, prompt_length=prompt, logprobs=[rng.random() for _ in range(response)])
            )
        tokens, attention, logprobs = [], [], []
        for item in given:
            left, right = 6 - item.prompt_length, 7 - item.response_length
            tokens.append([99] * left + item.tokens.tolist() + [99] * right)
            attention.append([False] * left + [True] * len(item.tokens) + [False] * right)
            logprobs.append(item.logprobs.tolist() + [0.0] * right)
        assert gather_token_ids(given, 6, 7, 99).tolist() == tokens
        assert gather_attention_masks(given, 6, 7).tolist() == attention
        assert gather_response_attrs(given, "logprobs", 7).tolist() == logprobs


def test_dtypes(pair):
    for item, dtype in zip(pair, (torch.bfloat16, torch.bfloat16), strict=True):
        item.logprobs = item.logprobs.to(dtype)
    assert gather_response_attrs(pair, "logprobs", 4).dtype == torch.bfloat16
    pair[1].logprobs = pair[1].logprobs.float()
    assert gather_response_attrs(pair, "logprobs", 4).dtype == torch.float32


@pytest.mark.parametrize(
    ("gather", "said"),
    [
        (lambda pair: gather_token_ids(pair, 1, 4, 0), r"experience 0 .*prompt of 2 tokens.*max_prompt_length = 1"),
        (lambda pair: gather_token_ids(pair, 3, 2, 0), r"experience 0 .*response of 3 tokens.*max_response_length = 2"),
        (lambda pair: gather_attention_masks(pair[::-1], 1, 4), r"experience 1 .*prompt of 2 tokens"),
        (lambda pair: gather_action_masks(pair, 2), r"experience 0 .*3 values in action_mask.*max_response_length = 2"),
        (lambda pair: gather_response_attrs(pair, "logprobs", 2), "3 values in logprobs"),
        (lambda pair: gather_response_attrs(pair, "returns", 4), "experience 0 .*has no returns"),
        (lambda pair: gather_response_attrs(pair, "nonsense", 4), "has no nonsense"),
        (lambda _: gather_token_ids([], 3, 4, 0), "no experiences"),
        (lambda _: gather_attention_masks([], 3, 4), "no experiences"),
        (lambda _: gather_action_masks([], 4), "no experiences"),
        (lambda _: gather_response_attrs([], "logprobs", 4), "no experiences"),
        (lambda _: gather_multi_modal_inputs([]), "no experiences"),
    ],
)
def test_refused_with_a_reason(pair, gather, said):
    with pytest.raises(ValueError, match=said):
        gather(pair)


def test_multi_modal_inputs():
    given = [Experience(tokens=[1, 2], multi_modal_inputs={"p": torch.ones(n), "q": [n]}) for n in (2, 3)]
    gathered = gather_multi_modal_inputs(given)
    assert {key: [t.tolist() for t in column] for key, column in gathered.items()} == {
        "p": [[1.0, 1.0], [1.0, 1.0, 1.0]],
        "q": [[2], [3]],
    }
    assert gather_multi_modal_inputs([Experience(tokens=[1, 2])]) == {}
    with pytest.raises(ValueError, match=r"experience 2 .*multi_modal_inputs \[\], wanted \['p', 'q'\]"):
        gather_multi_modal_inputs([*given, Experience(tokens=[1, 2])])


EXPERT = CustomField("is_expert", "expert_mask", torch.bool)
WEIGHT = CustomField("weight", "loss_weight", torch.float32)


def customised(*infos, fields=(EXPERT, WEIGHT)):
    return [Experience(tokens=[1, 2], info=info, custom_fields=fields) for info in infos]


@pytest.mark.parametrize("form", [list, ExperienceBatch.of, lambda given: ExperienceBatch.decode(encode(given))])
def test_custom_fields(form):
    given = customised({"is_expert": True, "weight": 2}, {"is_expert": False, "weight": 0.5, "more": "x"})
    found = gather_custom_fields(form(given))
    assert {name: (column.dtype, column.tolist()) for name, column in found.items()} == {
        "expert_mask": (torch.bool, [True, False]),
        "loss_weight": (torch.float32, [2.0, 0.5]),
    }
    assert gather_custom_fields(form([Experience(tokens=[1, 2])])) == gather_custom_fields(form([])) == {}


def test_custom_fields_of_several_values():
    given = customised({"w": [1, 2]}, {"w": torch.tensor([3, 4])}, fields=[CustomField("w", "w", torch.int64)])
    assert gather_custom_fields(decode(encode(given)))["w"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([*customised({"w": 1}), Experience(tokens=[1, 2])], r"experience 1 .*custom_fields \[\], wanted .*is_expert"),
        (customised({"is_expert": 1, "weight": 1}, {"is_expert": 1}), r"experience 1 .*has no info\['weight'\]"),
        (
            customised({"is_expert": 1, "weight": "much"}),
            r"info\['weight'\] cannot become .*'loss_weight' of torch",
        ),
        (customised({"is_expert": 1, "weight": 1}, {"is_expert": 1, "weight": [1, 2]}), "arrays of one shape"),
    ],
)
def test_custom_fields_are_refused_with_a_reason(given, said):
    with pytest.raises(ValueError, match=said):
        gather_custom_fields(given)

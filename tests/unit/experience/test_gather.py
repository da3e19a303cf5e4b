import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from benchmarks.bench_gather import (
    plain_attention_masks,
    plain_group_by,
    plain_multi_modal_inputs,
    plain_response_attrs,
    plain_split_dpo,
    plain_token_ids,
)
from tests.examples import examples
from trinity_mq.experience import (
    EID,
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
    group_by,
    split_dpo_experience_to_single_turn,
)
from trinity_mq.experience.fields import values_equal

PICTURE = Experience(tokens=[1, 2], multi_modal_inputs={"p": [1.0]})


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
        (
            lambda pair: gather_multi_modal_inputs([PICTURE, pair[0]]),
            r"experience 1 .*multi_modal_inputs \[\], wanted \['p'\]",
        ),
        (lambda _: group_by([], "batch"), "Unknown id_type: batch; wanted one of task, run, step"),
        (split_dpo_experience_to_single_turn, r"experience 0 .* is single_turn, wanted dpo"),
    ],
)
def test_refused_with_a_reason(pair, gather, said):
    with pytest.raises(ValueError, match=said):
        gather(pair)


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
        (customised({"is_expert": 1, "weight": "much"}), r"info\['weight'\] cannot become .*'loss_weight' of torch"),
        (customised({"is_expert": 1, "weight": 1}, {"is_expert": 1, "weight": [1, 2]}), "arrays of one shape"),
    ],
)
def test_custom_fields_are_refused_with_a_reason(given, said):
    with pytest.raises(ValueError, match=said):
        gather_custom_fields(given)


def test_the_halves_of_answers_with_masks_are_trained_on_where_the_mask_is_true():
    pair = Experience(tokens=[1], chosen=[2, 3, 4], rejected=[5, 6], info={"chosen_mask": [True, False, True]})
    again = Experience.deserialize(pair.serialize())
    assert [half.action_mask.tolist() for half in split_dpo_experience_to_single_turn([pair, again])] == [
        [True, False, True],
        [True, True],
    ] * 2
    pair.info["rejected_mask"] = [True]
    with pytest.raises(ValueError, match="action_mask has 1 values, wanted one per response token"):
        split_dpo_experience_to_single_turn([pair])


FLOATS = ("logprobs", "advantages", "returns", "token_level_reward", "teacher_logprobs")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
VALUES = st.sampled_from([0.0, -0.0, 1.5, -0.1, 3e4, float("inf"), float("nan")])
TOKENS = st.integers(-(2**31), 2**31 - 1)
OTHER = Experience(eid=EID("other", "x", 9, 9, "o"), tokens=[1, 2, 3], prompt_length=1, logprobs=[-1.0, -2.0])


@st.composite
def experiences(draw, kinds=("single_turn", "multi_turn", "dpo"), full=False):
    """Return an experience; with ``full`` every response field is there."""
    kind = draw(st.sampled_from(kinds))
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length = prompt if kind == "dpo" else prompt + response
    fields = {
        "eid": EID(draw(st.sampled_from([1, "1", "a/b", "a%2Fb"])), draw(st.integers(0, 2)), draw(st.integers(0, 1))),
        "tokens": draw(st.lists(TOKENS, min_size=length, max_size=length)),
        "prompt_length": prompt,
        "experience_type": kind,
        "reward": draw(st.none() | st.floats(width=32)),
        "info": draw(st.sampled_from([{}, {"a": 1}, {"a": [None, {"b": "c"}]}])),
        "metrics": draw(st.sampled_from([{}, {"m": 0.5}])),
        "prompt_text": draw(st.none() | st.just("text")),
        "custom_fields": draw(st.sampled_from([[], [CustomField("a", "b", torch.int64)]])),
        "temperature": draw(st.none() | st.just(0.5)),
        "index": draw(st.none() | st.integers(0, 3)),
    }
    fields["eid"].step = draw(st.integers(0, 1))
    keys = draw(st.sampled_from([(), ("p",), ("p", "q"), ("q", "p")]))
    fields["multi_modal_inputs"] = {key: torch.full((draw(st.integers(0, 2)), 2), float(prompt)) for key in keys}
    if kind == "dpo":
        fields |= {name: draw(st.lists(TOKENS, min_size=1, max_size=4)) for name in ("chosen", "rejected")}
        fields["chosen_messages"] = draw(st.none() | st.just([{"role": "assistant", "content": "yes"}]))
        return Experience(**fields)
    if draw(st.integers(0, 3)) == 0:
        # No real response then: the fields only agree with each other, in a length of their own.
        fields["truncate_status"], response = "prompt_truncated", draw(st.integers(0, 4))
    fields["action_mask"] = draw(st.lists(st.booleans(), min_size=response, max_size=response))
    for name in FLOATS:
        if full or draw(st.booleans()):
            values = draw(st.lists(VALUES, min_size=response, max_size=response))
            fields[name] = torch.tensor(values, dtype=draw(DTYPES))
    return Experience(**fields)


ANY = st.lists(experiences(), max_size=6)
RESPONSES = st.lists(experiences(("single_turn", "multi_turn"), full=True), min_size=1, max_size=6)
PAIRS = st.lists(experiences(("dpo",)), max_size=4)


def outcome(call):
    """Return what ``call`` gives, or its error."""
    try:
        return call(), None
    except ValueError as error:
        return None, (type(error), str(error))


FORMS = {
    "list": lambda given: given,
    "batch": ExperienceBatch.of,
    "decoded": lambda given: ExperienceBatch.decode(encode(given)),
    "sliced": lambda given: ExperienceBatch.of([OTHER, *given, OTHER])[1:-1],
    "selected": lambda given: ExperienceBatch.of([OTHER, *given[::-1]]).select(list(range(len(given), 0, -1))),
}
NAMES = ("action_mask", "tokens", "chosen", "rejected", "routed_experts", "reward", "nonsense", "eid", *FLOATS)


def grouped(group, experiences, id_type):
    """Return the groups as lists, in the order in which their ids appear."""
    return [(key, list(members)) for key, members in group(experiences, id_type).items()]


def halves(split, experiences):
    result = list(split(experiences))
    assert len({half.eid.uid for half in [*result, *experiences]}) == len(result) + len(experiences)
    for half in result:
        half.eid.suffix = ""
    return result


WIDTHS = st.integers(0, 8)
FIT = st.integers(4, 8)
PADS = st.integers(-1, 3)
SOME = st.lists(experiences(), min_size=1, max_size=6)
CASES = {
    "token ids": (ANY, [WIDTHS, WIDTHS, PADS], gather_token_ids, plain_token_ids),
    "token ids that fit": (SOME, [FIT, FIT, PADS], gather_token_ids, plain_token_ids),
    "attention masks": (ANY, [WIDTHS, WIDTHS], gather_attention_masks, plain_attention_masks),
    "attention masks that fit": (SOME, [FIT, FIT], gather_attention_masks, plain_attention_masks),
    "fields": (ANY | RESPONSES, [st.sampled_from(NAMES), WIDTHS, PADS], gather_response_attrs, plain_response_attrs),
    "fields that fit": (RESPONSES, [st.sampled_from(FLOATS), FIT, PADS], gather_response_attrs, plain_response_attrs),
    "action masks": (
        ANY | RESPONSES,
        [WIDTHS],
        gather_action_masks,
        lambda items, width: plain_response_attrs(items, "action_mask", width),
    ),
    "multi-modal inputs": (ANY, [], gather_multi_modal_inputs, plain_multi_modal_inputs),
    "groups": (
        ANY,
        [st.sampled_from(["task", "run", "step", "batch"])],
        lambda *given: grouped(group_by, *given),
        lambda *given: grouped(plain_group_by, *given),
    ),
    "pairs": (
        PAIRS | ANY,
        [],
        lambda items: halves(split_dpo_experience_to_single_turn, items),
        lambda items: halves(plain_split_dpo, items),
    ),
}
"""Experiences, further arguments, our function and the plain loop."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_agrees_with_plain_loops(case, form, data):
    """On each form as on the list, and on that as the plain loop does; where that fails, ours does too."""
    given_, arguments, ours, plain = CASES[case]
    items = data.draw(given_)
    more = [data.draw(argument) for argument in arguments]
    expected, refused = outcome(lambda: plain(items, *more))
    on_list, list_error = outcome(lambda: ours(items, *more))
    found, error = outcome(lambda: ours(FORMS[form](items), *more))
    assert (list_error is None) == (refused is None), (list_error, refused)
    assert error == list_error
    assert values_equal(on_list, expected)
    assert values_equal(found, expected)
    if case == "token ids that fit":
        assert (found.dtype, found.shape) == (torch.int32, (len(items), more[0] + more[1]))

"""Whatever makes tensors and groups of experiences agrees with plain loops, on lists and on batches of columns."""

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
    encode,
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    group_by,
    split_dpo_experience_to_single_turn,
)
from trinity_mq.experience.fields import values_equal

FLOATS = ("logprobs", "advantages", "returns", "token_level_reward", "teacher_logprobs")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
VALUES = st.sampled_from([0.0, -0.0, 1.5, -0.1, 3e4, float("inf"), float("nan")])
TOKENS = st.integers(-(2**31), 2**31 - 1)
OTHER = Experience(eid=EID("other", "x", 9, 9, "o"), tokens=[1, 2, 3], prompt_length=1, logprobs=[-1.0, -2.0])


def as_list(experiences):
    return experiences


def as_batch(experiences):
    return ExperienceBatch.of(experiences)


def decoded(experiences):
    return ExperienceBatch.decode(encode(experiences))


def sliced(experiences):
    return ExperienceBatch.of([OTHER, *experiences, OTHER])[1:-1]


def selected(experiences):
    backwards = ExperienceBatch.of([OTHER, *experiences[::-1]])
    return backwards.select(list(range(len(experiences), 0, -1)))


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
WIDTHS = st.integers(0, 8)
FIT = st.integers(4, 8)

FORMS = pytest.mark.parametrize("form", [as_list, as_batch, decoded, sliced, selected])
PROPERTY = settings(max_examples=examples(60), deadline=None, derandomize=True)


def outcome(call):
    """Return what ``call`` gives, or its error."""
    try:
        return call(), None
    except ValueError as error:
        return None, (type(error), str(error))


def check(form, experiences, ours, plain):
    """Compare ``ours`` on a form of the experiences with itself on the list, and with the plain loop."""
    expected, refused = outcome(lambda: plain(experiences))
    on_list, list_error = outcome(lambda: ours(experiences))
    found, error = outcome(lambda: ours(form(experiences)))
    assert (list_error is None) == (refused is None), (list_error, refused)
    assert error == list_error
    assert values_equal(on_list, expected)
    assert values_equal(found, expected)
    return found


@FORMS
@PROPERTY
@given(ANY, WIDTHS, WIDTHS, st.integers(-1, 3))
def test_token_ids_and_attention_masks(form, experiences, prompts, responses, pad):
    check(
        form,
        experiences,
        lambda items: gather_token_ids(items, prompts, responses, pad),
        lambda items: plain_token_ids(items, prompts, responses, pad),
    )
    check(
        form,
        experiences,
        lambda items: gather_attention_masks(items, prompts, responses),
        lambda items: plain_attention_masks(items, prompts, responses),
    )


@FORMS
@PROPERTY
@given(st.lists(experiences(), min_size=1, max_size=6), FIT, FIT)
def test_token_ids_that_fit(form, experiences, prompts, responses):
    found = check(
        form,
        experiences,
        lambda items: gather_token_ids(items, prompts, responses, 0),
        lambda items: plain_token_ids(items, prompts, responses, 0),
    )
    assert (found.dtype, found.shape) == (torch.int32, (len(experiences), prompts + responses))


NAMES = ("action_mask", "tokens", "chosen", "rejected", "routed_experts", "reward", "nonsense", "eid", *FLOATS)


@FORMS
@PROPERTY
@given(ANY | RESPONSES, st.sampled_from(NAMES), WIDTHS, st.integers(-1, 2))
def test_response_attrs(form, experiences, name, responses, pad):
    check(
        form,
        experiences,
        lambda items: gather_response_attrs(items, name, responses, pad),
        lambda items: plain_response_attrs(items, name, responses, pad),
    )


@FORMS
@PROPERTY
@given(RESPONSES, st.sampled_from(FLOATS), FIT)
def test_response_attrs_that_fit(form, experiences, name, responses):
    found = check(
        form,
        experiences,
        lambda items: gather_response_attrs(items, name, responses),
        lambda items: plain_response_attrs(items, name, responses),
    )
    assert found.shape == (len(experiences), responses)


@FORMS
@PROPERTY
@given(ANY | RESPONSES, WIDTHS)
def test_action_masks(form, experiences, responses):
    check(
        form,
        experiences,
        lambda items: gather_action_masks(items, responses),
        lambda items: plain_response_attrs(items, "action_mask", responses),
    )


@FORMS
@PROPERTY
@given(ANY)
def test_multi_modal_inputs(form, experiences):
    check(form, experiences, gather_multi_modal_inputs, plain_multi_modal_inputs)


@FORMS
@PROPERTY
@given(ANY, st.sampled_from(["task", "run", "step", "batch"]))
def test_groups(form, experiences, id_type):
    def listed(items):
        return {key: list(members) for key, members in group_by(items, id_type).items()}

    found = check(form, experiences, listed, lambda items: plain_group_by(items, id_type))
    if found is not None:
        assert list(found) == list(plain_group_by(experiences, id_type)), "in the order in which the ids appear"


@FORMS
@PROPERTY
@given(PAIRS | ANY)
def test_split_pairs(form, experiences):
    def halves(split, items):
        result = list(split(items))
        assert len({half.eid.uid for half in result} | {item.eid.uid for item in items}) == len(result) + len(items)
        for half in result:
            half.eid.suffix = ""
        return result

    check(
        form,
        experiences,
        lambda items: halves(split_dpo_experience_to_single_turn, items),
        lambda items: halves(plain_split_dpo, items),
    )

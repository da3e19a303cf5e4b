"""Arbitrary valid experiences come back equal."""

import math

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from tests.examples import examples
from trinity_mq.experience import EID, CustomField, Experience, ExperienceBatch, decode, encode
from trinity_mq.experience.rules import DPO, TRUNCATE_STATUSES, TYPES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SMALL = st.integers(0, 5)
BIG = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32)
DTYPE = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
IDS = st.one_of(BIG, TEXT)
LEAF = st.one_of(st.none(), st.booleans(), BIG, st.floats(), TEXT, st.binary(max_size=4))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.int16]))
    return (
        torch.tensor(draw(st.lists(SMALL, min_size=math.prod(shape), max_size=math.prod(shape))))
        .reshape(shape)
        .to(dtype)
    )


ARRAYS = tensors().filter(lambda tensor: tensor.dtype != torch.bfloat16).map(lambda tensor: tensor.numpy())
TREE = st.recursive(
    LEAF | tensors() | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.none() | st.lists(st.dictionaries(TEXT, LEAF, max_size=2), max_size=3)


@st.composite
def experiences(draw):
    kind = draw(st.sampled_from(TYPES))
    status = draw(st.sampled_from(TRUNCATE_STATUSES))
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    token_ids = st.integers(-(2**31), 2**31 - 1)
    length = prompt if kind == DPO else prompt + response
    fields = {
        "eid": EID(draw(IDS), draw(IDS), draw(BIG), draw(BIG), draw(TEXT)),
        "tokens": draw(st.lists(token_ids, min_size=length, max_size=length)),
        "prompt_length": prompt,
        "experience_type": kind,
        "truncate_status": status,
        "reward": draw(st.none() | st.floats()),
        "temperature": draw(st.none() | st.floats(0, 10)),
        "info": draw(st.dictionaries(TEXT, TREE, max_size=3)),
        "metrics": draw(st.dictionaries(TEXT, st.floats() | SMALL, max_size=3)),
        "multi_modal_inputs": draw(st.none() | st.dictionaries(TEXT, tensors(), max_size=2)),
        "custom_fields": draw(st.lists(st.builds(CustomField, TEXT, TEXT, DTYPE), max_size=2)),
        "index": draw(st.none() | BIG),
    }
    fields |= {name: draw(st.none() | TEXT) for name in ("prompt_text", "response_text", "taskset")}
    fields |= {name: draw(MESSAGES) for name in ("messages", "tools", "chosen_messages", "rejected_messages")}
    if kind == DPO:
        fields |= {name: draw(st.lists(token_ids, min_size=1, max_size=4)) for name in ("chosen", "rejected")}
    else:
        fields["action_mask"] = draw(st.lists(st.booleans(), min_size=response, max_size=response))
        for name in ("logprobs", "advantages", "returns", "token_level_reward", "teacher_logprobs"):
            if draw(st.booleans()):
                values = draw(st.lists(FLOAT, min_size=response, max_size=response))
                fields[name] = torch.tensor(values, dtype=draw(DTYPE))
        starts = sorted(draw(st.sets(st.integers(1, 3).filter(lambda start: start < response))))
        fields["versions"] = draw(st.none() | st.just([(start, draw(SMALL), draw(SMALL)) for start in [0, *starts]]))
    if draw(st.booleans()):
        shape = (length - 1, draw(st.integers(1, 2)), 2)
        fields["routed_experts"] = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(
            torch.uint8
        )
    return Experience(**fields)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(experiences(), max_size=5), st.sampled_from(["none", "zstd"]))
def test_round_trip_gives_equal_experiences(given_, compression):
    body = encode(given_)
    assert decode(encode(given_, compression)) == given_
    back = decode(body)
    assert back == given_
    assert [item.experience_type for item in back] == [item.experience_type for item in given_]
    assert encode(back) == body


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.lists(experiences(), max_size=6), st.data())
def test_choosing_and_joining_columns_is_choosing_and_joining_experiences(given_, data):
    numbers = data.draw(st.lists(st.integers(0, len(given_) - 1), max_size=8)) if given_ else []
    wanted = [given_[number] for number in numbers]
    batch = ExperienceBatch.decode(encode(given_))
    assert batch.select(numbers).to_list() == wanted
    joined = ExperienceBatch.concat([batch.select(numbers), batch, ExperienceBatch.of(wanted)])
    assert joined.to_list() == wanted + given_ + wanted
    assert decode(joined.encode()) == wanted + given_ + wanted

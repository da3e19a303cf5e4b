"""Bodies from before this format: read as they were, and hostile ones refused without running anything."""

import contextlib
import copyreg
import functools
import operator
import os
import pickle
import struct
import sys
import tracemalloc
import warnings
from types import ModuleType

import numpy as np
import pytest
import safetensors.torch
import torch

from tests import legacy_bodies as old
from trinity_mq.experience import EID, CustomField, DecodeError, Experience, decode, encode
from trinity_mq.experience.legacy.reader import read_legacy, read_legacy_each
from trinity_mq.experience.legacy.unpickle import ADMITTED
from trinity_mq.messages.msgpack_scan import MAX_NESTING

IDENTITY = {"batch": "3/gsm8k", "task": 7, "run": 2, "step": 1, "suffix": "ab12cd"}
FULL = {
    "tokens": torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32),
    "prompt_length": 2,
    "logprobs": torch.tensor([-0.5, -0.25, float("nan")]),
    "action_mask": torch.tensor([True, False, True]),
    "token_level_reward": torch.tensor([0.0, 0.0, 1.0], dtype=torch.float16),
    "advantages": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "returns": torch.tensor([1.0, 2.0, 3.0]),
    "teacher_logprobs": torch.tensor([-1.0, -2.0, -3.0]),
    "routed_experts": torch.arange(16, dtype=torch.uint8).reshape(4, 2, 2),
    "multi_modal_inputs": {"pixels": torch.rand(2, 3), "grid:thw": torch.tensor(5)},
    "reward": 1.5,
    "truncate_status": "response_truncated",
    "response_text": "13",
    "prompt_text": "6 + 7 =",
    "messages": [{"role": "user", "content": "6 + 7 ="}],
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "chosen_messages": [{"role": "assistant", "content": "yes"}],
    "rejected_messages": [{"role": "assistant", "content": "no"}],
    "info": {"answer": 13, "nested": {"list": [1, None, "x", 2.5, b"raw", True, -(1 << 63)]}},
    "metrics": {"accuracy": 1.0},
}
DPO = {
    "tokens": torch.tensor([1, 2, 3], dtype=torch.int32),
    "prompt_length": 3,
    "chosen": torch.tensor([4, 5], dtype=torch.int32),
    "rejected": torch.tensor([6], dtype=torch.int32),
}
SINGLE = {
    "tokens": torch.tensor([1, 2, 3], dtype=torch.int32),
    "action_mask": torch.tensor([True, True]),
    "reward": 1.0,
}


def bare(fields, protocol=4, kind="single_turn", eid=None):
    """Return a bare pickle of one experience."""
    more = {name: value for name, value in fields.items() if name != "tokens"}
    return old.bare(old.Experience(fields["tokens"], eid or old.EID(**IDENTITY), kind, more), protocol)


def reframed(body):
    """Return a pickle that was edited with the right length in its one frame, which protocols 2 and 3 do not have."""
    return body if body[2:3] != b"\x95" else body[:3] + struct.pack("<Q", len(body) - 11) + body[11:]


def with_info(value, protocol):
    """Return what comes back of ``value`` in a bare pickle."""
    (found,) = read_legacy(bare(SINGLE | {"info": {"x": value}}, protocol))
    return found.info["x"]


# --- what was written comes back


def test_every_field_of_a_trxp_body():
    custom = [{"source_field": "answer", "destination_field": "answers", "data_type": "torch.int64"}]
    body = old.trxp(FULL | {"eid": IDENTITY, "custom_fields": custom}, SINGLE, DPO)
    first, second, third = read_legacy(body)
    assert first == Experience(
        eid=EID(**IDENTITY), custom_fields=[CustomField("answer", "answers", torch.int64)], **FULL
    )
    assert (second.experience_type, second.reward, second.eid.suffix) == ("single_turn", 1.0, "abc123")
    assert (third.experience_type, third.chosen.tolist(), third.action_mask) == ("dpo", [4, 5], None)
    assert decode(encode([first, second, third])) == [first, second, third]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_field_of_a_bare_pickle(protocol):
    custom = [old.CustomField("answer", "answers", torch.bfloat16)]
    body = bare(FULL | {"custom_fields": custom}, protocol, "multi_turn")
    (found,) = read_legacy(body)
    wanted = Experience(eid=EID(**IDENTITY), custom_fields=[CustomField("answer", "answers", torch.bfloat16)], **FULL)
    assert found == wanted
    assert decode(encode([found])) == [wanted]


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_list_in_a_bare_pickle(protocol):
    many = [old.Experience(DPO["tokens"], experience_type="dpo", more=DPO), old.Experience(torch.arange(4))]
    assert [each.experience_type for each in read_legacy(old.bare(many, protocol))] == ["dpo", "single_turn"]
    assert read_legacy(old.bare([], protocol)) == read_legacy(old.trxp()) == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        np.float64(1.5),
        np.int64(-3),
        np.bool_(True),
        np.str_("text"),
        np.str_(""),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array([True, False]),
        np.zeros((0, 3)),
        np.array(7),
    ],
    ids=repr,
)
def test_numpy_in_info(value, protocol):
    found = with_info(value, protocol)
    # as in every experience body: arrays stay arrays, scalars become Python's
    assert type(found) is (np.ndarray if isinstance(value, np.ndarray) else type(value.item()))
    np.testing.assert_array_equal(found, value)
    if isinstance(found, np.ndarray):
        assert found.dtype == value.dtype.newbyteorder("=")
        assert found.flags.writeable


@pytest.mark.parametrize("value", [np.float32(2.5), np.arange(3)], ids=repr)
@pytest.mark.parametrize("protocol", [2, 5])
def test_the_names_of_older_numpy(value, protocol):
    body = bare(SINGLE | {"info": {"x": value}}, protocol)
    for name in (b"numpy._core.multiarray", b"numpy._core.numeric"):
        former = name.replace(b"_core", b"core")
        body = body.replace(b"\x8c" + bytes([len(name)]) + name, b"\x8c" + bytes([len(former)]) + former)
        body = body.replace(b"c" + name + b"\n", b"c" + former + b"\n")
    assert b"_core" not in body
    np.testing.assert_array_equal(read_legacy(reframed(body))[0].info["x"], value)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "value",
    [
        *(torch.tensor([0, 1, 1]).to(one) for one in dict.fromkeys(ADMITTED.values()) if isinstance(one, torch.dtype)),
        torch.arange(12.0)[4:7],
        torch.arange(12).reshape(3, 4).T,
        torch.ones(1).expand(5),
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())}",
)
def test_tensors_in_info(value, protocol):
    found = with_info(value, protocol)
    assert (found.dtype, found.is_contiguous(), found.requires_grad) == (value.dtype, True, False)
    assert torch.equal(found.reshape(-1).view(torch.uint8), value.detach().contiguous().reshape(-1).view(torch.uint8))


# --- the type, which TRXP lost


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (SINGLE, "single_turn"),
        (SINGLE | {"action_mask": torch.tensor([True, False])}, "multi_turn"),
        (DPO, "dpo"),
        (SINGLE | {"chosen": DPO["chosen"]}, "single_turn"),
        (SINGLE | {"chosen": DPO["chosen"], "rejected": DPO["rejected"]}, "multi_turn"),
        (
            {
                "tokens": torch.tensor([1, 2, 3], dtype=torch.int32),
                "prompt_length": 2,
                "logprobs": torch.zeros(1),
                "action_mask": torch.zeros(1, dtype=torch.bool),
                "truncate_status": "prompt_truncated",
            },
            "single_turn",
        ),
        (SINGLE | {"truncate_status": "prompt_truncated"}, "multi_turn"),
        ({"tokens": torch.tensor([1, 2, 3], dtype=torch.int32)}, "single_turn"),
    ],
)
def test_the_type_that_fits_the_mask(fields, kind):
    assert [each.experience_type for each in read_legacy(old.trxp(fields))] == [kind]


# --- what breaks our rules


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (SINGLE | {"prompt_length": 0}, "experience 1: prompt_length is 0"),
        (SINGLE | {"action_mask": torch.ones(3, dtype=torch.bool)}, "experience 1: action_mask has 3 values"),
        (DPO | {"logprobs": torch.zeros(2)}, "experience 1: logprobs has 2 values, wanted None"),
        (SINGLE | {"tokens": None}, "experience 1: no tokens"),
        (SINGLE | {"info": [1]}, r"experience 1: info is \[1\], wanted a map"),
        (SINGLE | {"info": {"x": np.array(["a", "bc"])}}, r"experience 1: info\['x'\] is an array of <U2"),
        (SINGLE | {"info": {"x": 1 << 70}}, r"experience 1: info\['x'\] is 1180591620717411303424, which"),
        (SINGLE | {"further": {"future": 1}}, "experience 1: unknown fields 'future', which would be lost"),
        (SINGLE | {"further": {"multi_modal_input_keys": ["a"]}}, "multi-modal inputs 'a' are named, none are there"),
        (SINGLE | {"eid": IDENTITY | {"run": "x"}}, "experience 1: eid.run is 'x'"),
        (SINGLE | {"eid": IDENTITY | {"rank": 0}}, "experience 1: .*'rank'"),
        (SINGLE | {"custom_fields": [{"source_field": "a"}]}, "experience 1: a custom field is"),
        (SINGLE | {"custom_fields": [1]}, "experience 1: a custom field is of type int, wanted CustomField"),
    ],
)
def test_an_experience_that_breaks_a_rule_is_named(fields, words):
    body = old.trxp(SINGLE, fields, SINGLE)
    with pytest.raises(DecodeError, match=words):
        read_legacy(body)
    first, second, third = read_legacy_each(body)
    assert isinstance(second, DecodeError)
    assert isinstance(first, Experience)
    assert isinstance(third, Experience)


# --- the switch


@pytest.mark.parametrize("body", [old.trxp(SINGLE), bare(SINGLE, 2), bare(SINGLE, 5)], ids=["TRXP", "2", "5"])
def test_off_unless_asked_for(body):
    for read in (Experience.deserialize, Experience.deserialize_many):
        with pytest.raises(DecodeError, match=r"legacy body.*allow_legacy=True.*convert-experiences"):
            read(body)
    assert Experience.deserialize(body, allow_legacy=True) == Experience.deserialize_many(body, allow_legacy=True)[0]
    assert Experience.deserialize(memoryview(body), allow_legacy=True).reward == 1.0


def test_the_switch_changes_nothing_else(single):
    assert Experience.deserialize(single.serialize(), allow_legacy=True) == single
    with pytest.raises(DecodeError, match="holds 2 experiences"):
        Experience.deserialize(old.trxp(SINGLE, SINGLE), allow_legacy=True)
    for data in (b"", b"TRX", b"nothing known"):
        with pytest.raises(DecodeError):
            Experience.deserialize_many(data, allow_legacy=True)
        with pytest.raises(DecodeError, match="not a legacy body"):
            read_legacy(data)


# --- damaged frames


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda body: body[:20], "20 bytes, wanted a TRXP body of at least 21"),
        (lambda body: body[:-1], "cut short"),
        (lambda body: body + b"x", "followed by something else"),
        (lambda body: body[:4] + b"\x09" + body[5:], "version 9, this release reads version 1"),
        (lambda body: body[:5] + b"\xff" * 16 + body[21:], "wanted 36893488147419103251"),
        (lambda _: old.sealed(pickle.dumps([])), "not a map with a list"),
        (
            lambda _: old.sealed(pickle.dumps({"version": 1, "num_items": 2, "items": [{}]})),
            r"\(1, 2\), wanted \(1, 1\)",
        ),
        (lambda _: old.sealed(pickle.dumps({}) + b"x"), "1 bytes follow the pickle"),
        (lambda _: old.sealed(pickle.dumps({})[:-1]), "malformed"),
        (lambda body: old.sealed(metadata_of(body), b"\0" * 8), "not a safetensors blob"),
        (lambda body: old.sealed(metadata_of(body), blob({"1:tokens": torch.ones(1)})), "belongs to none of 1"),
        (lambda body: old.sealed(metadata_of(body), blob({"0:info": torch.ones(1)})), "'info' are both"),
        (lambda body: old.sealed(metadata_of(body), blob({"0:new": torch.ones(1)})), "unknown fields 'new'"),
        (lambda body: body[:-1] + b"\2", "experience 0: .*'action_mask' holds booleans other than 0 and 1"),
    ],
)
def test_damaged_bodies(damage, words):
    with pytest.raises(DecodeError, match=words):
        read_legacy(damage(old.trxp(SINGLE)))


def metadata_of(body):
    return body[21 : 21 + struct.unpack_from("<Q", body, 5)[0]]


def blob(tensors):
    return safetensors.torch.save(tensors)


@pytest.mark.parametrize("value", [1, "text", None, {"tokens": [1]}, [1], [old.EID()], (old.Experience([1, 2]),)])
def test_pickles_of_something_else(value):
    with pytest.raises(DecodeError, match=r"item 0 of the pickle is of type .*, wanted Experience"):
        read_legacy(old.bare(value))


# --- malicious pickles


class Calls:
    """Pickles as a call of anything, with a state for what it gives."""

    def __init__(self, function, *arguments, state=None):
        self.answer = (function, arguments) if state is None else (function, arguments, state)

    def __call__(self):
        raise NotImplementedError("only here because pickle calls nothing that is not callable")

    def __reduce__(self):
        return self.answer


class Trap:
    """Runs something when it is given a state, as many real classes do."""

    def __setstate__(self, flag):
        with open(flag, "w") as file:
            file.write("run")


Trap.__module__ = "trap"


def shell(flag):
    return f"echo run > '{flag}'"


def python(flag):
    return f"open({str(flag)!r}, 'w').close()"


def system(flag):
    return Calls(os.system, shell(flag))


def storage_of(value):
    """Return the call that rebuilds a storage from a stream that is a pickle of ``value``."""
    return Calls(torch.storage._load_from_bytes, pickle.dumps(value, 2))


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


OBJECTS = {
    "os.system": system,
    "builtins.eval": lambda flag: Calls(eval, python(flag)),
    "builtins.exec": lambda flag: Calls(exec, python(flag)),
    "builtins.open": lambda flag: Calls(open, str(flag), "w"),
    "builtins.getattr": lambda flag: Calls(Calls(getattr, Calls(__import__, "os"), "system"), shell(flag)),
    "functools.partial": lambda flag: Calls(functools.partial(os.system, shell(flag))),
    "operator.methodcaller": lambda flag: Calls(operator.methodcaller("system", shell(flag)), Calls(__import__, "os")),
    "a storage that is a pickle": lambda flag: storage_of(system(flag)),
    "a storage in a storage": lambda flag: storage_of(storage_of(system(flag))),
    "copyreg._reconstructor": lambda flag: Calls(copyreg._reconstructor, Trap, object, None, state=str(flag)),
    "an array of objects": lambda flag: np.array([system(flag)], dtype=object),
    "a scalar of an object": lambda flag: Calls(np._core.multiarray.scalar, np.dtype(object), system(flag)),
    "an argument of a tensor": lambda flag: Calls(torch._utils._rebuild_tensor_v2, system(flag), 0, (), (), False, {}),
    "a state of a dtype": lambda flag: Calls(np.dtype, "f8", state=(3, system(flag), None, None, None, -1, -1, 0)),
    "a key": lambda flag: {system(flag): 1},
}
CRAFTED = {
    "a dotted name": lambda flag: text("os") + text("path.os.system") + b"\x93(" + text(shell(flag)) + b"tR",
    "NEWOBJ": lambda flag: b"ctrap\nTrap\n)\x81" + text(str(flag)) + b"b",
    "NEWOBJ_EX": lambda flag: b"ctrap\nTrap\n)}\x92" + text(str(flag)) + b"b",
    "INST": lambda flag: b"(" + text(shell(flag)) + b"ios\nsystem\n",
    "OBJ": lambda flag: b"(ctrap\nTrap\no" + text(str(flag)) + b"b",
    "an extension": lambda flag: b"\x82\xf0(" + text(shell(flag)) + b"tR",
    "after what is dropped": lambda flag: b"cos\nsystem\n(" + text(shell(flag)) + b"tR0N",
    "text opcodes": lambda flag: b"cos\nsystem\n(S" + repr(shell(flag)).encode() + b"\ntR",
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Let an unguarded reader find all names, so that what these tests refuse is known to work."""
    module = ModuleType("trap")
    module.Trap = Trap
    monkeypatch.setitem(sys.modules, "trap", module)
    copyreg.add_extension("posix", "system", 240)
    with old.reference_importable():
        yield
    copyreg.remove_extension("posix", "system", 240)
    copyreg._extension_cache.pop(240, None)


def runs_unguarded(payload, flag):
    """Tell whether Python's own reader runs a payload; without that, refusing it would show nothing."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        pickle.loads(payload)
    return flag.exists()


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_runs_something_is_refused(name, protocol, tmp_path):
    flag = tmp_path / "flag"
    payload = bare(SINGLE | {"info": {"x": OBJECTS[name](flag)}}, protocol)
    inside = old.trxp(SINGLE | {"info": {"x": OBJECTS[name](flag)}})
    for body in (payload, inside, old.sealed(payload)):
        with pytest.raises(DecodeError):
            Experience.deserialize_many(body, allow_legacy=True)
    assert not flag.exists()
    assert runs_unguarded(payload, flag)


@pytest.mark.parametrize("name", CRAFTED)
def test_opcodes_that_run_something_are_refused(name, tmp_path):
    flag = tmp_path / "flag"
    payload = b"\x80\x04" + CRAFTED[name](flag) + b"."
    # also where the same code was looked up before, which leaves it in a cache that find_class never sees
    for _ in range(2):
        flag.unlink(missing_ok=True)
        for body in (payload, old.sealed(payload)):
            with pytest.raises(DecodeError):
                Experience.deserialize_many(body, allow_legacy=True)
        assert not flag.exists()
        assert runs_unguarded(payload, flag)


def many_fields(count):
    return b"}(" + b"".join(text(str(n)) + b"N" for n in range(count)) + b"u"


EXPERIENCE_CLASS = b"c" + old.MODULE.encode() + b"\nExperience\n"


@pytest.mark.parametrize(
    ("crafted", "words"),
    [
        (EXPERIENCE_CLASS + b"N}" + text("build") + b"Ns\x86b", "is of type type, wanted Experience"),
        (b"ccollections\nOrderedDict\nN}" + text("call") + b"Ns\x86b", "malformed"),
        (b"ccollections\nOrderedDict\n)R}b", "is of type OrderedDict, wanted Experience"),
        (b"ctorch\nfloat32\n}b", "malformed|is of type dtype"),
        (b"cnumpy\nndarray\n}b", "malformed"),
        (EXPERIENCE_CLASS + b")\x81N}" + text("build") + b"Ns\x86b", "unknown fields|no tokens"),
        (EXPERIENCE_CLASS + b")\x81}K\1Nsb", "no tokens"),
        (EXPERIENCE_CLASS + b")\x81}K\1K\1sb", "unknown fields 1"),
        (EXPERIENCE_CLASS + b"K\1\x85\x81", "malformed"),
        (EXPERIENCE_CLASS + b")R", "no tokens"),
        (EXPERIENCE_CLASS + b")R" + many_fields(65) + b"b", "of at most 64 fields"),
        (b"ccollections\nOrderedDict\n)\x81", "is of type OrderedDict"),
        (b"ccollections\nOrderedDict\nNR", "malformed"),
        (b"K\1)R", "malformed"),
        (b"c_codecs\nencode\n" + text("a") + text("rot13") + b"\x86R", "encoded as 'rot13', wanted latin1"),
        (text("1") + b"Q", "malformed"),
        (b"P1\n", "malformed"),
        (b"K\1K\1\x93", "malformed"),
        (text("torch._utils") + text("_rebuild_parameter") + b"\x93", "refers to 'torch._utils' '_rebuild_parameter'"),
        (text("torch") + text("float32.__class__") + b"\x93", "refers to 'torch' 'float32.__class__'"),
        (b"c__builtin__\neval\n", "refers to '__builtin__' 'eval'"),
        (b"\x8f", "is of type set"),
        (b"\x97", "malformed"),
        (b"\x80\x06", "unsupported pickle protocol: 6"),
        (b"h\1", "malformed"),
        (b"K\1a", "malformed"),
        (b"NNa", "malformed"),
        (b"N(NNu", "malformed"),
        (b"}(Nu", "malformed"),
        (b"t", "malformed"),
        (b"R", "malformed"),
        (b"", "malformed"),
        (b"\xff", "malformed"),
    ],
)
def test_what_experiences_do_not_need_is_refused(crafted, words):
    with pytest.raises(DecodeError, match=words):
        read_legacy(b"\x80\x04" + crafted + b".")


@pytest.mark.parametrize(
    "changed",
    [
        EXPERIENCE_CLASS + b"N}" + text("__init__") + b"Ns\x86b",
        b"c_codecs\nencode\nN}" + text("__defaults__") + b")s\x86b",
        b"cnumpy\ndtype\nN}" + text("__init__") + b"c_codecs\nencode\ns\x86b",
    ],
)
def test_what_a_pickle_changes_is_gone_with_it(changed):
    genuine = bare(SINGLE | {"info": {"x": np.arange(3), "y": b"raw"}}, 2)
    before = read_legacy(genuine)
    with pytest.raises(DecodeError):
        read_legacy(b"\x80\x04" + changed + b".")
    assert read_legacy(genuine) == before


# --- costly pickles


def long_tuple_chain():
    return b"}" + b")" + b"\x85" * 200_000 + b"Ns"


def doubled(levels):
    """Return lists of twice the same list: two to the power of ``levels`` in the end."""
    return b"]" + b"\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(levels))


def in_info(crafted):
    """Return the opcodes of an experience with ``crafted`` in its info."""
    fields = b"}(" + text("tokens") + b"](K\1K\2e" + text("info") + b"}" + text("x") + crafted + b"su"
    return EXPERIENCE_CLASS + b")\x81" + fields + b"b"


COSTLY = {
    "a memo number of 4 bytes": b"Nr\xff\xff\xff\xff",
    "a byte array of 2 GiB": b"\x96" + struct.pack("<Q", 1 << 31) + b"x",
    "text of 2 GiB": b"X\xff\xff\xff\x7fabc",
    "bytes of 16 EiB": b"\x8e" + b"\xff" * 8,
    "a number of 2 GiB": b"\x8b\xff\xff\xff\x7f",
    "a frame of 16 EiB": b"\x95" + b"\xff" * 8,
    "a deeply nested tuple as a key": long_tuple_chain(),
    "a deeply nested list": in_info(b"]" * 200_000 + b"a" * 199_999),
    "a list in itself": in_info(b"]q\x00h\x00a"),
    "shared lists, 2 ** 60 in all": in_info(doubled(60)),
    "a text shared again and again": in_info(text("x" * 100_000) + b"q\x00](" + b"h\x00" * 100_000 + b"e" + b""),
    "millions of dicts": b"}" * 5_000_000,
    "millions of memo entries": b"N" + b"\x94" * 5_000_000,
    "a shared state of many fields": b"}("
    + b"".join(text(str(n)) + b"N" for n in range(50_000))
    + b"uq\0]("
    + (EXPERIENCE_CLASS + b"q\1)\x81h\0b")
    + b"h\1)\x81h\0b" * 50_000
    + b"e",
    "keys of one hash": b"}("
    + b"".join(b"\x8a\x0a" + ((2**61 - 1) * n).to_bytes(10, "little") + b"N" for n in range(1, 90_000))
    + b"u",
    "text turned into bytes again and again": text("x" * 100_000)
    + b"q\0]("
    + (b"c_codecs\nencode\nq\1h\0" + text("latin1") + b"\x86q\2R")
    + b"h\1h\0"
    + text("latin1")
    + b"\x86R"
    + b"h\1h\2R" * 100_000
    + b"e",
    "one experience again and again": EXPERIENCE_CLASS
    + b")\x81}"
    + text("tokens")
    + b"](K\1K\2esbq\0]("
    + b"h\0" * 200_000
    + b"e",
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_pickles_are_refused_before_they_are_built(name):
    body = b"\x80\x04" + COSTLY[name] + b"."
    with pytest.raises(DecodeError):
        read_legacy(body)


@pytest.mark.parametrize("name", ["a memo number of 4 bytes", "a byte array of 2 GiB", "shared lists, 2 ** 60 in all"])
def test_costly_pickles_take_no_memory(name):
    body = b"\x80\x04" + COSTLY[name] + b"."
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            read_legacy(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()


def test_a_tensor_that_claims_more_than_it_has():
    genuine = bare(SINGLE | {"info": {"x": torch.ones(1).expand(5)}}, 5)
    for size in (b"\x8a\x05\0\0\0\0\1", b"K\xff"):
        # the size of the view: 4 GiB of one number, or 255 of them where that is all there is
        body = reframed(genuine.replace(b"K\x05\x85", size + b"\x85", 1))
        assert body != genuine
        if size == b"K\xff":
            assert read_legacy(body)[0].info["x"].shape == (255,)
        else:
            with pytest.raises(DecodeError, match=r"more than|can't allocate memory"):
                read_legacy(body)
    outside = bare(SINGLE | {"info": {"x": torch.arange(5)}}, 5)
    with pytest.raises(DecodeError, match="out of bounds"):
        read_legacy(outside.replace(b"K\x05\x85", b"K\x06\x85", 1))


def test_nesting_up_to_what_a_body_holds():
    def nested(levels):
        value = 1
        for _ in range(levels):
            value = [value]
        return bare(SINGLE | {"info": {"x": value}})

    found = read_legacy(nested(MAX_NESTING - 2))
    assert decode(encode(found)) == found
    with pytest.raises(DecodeError, match="nested deeper"):
        read_legacy(nested(MAX_NESTING))

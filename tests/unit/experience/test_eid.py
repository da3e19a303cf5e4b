import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.experience import EID
from trinity_mq.experience.eid import composed_ids


def test_composed_ids_have_the_documented_form():
    eid = EID(3, 1, 2, 4, "ab")
    assert (eid.uid, eid.sid, eid.rid, eid.tid) == ("3/1/2/4/ab", "3/1/4", "3/1/2", "3/1")
    assert str(eid) == eid.uid


def test_default_parts():
    eid = EID()
    assert (eid.batch, eid.task, eid.run, eid.step, eid.tid) == ("", "", 0, 0, "/")
    assert len(eid.suffix) == 12
    assert set(eid.suffix) <= set(string.hexdigits.lower())
    assert EID().suffix != EID().suffix


def test_slashes_inside_batch_or_task_do_not_make_ids_collide():
    parts = ["3", "3/a", "3%2Fa", "3%a", "a", "%", "/", "", "3/a/b", "a/b"]
    ids = [EID(batch, task, 0, 0, "s") for batch in parts for task in parts]
    for composed in ("uid", "sid", "rid", "tid"):
        assert len({getattr(eid, composed) for eid in ids}) == len(ids), composed
    assert EID("3/gsm8k", 1).tid == "3%2Fgsm8k/1"


def test_dict_form_gives_back_the_id():
    eid = EID("3/x", 5, 1, 2)
    assert eid.to_dict() == {"batch": "3/x", "task": 5, "run": 1, "step": 2, "suffix": eid.suffix}
    assert EID(**eid.to_dict()) == eid


PARTS = st.integers(0, 3) | st.sampled_from(["", "a", "1", "a/b", "a%2Fb", "%", "3/gsm8k"])


@given(st.lists(st.builds(EID, batch=PARTS, task=PARTS, run=st.integers(0, 9), step=st.integers(0, 9)), max_size=8))
def test_ids_composed_together_are_those_composed_one_by_one(eids: list[EID]) -> None:
    parts = [[getattr(eid, name) for eid in eids] for name in ("batch", "task", "run", "step", "suffix")]

    for kind in ("uid", "sid", "rid", "tid"):
        assert composed_ids(kind, *parts) == [getattr(eid, kind) for eid in eids]


def test_an_unknown_kind_of_id_is_refused() -> None:
    with pytest.raises(ValueError, match="'xid' is not a kind of id"):
        composed_ids("xid", [1], [2], [3], [4], ["a"])

import pytest

from trinity_mq.experience import (
    EID,
    Experience,
    gather_token_ids,
    group_by,
    split_dpo_experience_to_single_turn,
)


@pytest.mark.parametrize(
    ("id_type", "groups"),
    [
        ("task", {"1/b": [0, 1, 3], "1/a": [2]}),
        ("run", {"1/b/0": [0, 3], "1/b/1": [1], "1/a/0": [2]}),
        ("step", {"1/b/0": [0, 1], "1/a/0": [2], "1/b/1": [3]}),
    ],
)
def test_groups_in_order_of_appearance(id_type, groups):
    ids = [EID(1, "b", 0, 0), EID(1, "b", 1, 0), EID(1, "a", 0, 0), EID(1, "b", 0, 1)]
    given = [Experience(eid=eid, tokens=[1, 2], reward=i) for i, eid in enumerate(ids)]
    found = group_by(given, id_type)
    assert list(found) == list(groups)
    assert {key: [item.reward for item in items] for key, items in found.items()} == groups


def test_unknown_id_type():
    with pytest.raises(ValueError, match="Unknown id_type: batch; wanted one of task, run, step"):
        group_by([], "batch")


def test_batches_with_slashes_stay_apart():
    given = [Experience(eid=EID("3/a", "b"), tokens=[1, 2]), Experience(eid=EID("3", "a/b"), tokens=[1, 2])]
    assert len(group_by(given, "task")) == 2


def test_split_gives_chosen_then_rejected(dpo):
    halves = split_dpo_experience_to_single_turn([dpo, dpo])
    assert [half.tokens.tolist() for half in halves] == [[1, 2, 3, 4, 5], [1, 2, 3, 6]] * 2
    assert [half.messages[0]["content"] for half in halves] == ["yes", "no"] * 2
    assert {half.experience_type for half in halves} == {"single_turn"}
    assert {half.prompt_length for half in halves} == {3}
    assert {half.eid.rid for half in halves} == {dpo.eid.rid}
    assert len({half.eid.uid for half in halves} | {dpo.eid.uid}) == 5
    assert halves[0].info == {"source": "human"}
    assert halves[0].logprobs is None
    assert gather_token_ids(halves[:2], 3, 2, 0).tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 0]]


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


def test_split_refuses_other_types(dpo, multi):
    with pytest.raises(ValueError, match=r"experience 1 .* is multi_turn, wanted dpo"):
        split_dpo_experience_to_single_turn([dpo, multi])

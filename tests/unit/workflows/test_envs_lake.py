from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.workflows.games import FrozenLake, LakeError, LakeMap, make_lake
from trinity_mq.workflows.games.frozen_lake import MOVES

MAP = LakeMap.of(["SFF", "FHF", "HFG"])


def walk(game, *moves):
    for move in moves:
        game = game.move(move)
    return game


@given(size=st.integers(2, 8), ice=st.floats(0.5, 1.0), seed=st.integers())
def test_every_lake_has_a_way_and_is_the_same_again(size, ice, seed):
    lake = make_lake(size, ice, seed)
    assert lake == make_lake(size, ice, seed)
    assert LakeMap.of(lake.rows) == lake
    assert lake.shortest() >= 2 * (size - 1)
    assert lake.at((0, 0)) == "S"
    assert lake.at((size - 1, size - 1)) == "G"


def test_seeds_give_different_lakes():
    assert len({make_lake(4, 0.8, seed) for seed in range(20)}) > 15


def test_a_lake_can_be_crossed_within_the_moves_allowed():
    assert max(make_lake(6, 0.6, seed).shortest() for seed in range(200)) > 10
    assert max(make_lake(6, 0.6, seed, within=10).shortest() for seed in range(200)) == 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"size": 1, "ice": 0.8}, "size is 1"),
        ({"size": 65, "ice": 0.8}, "size is 65"),
        ({"size": 4, "ice": 0.0}, "ice is 0"),
        ({"size": 4, "ice": 0.8, "within": 5}, "needs at least 6 moves; 5 are allowed"),
        ({"size": 30, "ice": 0.05}, "raise ice"),
    ],
)
def test_lakes_that_cannot_be_say_why(arguments, said):
    with pytest.raises(LakeError, match=said):
        make_lake(seed=1, **arguments)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "0 rows"),
        ([""], "wanted 1 to 64 rows of 1 to 64 places"),
        (["SF", "G"], "not of one length"),
        (["SX", "FG"], "holds 'X'"),
        (["SS", "FG"], "2 S and 1 G"),
        (["SF", "FF"], "1 S and 0 G"),
        (["S" + "F" * 64 + "G"], "wanted 1 to 64"),
    ],
)
def test_maps_that_cannot_be_say_why(rows, said):
    with pytest.raises(LakeError, match=said):
        LakeMap.of(rows)


def test_a_way_to_the_goal():
    game = walk(FrozenLake.begin(MAP), "right", "right", "down", "down")
    assert (game.solved, game.fallen, game.over, game.moves) == (True, False, True, 4)
    assert MAP.shortest() == 4
    assert MAP.shortest((2, 1)) == 1
    assert LakeMap.of(["SHG"]).shortest() is None


def test_a_hole_ends_the_game():
    game = walk(FrozenLake.begin(MAP), "down", "right")
    assert (game.solved, game.fallen, game.over) == (False, True, True)
    assert game.render() == "FFF\nFXF\nHFG"
    with pytest.raises(LakeError, match="over"):
        game.move("up")


def test_the_edge_holds_and_the_game_that_was_stays_as_it_was():
    start = FrozenLake.begin(MAP)
    again = walk(start, "left", "up")
    assert (again.place, again.moves) == ((0, 0), 2)
    assert (start.place, start.moves) == ((0, 0), 0)
    assert start.render() == "PFF\nFHF\nHFG"


def test_no_such_move():
    with pytest.raises(LakeError, match="wanted one of left, down, right, up"):
        FrozenLake.begin(MAP).move("north")


@pytest.mark.parametrize("move", MOVES)
def test_slippery_ice_goes_to_three_sides_and_never_back(move):
    middle = LakeMap.of(["FFFFF", "FFFFF", "FFFFF", "FFFFF", "SFFFG"])
    ends = Counter(FrozenLake(middle, (2, 2), slippery=True, seed=seed).move(move).place for seed in range(600))
    row, column = MOVES[move]
    assert set(ends) == {(2 + r, 2 + c) for r, c in MOVES.values()} - {(2 - row, 2 - column)}
    assert min(ends.values()) > 130  # of 200 expected: six deviations


def test_slips_follow_from_the_seed_alone():
    lake = make_lake(6, 1.0, 0)
    ways = [
        walk(FrozenLake.begin(lake, slippery=True, seed=seed), *["down", "right"] * 4).place for seed in [3, 3, 4, 5, 6]
    ]
    assert ways[0] == ways[1]
    assert len(set(ways)) > 1

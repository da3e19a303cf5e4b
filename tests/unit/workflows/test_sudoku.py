"""The game, and the workflow that has a model play it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.games import Sudoku, SudokuError, make_sudoku
from trinity_mq.workflows.games.sudoku import AsyncSudokuWorkflow, SudokuWorkflow, read_entries, solutions

SOLUTION = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)
GIVENS = (0, 2, 3, 4, 3, 0, 1, 2, 2, 1, 4, 3, 4, 3, 2, 0)
GAME = Sudoku(2, GIVENS, SOLUTION, GIVENS)


def lines_of(board, box):
    size = box * box
    rows = [board[row * size : (row + 1) * size] for row in range(size)]
    columns = [board[column::size] for column in range(size)]
    boxes = [
        [board[(top + row) * size + left + column] for row in range(box) for column in range(box)]
        for top in range(0, size, box)
        for left in range(0, size, box)
    ]
    return [*rows, *columns, *boxes]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), box=st.sampled_from([2, 3]), seed=st.integers())
def test_every_puzzle_has_one_solution_and_is_the_same_again(data, box, seed):
    blanks = data.draw(st.integers(1, 10 if box == 2 else 45))
    game = make_sudoku(box, blanks, seed)
    assert game == make_sudoku(box, blanks, seed)
    assert game.blanks == blanks
    assert solutions(game.givens, box) == [game.solution]
    assert all(sorted(line) == list(range(1, box * box + 1)) for line in lines_of(game.solution, box))
    assert all(given in (0, digit) for given, digit in zip(game.givens, game.solution, strict=True))
    assert not game.solved
    for place, given_digit in enumerate(game.givens):
        if not given_digit:
            game = game.put(place // game.size + 1, place % game.size + 1, game.solution[place])
    assert game.solved


@pytest.mark.parametrize(
    ("box", "blanks", "said"),
    [(4, 3, "wanted box 2 or 3"), (2, 0, "1 to 12 blanks"), (2, 13, "1 to 12 blanks"), (3, 56, "1 to 55 blanks")],
)
def test_puzzles_that_cannot_be_say_why(box, blanks, said):
    with pytest.raises(SudokuError, match=said):
        make_sudoku(box, blanks, 0)


def test_entries_right_wrong_and_taken_back():
    assert (GAME.blanks, GAME.right, GAME.solved) == (3, 0, False)
    one = GAME.put(1, 1, 1)
    assert (one.right, one.board[0], GAME.board[0]) == (1, 1, 0)
    assert one.put(1, 1, 0) == GAME
    assert one.put(2, 2, 4).put(4, 4, 1).solved


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ((0, 1, 1), "row 0, column 1, digit 1: rows and columns go from 1 to 4"),
        ((1, 5, 1), "column 5"),
        ((1, 1, 5), "digits from 0"),
        ((1, 1, -1), "digit -1"),
        ((1, 2, 2), "was given as 2"),
        ((1, 2, 0), "was given as 2"),
        ((1, 1, 3), "3 stands in that row already"),
        ((4, 4, 2), "2 stands in that row already"),
    ],
)
def test_what_breaks_a_rule_is_refused(entry, said):
    with pytest.raises(SudokuError, match=said):
        GAME.put(*entry)


def test_columns_and_boxes_have_rules_too():
    empty = (0,) * 16
    game = Sudoku(2, empty, SOLUTION, empty).put(1, 1, 1)
    with pytest.raises(SudokuError, match="in that column"):
        game.put(4, 1, 1)
    with pytest.raises(SudokuError, match="in that box"):
        game.put(2, 2, 1)
    assert game.put(1, 1, 2).board[0] == 2, "a digit of one's own can be replaced"
    assert game.put(3, 3, 1).board[10] == 1


def test_the_board_is_shown():
    assert GAME.render() == ". 2 | 3 4\n3 . | 1 2\n---------\n2 1 | 4 3\n4 3 | 2 ."


def test_the_solver_gives_up():
    with pytest.raises(SudokuError, match="too open"):
        solutions((0,) * 81, 3, most=10**9)


BOTH = pytest.mark.parametrize("kind", [SudokuWorkflow, AsyncSudokuWorkflow])


async def run(kind, model, **keys):
    keys.setdefault("raw_task", {"seed": 7, "blanks": 3})
    made = Task(workflow=kind, **keys)
    return await execute(lambda: made.to_workflow(model), kind)


def missing():
    """Return the entries that solve the puzzle of seed 7."""
    game = make_sudoku(2, 3, 7)
    return [
        (place // 4 + 1, place % 4 + 1, game.solution[place]) for place, digit in enumerate(game.givens) if not digit
    ]


def put(*entries):
    return " ".join("<put>{} {} {}</put>".format(*entry) for entry in entries)


@BOTH
async def test_solving_it_is_worth_one(kind, stub_model):
    first, *rest = missing()
    model = stub_model([put(first), "So " + put(*rest), "never"], enable_history=True)
    experiences = await run(kind, model)
    assert [(exp.eid.step, exp.reward) for exp in experiences] == [(0, 1.0), (1, 1.0)]
    assert experiences[0].metrics == {
        "success": 1.0,
        "entries": 3,
        "refused_entries": 0,
        "unclear_answers": 0,
        "right_share": 1.0,
        "prompt_too_long": 0.0,
        "actual_env_steps": 2,
        "ended_truncated": 0.0,
    }
    assert model.calls[0][0][1]["content"] == make_sudoku(2, 3, 7).render()


@BOTH
async def test_entries_after_one_that_is_refused_are_not_made(kind, stub_model):
    first, *rest = missing()
    model = stub_model([put(first, (first[0], first[1], 9), *rest), "?"], enable_history=True)
    args = {"max_steps": 2, "partial_credit": 0.3}
    experiences = await run(kind, model, workflow_args=args)
    assert experiences[0].metrics["entries"] == 1
    assert experiences[0].metrics["refused_entries"] == 1
    assert experiences[0].metrics["unclear_answers"] == 1
    assert [exp.reward for exp in experiences] == pytest.approx([0.1, 0.1])
    assert "Refused: row" in model.calls[1][0][-1]["content"]


@BOTH
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"box": 4}, "workflow_args.box is 4"),
        ({"blanks": 13}, "1 to 12 blanks"),
        ({"blank": 3}, "did you mean 'blanks'"),
    ],
)
async def test_puzzles_that_cannot_be_are_the_tasks_fault(kind, args, said, stub_model):
    with pytest.raises(TaskError, match=said):
        await run(kind, stub_model(["x"], enable_history=True), raw_task={}, workflow_args=args)


@pytest.mark.parametrize(
    ("answer", "entries"),
    [
        ("<put>1 2 3</put> and <put> 4,4; 1 </put>", [(1, 2, 3), (4, 4, 1)]),
        ("123", [(1, 2, 3)]),
        (" 1 2 3\n", [(1, 2, 3)]),
        ("row 1 column 2 is 3", []),
        ("<put>1 2</put>", []),
        ("<put>1 2 \u0663</put>", []),
        ("<put>" * 800, []),
        ("<put>1 1 1</put>" * 250, [(1, 1, 1)] * 81),
    ],
)
def test_entries_are_read(answer, entries):
    assert read_entries(answer) == entries

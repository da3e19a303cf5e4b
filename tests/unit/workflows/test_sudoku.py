import pytest

from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.games import make_sudoku
from trinity_mq.workflows.games.sudoku import AsyncSudokuWorkflow, SudokuWorkflow, read_entries

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

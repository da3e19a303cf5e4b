"""The game, and the workflow that has a model play it."""

import threading
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workflows.tiny_engines import make_generator, tiny_engine
from trinity_mq.config import FormatConfig
from trinity_mq.models import EngineClients, ModelWrapper, PromptTooLong
from trinity_mq.workflows import Task, TaskError, execute
from trinity_mq.workflows.games import FrozenLake, LakeError, LakeMap, make_lake
from trinity_mq.workflows.games.frozen_lake import (
    INSTRUCTIONS,
    MOVES,
    AsyncFrozenLakeWorkflow,
    FrozenLakeWorkflow,
    read_move,
)
from trinity_mq.workflows.games.game import MAX_SEEN

LAKE = LakeMap.of(["SFF", "FHF", "HFG"])


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


def test_a_lake_can_be_crossed_within_the_moves_allowed():
    assert max(make_lake(6, 0.6, seed).shortest() for seed in range(200)) > 10
    assert max(make_lake(6, 0.6, seed, within=10).shortest() for seed in range(200)) == 10


@pytest.mark.parametrize(
    ("lake", "said"),
    [
        ({"size": 1, "ice": 0.8}, "size is 1"),
        ({"size": 65, "ice": 0.8}, "size is 65"),
        ({"size": 4, "ice": 0.0}, "ice is 0"),
        ({"size": 4, "ice": 0.8, "within": 5}, "needs at least 6 moves; 5 are allowed"),
        ({"size": 30, "ice": 0.05}, "raise ice"),
        ([], "0 rows"),
        ([""], "wanted 1 to 64 rows of 1 to 64 places"),
        (["SF", "G"], "not of one length"),
        (["SX", "FG"], "holds 'X'"),
        (["SS", "FG"], "2 S and 1 G"),
        (["SF", "FF"], "1 S and 0 G"),
        (["S" + "F" * 64 + "G"], "wanted 1 to 64"),
    ],
)
def test_lakes_and_maps_that_cannot_be_say_why(lake, said):
    with pytest.raises(LakeError, match=said):
        make_lake(seed=1, **lake) if isinstance(lake, dict) else LakeMap.of(lake)


def test_a_game_ends_at_the_goal_or_in_a_hole_and_goes_on_at_the_edge():
    start = FrozenLake.begin(LAKE)
    game = walk(start, "right", "right", "down", "down")
    assert (game.solved, game.fallen, game.over, game.moves) == (True, False, True, 4)
    game = walk(start, "down", "right")
    assert (game.solved, game.fallen, game.over) == (False, True, True)
    assert game.render() == "FFF\nFXF\nHFG"
    with pytest.raises(LakeError, match="over"):
        game.move("up")
    game = walk(start, "left", "up")
    assert (game.place, game.moves) == ((0, 0), 2)
    assert (start.place, start.moves) == ((0, 0), 0)
    assert start.render() == "PFF\nFHF\nHFG"
    with pytest.raises(LakeError, match="wanted one of left, down, right, up"):
        start.move("north")
    assert (LAKE.shortest(), LAKE.shortest((2, 1)), LakeMap.of(["SHG"]).shortest()) == (4, 1, None)


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


BOTH = pytest.mark.parametrize("kind", [FrozenLakeWorkflow, AsyncFrozenLakeWorkflow])
MAP = ["SFF", "FHF", "HFG"]
WAY = ["<move>right</move>", "<move>right</move>", "<move>down</move>", "<move>down</move>"]


def task(kind, **keys):
    keys.setdefault("raw_task", {"map": MAP})
    return Task(workflow=kind, **keys)


async def run(kind, model, **keys):
    made = task(kind, **keys)
    return await execute(lambda: made.to_workflow(model), kind)


def model_of(stub_model, *answers):
    return stub_model(answers, enable_history=True)


@BOTH
async def test_reaching_the_goal_is_worth_one_for_every_step(kind, stub_model):
    model = model_of(stub_model, "hm", "<move>left</move>", *WAY)
    experiences = await run(kind, model)
    assert [exp.eid.step for exp in experiences] == list(range(6))
    assert {exp.reward for exp in experiences} == {1.0}
    for exp in experiences:
        assert exp.metrics == {
            "success": 1.0,
            "moves": 5,
            "unclear_answers": 1,
            "fallen": 0.0,
            "prompt_too_long": 0.0,
            "actual_env_steps": 6,
            "ended_truncated": 0.0,
        }
    first, last = model.calls[0][0], model.calls[5][0]
    assert first == [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": "PFF\nFHF\nHFG"}]
    assert [message["role"] for message in last] == ["system", *["user", "assistant"] * 5, "user"]
    assert "names no move" in last[3]["content"]
    assert "where you were" in last[5]["content"]
    assert last[-1]["content"] == "FFF\nFHP\nHFG"
    assert last[:2] == first, "the conversation only grows: what was sampled stays a prefix"
    assert {keys["n"] for _, keys in model.calls} == {1}


@BOTH
async def test_partial_credit_is_the_share_of_the_way(kind, stub_model):
    answers = ["<move>right</move>", "<move>right</move>", "<move>down</move>"]
    args = {"max_steps": 3, "partial_credit": 0.4}
    experiences = await run(kind, model_of(stub_model, *answers), workflow_args=args)
    assert [exp.reward for exp in experiences] == pytest.approx([0.4 * 3 / 4] * 3)
    fallen = await run(kind, model_of(stub_model, "<move>down</move>", "<move>right</move>"), workflow_args=args)
    assert {exp.reward for exp in fallen} == {0.0}


@BOTH
async def test_terse_and_without_memory(kind, stub_model):
    model = model_of(stub_model, "R", "?", "R", "D", "D")
    experiences = await run(kind, model, workflow_args={"terse": True, "memory": False})
    assert experiences[0].reward == 1.0
    assert [messages for messages, _ in model.calls[:3]] == [
        [{"role": "user", "content": "PFF\nFHF\nHFG"}],
        [{"role": "user", "content": "FPF\nFHF\nHFG"}],
        [{"role": "user", "content": "FPF\nFHF\nHFG"}],
    ]


@BOTH
def test_the_record_comes_before_the_arguments(kind, stub_model):
    made = task(
        kind,
        raw_task={"size": 3, "seed": 5, "slippery": None, "question": "q"},
        workflow_args={"size": 6, "slippery": True},
        format_args=FormatConfig(system_prompt="Mine."),
    )
    arguments = made.to_workflow(model_of(stub_model)).arguments
    assert (arguments.size, arguments.seed, arguments.slippery) == (3, 5, True)


@BOTH
async def test_a_move_inside_thoughts_is_not_played(kind, stub_model):
    drafts = "<think><move>down</move>? Or <move>right</move>?</think> "
    model = model_of(stub_model, *(drafts + move for move in WAY), "<think><move>down</move>")
    assert (await run(kind, model))[-1].metrics["success"] == 1.0
    (one,) = await run(kind, model, workflow_args={"max_steps": 1})
    assert (one.metrics["moves"], one.metrics["unclear_answers"]) == (0, 1)


@BOTH
async def test_of_a_long_answer_the_end_is_played_and_the_conversation_keeps_all(kind, stub_model):
    model = model_of(stub_model, WAY[0] + "x" * MAX_SEEN + WAY[1], *WAY[1:])
    (first, *_) = await run(kind, model)
    assert (first.metrics["success"], first.metrics["moves"]) == (1.0, 4)
    assert model.calls[1][0][2]["content"].startswith(WAY[0] + "x")


@BOTH
async def test_lakes_are_not_made_on_the_event_loop(kind, stub_model):
    threads = []

    class Noted(kind):
        def make_game(self):
            threads.append(threading.current_thread())
            return super().make_game()

    await run(Noted, model_of(stub_model, *WAY))
    assert threads[0] is not threading.current_thread()


@BOTH
async def test_a_first_prompt_that_is_too_long_is_a_failure(kind, stub_model):
    with pytest.raises(PromptTooLong):
        await run(kind, model_of(stub_model, ("[masked]", "prompt_truncated")))


@BOTH
async def test_a_prompt_that_was_cut_ends_the_run(kind, stub_model):
    model = model_of(stub_model, WAY[0], ("[masked]", "prompt_truncated"), "never")
    experiences = await run(kind, model)
    assert [exp.reward for exp in experiences] == [0.0, 0.0]
    assert experiences[0].metrics["prompt_too_long"] == 1.0
    assert experiences[0].metrics["moves"] == 1


@BOTH
async def test_all_runs_of_a_task_have_the_same_lake_and_tasks_differ(kind, stub_model):
    shown = []
    for index in (0, 0, 1, 2):
        model = model_of(stub_model, "x")
        args = {"max_steps": 14, "size": 8}
        made = task(kind, raw_task={}, workflow_args=args, index={"taskset": "t", "index": index})
        workflow = made.to_workflow(model)
        shown.append(workflow.make_game().show())
    assert shown[0] == shown[1]
    assert len(set(shown)) == 3


@BOTH
@pytest.mark.parametrize(
    ("record", "args", "said"),
    [
        ({}, {"sise": 3}, "workflow_args.sise does not exist; did you mean 'size'"),
        ({}, {"size": 1}, "workflow_args.size is 1: Input should be greater than or equal to 2"),
        ({"size": "big"}, {}, "raw_task.size is 'big'"),
        ({"size": 6}, {"max_steps": 3}, "needs at least 10 moves; 3 are allowed"),
        ({"map": ["SHG"]}, {}, "no way from S to G"),
        ({"map": ["S"]}, {}, "1 S and 0 G"),
    ],
)
async def test_lakes_that_cannot_be_are_the_tasks_fault(kind, record, args, said, stub_model):
    with pytest.raises(TaskError, match=said):
        await run(kind, model_of(stub_model, "x"), raw_task=record, workflow_args=args)


@pytest.mark.parametrize(
    ("answer", "move"),
    [
        ("I go <move>left</move>, no: <move> DOWN </move>", "down"),
        ("right", "right"),
        (" U. ", "up"),
        ("I think right is best", None),
        ("<move>north</move>", None),
        ("", None),
        ("<move>" * 600, None),
    ],
)
def test_moves_are_read(answer, move):
    assert read_move(answer) == move


@BOTH
async def test_merged_turns_train_on_the_same_tokens_and_read_them_once(kind, tmp_path):
    generator = make_generator(tmp_path / "m", characters="SFHGPX\nLDRUabcd", max_model_len=128)
    made = {}
    async with tiny_engine(generator) as handle, EngineClients() as clients:
        for merge in (True, False):
            model = ModelWrapper(handle, seed=3, enable_history=True, max_response_tokens=1, clients=clients)
            args = {"terse": True, "max_steps": 6, "merge_turns": merge}
            made[merge] = await run(kind, model, raw_task={"map": ["SFFFFG"]}, workflow_args=args)
    whole, single = made[True], made[False]
    assert len(whole) < len(single)
    assert sum(len(exp.tokens) for exp in whole) < sum(len(exp.tokens) for exp in single)
    tokens = [torch.cat([exp.tokens[exp.prompt_length :][exp.action_mask] for exp in each]) for each in made.values()]
    logprobs = [torch.cat([exp.logprobs[exp.action_mask] for exp in each]) for each in made.values()]
    assert torch.equal(*tokens)
    assert torch.allclose(*logprobs, atol=1e-6, rtol=0)
    assert {exp.reward for exp in whole} == {exp.reward for exp in single}
    assert whole[0].metrics == single[0].metrics

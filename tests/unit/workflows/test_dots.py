"""Connect the Dots: packs of tasks on one map, with hints from each task for the next."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.unit.workflows.scripted_runs import run_scripted
from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config.estimators import DotsEstimator
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.workflows import Task, TaskError, load_workflow
from trinity_mq.workflows.environments.dots import (
    GridMap,
    GridPackArguments,
    GridTask,
    between,
    compressed,
    draw_costs,
    pack_seeds,
    read_destination,
)

SMALL = {"grid_min_size": 4, "grid_max_size": 4, "landscape_num_components": 3, "min_rounds": 1, "max_rounds": 1}
TARGET = re.compile(r"Target position: \((\d+),(\d+)\)")
WRITTEN = "Row 0 is cheap.\n--- Start of updated hints ---\n- Stay in row 0.\n--- End of updated hints ---"


def last_message(prompt: str) -> str:
    return prompt.rpartition("<|im_start|>user\n")[2]


def player(hints: str = WRITTEN, move: str | None = None) -> Callable[[str], str]:
    """Return a script that walks to the target at once, or makes ``move``, and writes ``hints``."""

    def answer(prompt: str) -> str:
        target = TARGET.search(last_message(prompt))
        if "--- Your job ---" in prompt:
            return hints
        assert target is not None
        return move or f"There. <answer>{target[1]},{target[2]}</answer>"

    return answer


async def run_pack(
    script: Callable[[str], str],
    run: int = 0,
    record: dict[str, Any] | None = None,
    limits: Mapping[str, int] | None = None,
    **arguments: Any,
) -> tuple[list[Experience], list[str]]:
    """Return the experiences of a run, and the prompts."""
    task = Task(
        workflow=load_workflow("cod_grid_navigation_workflow"),
        raw_task=record or {"seed": 5, "index": 0, "uid": "grid_navigation_5"},
        workflow_args={**SMALL, **arguments},
    )
    experiences, generator = await run_scripted(task, script, run=run, **(limits or {}))
    return experiences, generator.prompts


def test_maps_and_tasks_are_those_of_trinity() -> None:
    arguments = GridPackArguments(**{**SMALL, "min_rounds": 2, "max_rounds": 3})
    costs = draw_costs(arguments, 7)  # drawn by Trinity-RFT's main branch, as the tasks
    assert costs.tolist() == [[0, 33, 89, 42], [0, 79, 93, 19], [0, 3, 30, 99], [0, 0, 0, 2]]
    grid = GridMap(costs, 1)
    tasks = [GridTask(grid, arguments, seed) for seed in (7, 8)]
    assert [(task.start, task.goal, task.rounds) for task in tasks] == [((2, 2), (3, 0), 3), ((1, 0), (2, 2), 3)]


def test_a_move_costs_the_cells_that_it_enters_and_reveals_them_for_the_pack() -> None:
    arguments = GridPackArguments(**{**SMALL, "min_rounds": 2, "max_rounds": 3})
    grid = GridMap(draw_costs(arguments, 7), 0)
    task = GridTask(grid, arguments, 7)
    told = task.move((2, 0))
    assert told == ("You moved to (2,0) through 2 entered cells: (2,1) -> (2,0). Cumulative normalized loss: 0.0150.")
    assert grid.show().splitlines()[3] == "  2    0  3  ?  ?"
    assert (task.over, task.reward) == (False, 0.0)
    task.move((3, 0))
    assert not task.over, "a task has all its rounds"
    task.move((2, 0))
    assert (task.over, task.reward) == (True, 0.0)
    again = GridTask(grid, arguments, 7)
    for place in ((2, 0), (2, 1), (2, 0)):
        again.move(place)
    assert again.outcome().startswith("Failed: after 3 rounds, position (2, 0) did not equal target (3, 0). Reward: 0.")
    third = GridTask(grid, arguments, 7)
    for place in ((2, 1), (2, 0), (3, 0)):
        third.move(place)
    assert third.reward == pytest.approx(1 - 3 / 300)
    assert third.outcome().startswith("Success: finished round 3 at the target. Normalized loss: 0.0100; reward: 0.99")


@pytest.mark.parametrize(
    ("destination", "words"),
    [
        (None, "expected exactly one"),
        ((4, 0), "outside the grid"),
        ((2, 2), "must differ"),
        ((3, 3), "the same row or the same column"),
    ],
)
def test_an_invalid_move_ends_the_task(destination: tuple[int, int] | None, words: str) -> None:
    arguments = GridPackArguments(**{**SMALL, "min_rounds": 2, "max_rounds": 3})
    task = GridTask(GridMap(draw_costs(arguments, 7), 1), arguments, 7)
    assert words in task.move(destination)
    assert (task.over, task.reward, task.moves) == (True, 0.0, 0)
    assert words in task.outcome()


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ("so <answer> 3 , 12\n</answer>", (3, 12)),
        ("<answer>-1,2</answer>", (-1, 2)),
        ("<answer>1,2</answer><answer>1,3</answer>", None),
        ("</answer>1,2<answer>", None),
        ("</answer> so <answer>1,2", None),
        ("<answer>" + "9" * 5000 + ",1</answer>", None),
        ("<answer>(1,2)</answer>", None),
        ("1,2", None),
    ],
)
def test_destinations_are_read_as_in_trinity(answer: str, place: tuple[int, int] | None) -> None:
    assert read_destination(answer) == place


def test_answers_are_shortened_for_later_rounds() -> None:
    answer = "<think>a</think>b</think>c<think>d</think><answer>1,2</answer><think>e"
    assert compressed(answer, "keep_all") == answer
    assert compressed(answer, "remove_think") == "b</think>c<answer>1,2</answer><think>e"
    assert compressed(answer, "keep_answer") == "<answer>1,2</answer>"
    assert compressed("1,2", "keep_answer") == "(Failed to parse answer from response)"
    assert len(compressed("<think>" * 200_000, "remove_think")) == 7 * 200_000
    assert between("a(b)c", "(", ")") == "b"


async def test_each_task_has_the_hints_of_the_task_before_it() -> None:
    experiences, prompts = await run_pack(player(), pack_size=3, max_response_tokens_restraint=50)
    kinds = [(one.info["exp_type"], one.info.get("task_idx"), one.info.get("hint_idx")) for one in experiences]
    assert kinds == [
        ("solve_task", 0, None), ("gen_hint", None, 0), ("solve_task", 1, None), ("gen_hint", None, 1),
        ("solve_task", 2, None),
    ]  # fmt: skip
    solving = [prompt for prompt in prompts if "--- Your job ---" not in prompt]
    updating = [prompt for prompt in prompts if "--- Your job ---" in prompt]
    assert "Hints: null\n\n## Response length limit" in solving[0]
    assert all("environment.\n\nHints: - Stay in row 0.\n\n## Response" in prompt for prompt in solving[1:])
    assert "--- Previous hints ---\n\nHints: null\n\n\n--- A new task-solving trajectory ---" in updating[0]
    assert "--- Previous hints ---\n\nHints: - Stay in row 0.\n" in updating[1]
    request = last_message(updating[0])
    assert "## Hints" not in request, "the course of a task has its rules without its hints"
    assert "Step 1:\nObservation: Round 1/1\n\nCurrent position:" in request
    assert "Environment feedback: Success: finished round 1 at the target." in request
    assert "Please limit your response to 50 tokens." in updating[0]
    rewards = [one.reward for one in experiences if one.info["exp_type"] == "solve_task"]
    assert all(reward is not None and 0 < reward <= 1 for reward in rewards)
    assert all(one.info["task_rewards"] == rewards for one in experiences)
    assert [one.reward for one in experiences if one.info["exp_type"] == "gen_hint"] == [0.0, 0.0]
    assert [one.eid.step for one in experiences] == list(range(5))
    assert experiences[-1].metrics["pack_reward"] == pytest.approx(sum(rewards) / 3)
    seen = [last_message(prompt).count("?") for prompt in solving]
    assert seen[0] > seen[1] > 0, "what a task has seen the next task sees"


async def test_hints_that_cannot_be_read_or_are_too_long_cost_their_penalty() -> None:
    unread, prompts = await run_pack(player("no hints"), pack_size=2, hint_penalty_coef=0.1)
    assert (unread[1].reward, unread[1].metrics["hint_parse_success"]) == (pytest.approx(-0.1), 0.0)
    assert "Hints: no hint available." in prompts[-1]
    tokens = len(WRITTEN) + 1  # a byte is a token, and the end is one
    bounds = {"hint_len_zero_penalty": tokens - 50, "hint_len_max_penalty": tokens + 50}
    long, _ = await run_pack(player(), pack_size=2, hint_penalty_coef=0.1, **bounds)
    assert long[1].reward == pytest.approx(-0.05)
    short, _ = await run_pack(player(), pack_size=2, hint_penalty_coef=0.1, hint_len_min_penalty=999, **bounds)
    assert short[1].reward == pytest.approx(-0.1)


async def test_hints_that_make_a_later_prompt_too_long_cost_its_reward() -> None:
    long = WRITTEN.replace("Stay", "Stay" * 900)
    limits = {"max_prompt_tokens": 6600, "max_response_tokens": 5000}
    experiences, _ = await run_pack(player(long), pack_size=3, limits=limits)
    tasks = [(one.info["exp_type"], one.truncate_status, one.reward == 0) for one in experiences]
    cut = ("solve_task", "prompt_truncated", True)
    assert tasks == [("solve_task", None, False), ("gen_hint", None, True), cut, cut]


async def test_long_answers_lower_the_reward_of_a_solved_task() -> None:
    cheap = {"seeds": [8], "pack_seed": 7}
    [plain], _ = await run_pack(player(), record=cheap, pack_size=1)
    penalty = {"length_penalty_coef": 0.1, "len_zero_penalty": 1, "len_full_penalty": 2}
    [lowered], _ = await run_pack(player(), record=cheap, pack_size=1, **penalty)
    assert lowered.reward == pytest.approx(plain.reward - 0.2)
    [failed], _ = await run_pack(player(move="<answer>9,9</answer>"), pack_size=1, **penalty)
    assert (failed.reward, failed.metrics["invalid_move"]) == (0.0, 1.0)


def test_a_record_may_name_the_tasks_of_its_pack() -> None:
    seeds, map_seed = pack_seeds(GridPackArguments(seed=5))
    assert (len(seeds), seeds[0], len({*seeds, map_seed})) == (4, 5, 5)
    assert pack_seeds(GridPackArguments(seed=5)) == (seeds, map_seed)
    assert pack_seeds(GridPackArguments(seed=6))[1] != map_seed
    assert pack_seeds(GridPackArguments(seeds=(3, 9, 4), pack_seed=11)) == ([3, 9, 4], 11)


@pytest.mark.parametrize(
    ("record", "arguments", "words"),
    [
        ({"seed": -1}, {}, "raw_task.seed is -1"),
        ({"seed": 1}, {"min_rounds": 3}, "min_rounds is 3 and max_rounds is 1, wanted a lower min_rounds"),
        ({"seed": 1}, {"length_penalty_coef": 1.0}, "needs len_zero_penalty"),
        ({"seed": 1}, {"hint_len_zero_penalty": 5, "hint_len_max_penalty": 5}, "wanted a lower hint_len_zero_penalty"),
        ({"seed": 1}, {"packs": 1}, "workflow_args.packs does not exist"),
    ],
)
async def test_packs_that_make_no_sense_say_so(record: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        await run_pack(player(), record=record, **arguments)


async def test_hints_are_worth_what_later_tasks_earn() -> None:
    """Of two runs whose first tasks are alike, the hints of the run whose second task succeeds gain."""

    def fails_later(prompt: str) -> str:
        return player(move="<answer>9,9</answer>" if "row 0" in prompt else None)(prompt)

    good, _ = await run_pack(player("no hints"), run=0, pack_size=2)
    bad, _ = await run_pack(fails_later, run=1, pack_size=2)
    kept, _ = estimate(ExperienceBatch.of([*good, *bad]), DotsEstimator())
    gains = {(one.eid.run, one.info["exp_type"], one.info.get("task_idx")): float(one.advantages.max()) for one in kept}
    lows = {one.eid.run: float(one.advantages.min()) for one in kept}
    assert gains[0, "gen_hint", None] > 0
    assert all(value > 0 for (run, *_), value in gains.items() if run == 0)
    assert lows[1] < 0

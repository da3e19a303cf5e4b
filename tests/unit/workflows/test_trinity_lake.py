"""Frozen Lake under Trinity-RFT's name: the maps, the walk and the conversation are those of Trinity-RFT 0.6.0."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.workflows.scripted_runs import run_scripted
from trinity_mq.experience import Experience
from trinity_mq.workflows import Task, TaskError, load_workflow
from trinity_mq.workflows.environments.lake import ORDER, Walk, draw_map, read_move
from trinity_mq.workflows.environments.prompts import FROZEN_LAKE

MAPS = {  # drawn by Trinity-RFT 0.6.0 for size, p, seed and env_max_steps
    (4, 0.7, 1, 8): ("FHFH", "FGHF", "FFHF", "SHFF"),
    (4, 0.7, 2, 8): ("FFHF", "FHFF", "FFFF", "FFGS"),
    (3, 0.65, 99, 8): ("FSF", "HFG", "FFF"),
}
RECORD = {"size": 3, "p": 0.65, "seed": 99, "index": 0, "uid": "99_3_0.65"}


async def walk(
    answers: Sequence[str], record: dict[str, Any] = RECORD, *, model_limit: int | None = None, **arguments: Any
) -> tuple[list[Experience], list[str], list[int]]:
    """Return the experiences of a run, its prompts, and the token limits of its requests.

    Args:
        answers: What the model answers.
        record: The record.
        model_limit: Maximum tokens of an answer of the model.
        arguments: Arguments of the workflow.
    """
    task = Task(workflow=load_workflow("frozen_lake_workflow"), raw_task=record, workflow_args=arguments)
    experiences, generator = await run_scripted(task, list(answers), max_response_tokens=model_limit)
    return experiences, generator.prompts, [request.max_tokens for request in generator.requests]


@pytest.mark.parametrize("drawn", MAPS)
def test_maps_are_those_of_trinity(drawn: tuple[int, float, int, int]) -> None:
    assert draw_map(*drawn).rows == MAPS[drawn]


@pytest.mark.parametrize("slippery", [False, True])
def test_walks_slip_as_in_gymnasium(slippery: bool) -> None:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    moves = random.Random(0)
    for seed in range(30):
        lake = draw_map(5, 0.8, seed, 8)
        env: Any = FrozenLakeEnv(desc=list(lake.rows), is_slippery=slippery)
        env.reset(seed=seed)
        here = Walk(lake, seed, slippery=slippery)
        over = False
        while not over:
            number = moves.randrange(4)
            place, reward, over, _, _ = env.step(number)
            here.move(ORDER[number])
            assert (divmod(place, 5), over, reward) == (here.place, here.over, here.reward)


async def test_the_conversation_is_that_of_trinity() -> None:
    said = ["I go. ```Down```", "hm", "```up``` no, ```3```", "```Down``` and ```right"]
    [experience], prompts, _ = await walk(said, desc=["SFF", "FFF", "HFG"], agent_max_steps=4)
    assert prompts[0] == (
        f"<|im_start|>system\n{FROZEN_LAKE}<|im_end|>\n<|im_start|>user\nCurrent Observation (0): \n"
        " P \t _ \t _ \t\n _ \t _ \t _ \t\n O \t _ \t G \t\n"
        "You have not achieved the goal, P has not reached G yet. Please give the next action.\n"
        "The maximum number of steps remaining is 4.<|im_end|>\n<|im_start|>assistant\n"
    )
    last = prompts[2].rpartition("<|im_start|>user\n")[2]
    assert last.startswith("Current Observation (2): \n _ \t _ \t _ \t\n P \t _ \t _ \t\n O \t _ \t G \t\n")
    assert "\nYour last response is invalid. Your position didn't change at all." in last
    assert "Your last response is invalid" not in prompts[1] + prompts[3].rpartition("<|im_start|>user\n")[2]
    assert (experience.reward, experience.info["turns"]) == (0.0, 4)
    facts = {"env_steps": 4.0, "env_done": 0.0, "test_score": 0.0, "prompt_too_long": 0.0}
    assert experience.metrics | facts == experience.metrics


@pytest.mark.parametrize(("last", "reward"), [("```right```", 1.0), ("```left```", 0.0)])
async def test_the_goal_is_worth_one_and_a_hole_nothing(last: str, reward: float) -> None:
    said = ["```down```", "```right```", "```down```", last]
    [experience], _, _ = await walk(said, desc=["SFF", "FFF", "HFG"])
    assert (experience.reward, experience.metrics["env_steps"], experience.metrics["env_done"]) == (reward, 4.0, 1.0)


async def test_a_conversation_over_its_tokens_ends_without_a_reward() -> None:
    [experience], _, limits = await walk(["x" * 300] * 2, agent_max_steps=2)
    assert limits[0] == 10240
    assert limits[1] == 10240 - 301  # an answer and its end
    assert experience.truncate_status is None
    [cut], _, limits = await walk(["x" * 300] * 9, max_response_tokens=700)
    assert limits == [700, 399]  # the third message would be beyond it
    assert (cut.reward, cut.truncate_status, cut.metrics["prompt_too_long"]) == (0.0, "response_truncated", 1.0)
    _, _, limits = await walk(["x"] * 2, agent_max_steps=2, model_limit=200)
    assert limits == [200, 200]


async def test_a_first_prompt_that_is_too_long_is_masked_if_this_is_wanted() -> None:
    task = Task(workflow=load_workflow("frozen_lake_workflow"), raw_task=RECORD)
    [experience], _ = await run_scripted(task, [], max_prompt_tokens=9, enable_prompt_truncation=True)
    assert (experience.reward, experience.truncate_status) == (0.0, "prompt_truncated")


@pytest.mark.parametrize(
    ("answer", "move"),
    [
        ("```Up```", "up"),
        ("``` left\n```", "left"),
        ("```1```", "left"),
        ("```04```", "up"),
        ("```5```", None),
        ("```²```", None),
        ("```jump```", None),
        ("``` left", None),
        ("```left``` or ```right", "left"),
        ("```" * 100_000, None),
    ],
)
def test_moves_are_read_as_in_trinity(answer: str, move: str | None) -> None:
    assert read_move(answer) == move


async def test_records_without_a_lake_say_so() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, "the record has no size; wanted keys size, p and seed"),
        ({"size": 1}, {}, "raw_task.size is 1: Input should be greater than or equal to 2"),
        ({"size": 64, "p": 0.001, "seed": 9}, {}, "none of 2000 maps of size 64 .* raise p"),
        ({}, {"desc": ["SF", "FF"]}, "1 S and 0 G"),
    ]
    for record, arguments, words in cases:
        with pytest.raises(TaskError, match=words):
            await walk([], record, **arguments)

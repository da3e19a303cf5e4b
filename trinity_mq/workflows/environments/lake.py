"""Frozen Lake as Trinity-RFT has it: the same maps, prompts, form of moves, rewards and step limits under its name.

:mod:`trinity_mq.workflows.games.frozen_lake` is another task with a frozen lake, with shorter prompts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.workflows.arguments import Arguments
from trinity_mq.workflows.environments.conversation import ConversationWorkflow, EpisodeConversation
from trinity_mq.workflows.environments.prompts import FROZEN_LAKE
from trinity_mq.workflows.games.frozen_lake import (
    GOAL,
    HOLE,
    ICE,
    MAX_DRAWS,
    MAX_SIZE,
    MOVES,
    START,
    LakeError,
    LakeMap,
    Place,
)
from trinity_mq.workflows.workflow import TaskError

ORDER = tuple(MOVES)
"""The moves in the order of their numbers in Gymnasium, from 0. In an answer the numbers begin at 1."""
SIGNS = {ICE: "_", HOLE: "O", GOAL: "G"}
FENCE = "```"


class TrinityLakeArguments(Arguments):
    """Arguments of :class:`TrinityFrozenLakeWorkflow`. A record sets ``size``, ``p`` and ``seed``."""

    env_max_steps: int = Field(default=8, ge=1, le=1000)
    """Maximum moves from the start to a place next to the goal. A drawn map without such a way is drawn again."""
    agent_max_steps: int = Field(default=10, ge=1, le=1000)
    """Maximum answers of the model in one run."""
    desc: tuple[str, ...] | None = None
    """Rows of S (start), F (ice), H (hole), G (goal), instead of a drawn map."""
    is_slippery: bool = False
    """A move goes in the intended direction or to either side of it, with probability 1/3 each."""
    max_response_tokens: int = Field(default=10240, ge=1)
    """Maximum tokens of a conversation after its first message."""
    size: int | None = Field(default=None, ge=2, le=MAX_SIZE)
    """Rows and columns of a drawn map."""
    p: float = Field(default=0.8, gt=0)
    """Probability that a place is ice. A value above 1 counts as 1."""
    seed: int = Field(default=42, ge=0)
    """Seed of the map and of the slips."""


class TrinityFrozenLakeWorkflow(ConversationWorkflow):
    """A walk over the lake of a record with ``size``, ``p`` and ``seed``. The reward is 1 at the goal, else 0."""

    arguments_kind = TrinityLakeArguments
    record_keys = ("size", "p", "seed")
    arguments: TrinityLakeArguments

    async def run_async(self) -> list[Experience]:
        """Walk until the goal, a hole or the limit of steps.

        Raises:
            TaskError: The record describes no map.
        """
        arguments = self.arguments
        walk = Walk(self._map(), arguments.seed, slippery=arguments.is_slippery)
        conversation = EpisodeConversation(self.model, FROZEN_LAKE)
        before, seen, step = "", walk.show(), 0
        while step < arguments.agent_max_steps:
            limit = self._limit(conversation)
            if limit <= 0:
                conversation.cut = True
                break
            text = prompt(step, seen, unmoved=step > 0 and before == seen, left=arguments.agent_max_steps - step)
            answer = await conversation.ask(text, max_tokens=limit)
            if answer is None:
                break
            walk.move(read_move(answer))
            before, seen = seen, walk.show()
            step += 1
            if walk.over:
                break
        info = {"env_steps": step, "env_done": int(walk.over), "test_score": walk.reward}
        return conversation.experiences(walk.reward, info, self.run_id_base)

    def _map(self) -> LakeMap:
        arguments = self.arguments
        try:
            if arguments.desc is not None:
                return LakeMap.of(arguments.desc)
            if arguments.size is None:
                raise LakeError(
                    "the record has no size; wanted keys size, p and seed, or workflow_args.desc "
                    "(frozen_lake_game_workflow draws its lakes itself)"
                )
            return draw_map(arguments.size, arguments.p, arguments.seed, arguments.env_max_steps)
        except LakeError as error:
            raise TaskError(f"no lake for this task: {error}") from error

    def _limit(self, conversation: EpisodeConversation) -> int:
        """Return the maximum tokens of the next answer."""
        most: Any = self.task.rollout_args.get("max_tokens") or self.model.sampling.get("max_tokens")
        budget = self.arguments.max_response_tokens
        if conversation.answers:
            first, last = conversation.answers[0], conversation.answers[-1]
            budget -= len(last.tokens) - first.prompt_length
        return budget if most is None else min(budget, int(most))


def prompt(step: int, seen: str, *, unmoved: bool, left: int) -> str:
    """Return a message of the user.

    The sentences are part of the task; source: Trinity-RFT 0.6.0, Apache-2.0.

    Args:
        step: Number of answers so far.
        seen: The lake as the model sees it.
        unmoved: Whether the last answer left the lake unchanged.
        left: Number of further answers.
    """
    text = (
        f"Current Observation ({step}): \n{seen}\nYou have not achieved the goal, P has not reached G yet. Please give "
        "the next action."
    )
    if unmoved:
        text += (
            "\nYour last response is invalid. Your position didn't change at all. You may need to recheck your "
            "thinking process, action outputted, and the format of response. Remember, you should only output the NEXT "
            "ACTION at each interation in the ``` ```. For example, if you want to move up, you should output ```Up```."
        )
    return text + f"\nThe maximum number of steps remaining is {left}."


def read_move(answer: str) -> str | None:
    """Return the move in the last pair of fences of an answer, a direction or its number from 1. None: the answer does
    not contain a move.
    """
    parts = answer.split(FENCE)
    pairs = (len(parts) - 1) // 2
    text = parts[2 * pairs - 1].strip().lower() if pairs else ""
    if text in MOVES:
        return text
    if text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= len(ORDER):
        return ORDER[int(text) - 1]
    return None


class Walk:
    """A walk over a lake. The player slips as in Gymnasium's ``FrozenLake-v1`` with the same seed.

    Args:
        lake: The map.
        seed: Seed of the slips.
        slippery: Whether moves slip.
    """

    def __init__(self, lake: LakeMap, seed: int, *, slippery: bool) -> None:
        self._lake, self._slippery = lake, slippery
        self._random = np.random.default_rng(seed)
        self._random.random()  # Gymnasium draws the start with this number
        self.place: Place = lake.find(START)

    def move(self, move: str | None) -> None:
        """Make a move. None: stay."""
        if move is None:
            return
        number, drawn = ORDER.index(move), self._random.random()
        if self._slippery:
            thirds = np.cumsum([1 / 3] * 3)
            number = (number - 1 + int(np.argmax(thirds > drawn))) % len(ORDER)
        self.place = self._lake.neighbour(self.place, ORDER[number])

    @property
    def over(self) -> bool:
        """Whether the walk has reached the goal or a hole."""
        return self._lake.at(self.place) in (GOAL, HOLE)

    @property
    def reward(self) -> float:
        """1 at the goal, else 0."""
        return float(self._lake.at(self.place) == GOAL)

    def show(self) -> str:
        """Return the lake as the model sees it."""
        rows = [[SIGNS.get(sign, SIGNS[ICE]) for sign in row] for row in self._lake.rows]
        rows[self.place[0]][self.place[1]] = "P"
        return "\n".join("".join(f" {sign} \t" for sign in row) for row in rows)


def draw_map(size: int, p: float, seed: int, max_steps: int) -> LakeMap:
    """Return the map that Trinity-RFT draws for these numbers.

    Args:
        size: Rows and columns, at least 2.
        p: Probability that a place is ice.
        seed: Seed of the map.
        max_steps: Maximum moves from the start to a place next to the goal; see :func:`_has_way`.

    Raises:
        LakeError: None of MAX_DRAWS maps has such a way.
    """
    random = np.random.default_rng(seed)
    ice = min(1.0, p)
    for _ in range(MAX_DRAWS):
        board = random.choice([ICE, HOLE], (size, size), p=[ice, 1 - ice]).tolist()
        start = goal = (0, 0)
        while start == goal:
            row, column, goal_row, goal_column = (int(random.integers(0, size)) for _ in range(4))
            start, goal = (row, column), (goal_row, goal_column)
        board[start[0]][start[1]], board[goal[0]][goal[1]] = START, GOAL
        lake = LakeMap.of(["".join(row) for row in board])
        if _has_way(lake, max_steps):
            return lake
    raise LakeError(f"none of {MAX_DRAWS} maps of size {size} with p {p} has a way of {max_steps} moves; raise p")


def _has_way(lake: LakeMap, max_steps: int) -> bool:
    """Return whether a depth-first search finds the goal next to a place that it reaches in at most ``max_steps``
    moves. It visits each place once, so it may miss a shorter way. Trinity-RFT chooses its maps by this search.
    """
    todo, visited = [(lake.find(START), 0)], set[Place]()
    while todo:
        place, steps = todo.pop()
        if steps > max_steps or place in visited:
            continue
        visited.add(place)
        for move in ("down", "right", "up", "left"):
            there = lake.neighbour(place, move)
            if lake.at(there) == GOAL:
                return True
            if lake.at(there) != HOLE:
                todo.append((there, steps + 1))
    return False

"""Connect the Dots: packs of tasks in one hidden world, with hints that the model writes after each task for the next.

The rules, prompts, maps and rewards equal Trinity-RFT's grid navigation. There, several records become a pack
when a batch is made; here a record is a pack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from trinity_mq.experience import Experience
from trinity_mq.workflows.arguments import Arguments
from trinity_mq.workflows.environments.conversation import ConversationWorkflow, EpisodeConversation
from trinity_mq.workflows.environments.prompts import (
    GRID_NAVIGATION,
    GRID_ROUND,
    HINTS_BEGIN,
    HINTS_END,
    HINTS_SECTION,
    LENGTH_SECTION,
    UPDATE_HINTS,
    UPDATE_HINTS_EXAMPLE,
    UPDATE_LENGTH,
    UPDATE_REQUEST,
)

Place = tuple[int, int]
"""Row and column, from 0."""
Costs = npt.NDArray[np.int64]

MAX_PACK = 64
MAX_SEED = 2**63 - 1
FIRST_HINTS, NO_HINTS = "Hints: null", "Hints: no hint available."
_DESTINATION = re.compile(r"(-?\d{1,9})\s*,\s*(-?\d{1,9})", re.ASCII)
THINK_BEGIN, THINK_END = "<think>", "</think>"


class GridPackArguments(Arguments):
    """Arguments of :class:`GridNavigationPackWorkflow`. A record sets ``seed`` or ``seeds``, and ``pack_seed``."""

    pack_size: int = Field(default=4, ge=1, le=MAX_PACK)
    """Number of tasks of a pack."""
    seed: int = Field(default=42, ge=0, le=MAX_SEED)
    """Seed of the first task, from which the seeds of the others and of the map follow."""
    seeds: tuple[Annotated[int, Field(ge=0, le=MAX_SEED)], ...] = Field(default=(), max_length=MAX_PACK)
    """Seeds of all tasks of the pack, instead of ``seed`` and ``pack_size``."""
    pack_seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Seed of the map. None: it follows from the seeds of the tasks."""
    grid_min_size: int = Field(default=12, ge=2, le=64)
    grid_max_size: int = Field(default=16, ge=2, le=64)
    """Largest number of rows and columns."""
    landscape_num_components: int = Field(default=6, ge=2, le=100)
    """Number of hills."""
    landscape_min_scale: float = Field(default=0.10, gt=0)
    landscape_max_scale: float = Field(default=0.35, gt=0)
    """Largest radius of a hill, as a share of the side."""
    min_rounds: int = Field(default=6, ge=1, le=100)
    max_rounds: int = Field(default=10, ge=1, le=100)
    """Largest number of moves of a task."""
    reveal_radius: int = Field(default=1, ge=0, le=64)
    """Number of cells that are seen in each direction around an entered cell."""
    context_compression_mode: Literal["keep_all", "remove_think", "keep_answer"] = "keep_all"
    """Part of an answer that later rounds of a task, and the author of hints, see: all, all but its thoughts, or the
    move.
    """
    length_penalty_coef: float = Field(default=0.0, ge=0)
    """Factor of the penalty for long answers and many rounds, which only a task with a reward above 0 has."""
    len_zero_penalty: int | None = Field(default=None, ge=1)
    len_full_penalty: int | None = Field(default=None, ge=1)
    """Length of an answer, in tokens, from which the penalty is full."""
    max_response_tokens_restraint: int | None = Field(default=None, ge=1)
    """Maximum length of an answer, in tokens, that the prompts ask for. None: the prompts do not ask for a limit."""
    hint_example: bool = False
    """Show the model an example of hints."""
    hint_penalty_coef: float = Field(default=0.0, ge=0)
    """Maximum penalty for hints that cannot be read, are too short or too long. The reward of hints is minus their
    penalty.
    """
    hint_len_min_penalty: int | None = Field(default=None, ge=1)
    """Length of hints, in tokens, below which the penalty is full."""
    hint_len_zero_penalty: int | None = Field(default=None, ge=1)
    hint_len_max_penalty: int | None = Field(default=None, ge=1)
    """Length of hints, in tokens, from which the penalty is full."""

    @model_validator(mode="after")
    def _check_ranges(self) -> GridPackArguments:
        ranges = [("grid_min_size", "grid_max_size"), ("landscape_min_scale", "landscape_max_scale")]
        ranges += [("min_rounds", "max_rounds")]
        penalties = [("len_zero_penalty", "len_full_penalty"), ("hint_len_zero_penalty", "hint_len_max_penalty")]
        for low, high in ranges + penalties:
            first, last = getattr(self, low), getattr(self, high)
            if None in (first, last) or first < last or (first == last and (low, high) in ranges):
                continue
            raise ValueError(f"{low} is {first} and {high} is {last}, wanted a lower {low}")
        if self.length_penalty_coef and None in (self.len_zero_penalty, self.len_full_penalty):
            raise ValueError("length_penalty_coef needs len_zero_penalty and len_full_penalty, in tokens")
        return self


class GridMap:
    """The map of a pack: hidden costs, and the cells that were seen. All tasks of the pack share it.

    Args:
        costs: Cost of each cell, from 0 to 99, ``[size, size]``.
        radius: Number of cells that are seen in each direction around an entered cell.
    """

    def __init__(self, costs: Costs, radius: int) -> None:
        self.costs, self.radius = costs, radius
        self.seen = np.zeros(costs.shape, dtype=np.bool_)

    @property
    def size(self) -> int:
        return len(self.costs)

    def enter(self, cells: Sequence[Place]) -> None:
        """Mark the cells around each of ``cells`` as seen."""
        for row, column in cells:
            rows, columns = (slice(max(0, place - self.radius), place + self.radius + 1) for place in (row, column))
            self.seen[rows, columns] = True

    def show(self) -> str:
        """Return the map as text: costs of seen cells, ``?`` for other cells, and numbers of rows and columns."""
        numbers = range(self.size)
        rows = ["     " + "".join(f"{column:>3}" for column in numbers)]
        for row in numbers:
            cells = zip(self.costs[row].tolist(), self.seen[row].tolist(), strict=True)
            rows.append(f"{row:>3}  " + "".join(f"{cost if is_seen else '?':>3}" for cost, is_seen in cells))
        return "\n".join(rows)


def draw_costs(arguments: GridPackArguments, seed: int) -> Costs:
    """Return the costs that Trinity-RFT draws for these arguments: squared heights of hills, from 0 to 99."""
    random = np.random.default_rng(seed)
    size = int(random.integers(arguments.grid_min_size, arguments.grid_max_size + 1))
    line = np.linspace(0.0, 1.0, size)
    heights = np.zeros((size, size))
    for _ in range(arguments.landscape_num_components):
        row, column = random.uniform(0.0, 1.0, size=2)
        long = float(random.uniform(arguments.landscape_min_scale, arguments.landscape_max_scale))
        short = float(random.uniform(arguments.landscape_min_scale, long))
        angle, top = float(random.uniform(0.0, np.pi)), float(random.uniform(0.8, 1.2))
        down, right = (line - row)[:, None], (line - column)[None, :]
        along, across = (
            np.cos(angle) * down + np.sin(angle) * right,
            np.cos(angle) * right - np.sin(angle) * down,
        )
        heights += top * np.exp(-0.5 * ((along / long) ** 2 + (across / short) ** 2))
    heights -= heights.min()
    span = float(heights.max())
    shares = heights / span if span else heights
    return np.rint(99.0 * np.square(shares)).astype(np.int64)


class GridTask:
    """One task on the map of its pack: a walk by the moves of a rook, with a fixed number of moves.

    Args:
        grid: The map of the pack.
        arguments: Bounds of the number of moves.
        seed: Seed of start, goal and number of moves. They equal Trinity-RFT's.
    """

    def __init__(self, grid: GridMap, arguments: GridPackArguments, seed: int) -> None:
        self.grid = grid
        random = np.random.default_rng(seed)
        self.rounds = int(random.integers(arguments.min_rounds, arguments.max_rounds + 1))
        start = goal = (0, 0)
        while goal == start:
            start = goal = (int(random.integers(0, grid.size)), int(random.integers(0, grid.size)))
            for _ in range(self.rounds):  # a way of exactly this many moves, so that the task can be solved
                axis = 1 - int(random.integers(0, 2))
                drawn = int(random.integers(0, grid.size - 1))
                drawn += drawn >= goal[axis]
                goal = (goal[0], drawn) if axis else (drawn, goal[1])
        self.start, self.goal, self.place = start, goal, start
        self.moves = 0
        self.entered: list[int] = []
        """Costs of all entered cells."""
        self.invalid = ""
        """Feedback on an invalid move, which ended the task. Empty: no move was invalid."""

    @property
    def loss(self) -> float:
        """Mean cost of the entered cells, from 0 to 1."""
        return sum(self.entered) / (100.0 * len(self.entered)) if self.entered else 0.0

    @property
    def reward(self) -> float:
        """1 minus the loss if the last move ended at the goal, else 0."""
        return 1.0 - self.loss if self.moves == self.rounds and self.place == self.goal else 0.0

    @property
    def over(self) -> bool:
        """Whether no move is left, or a move was invalid."""
        return self.moves == self.rounds or bool(self.invalid)

    def move(self, destination: Place | None) -> str:
        """Make a move, and return the feedback for the model. An invalid move ends the task, and so does None, an
        answer without a move.
        """
        problem = self._problem(destination)
        if destination is None or problem:
            self.invalid = f"Invalid action: {problem} Game over."
            return self.invalid
        (row, column), (to_row, to_column) = self.place, destination
        count = max(abs(to_row - row), abs(to_column - column))
        down, right = (int(np.sign(to - at)) for to, at in ((to_row, row), (to_column, column)))
        cells = [(row + down * step, column + right * step) for step in range(1, count + 1)]
        self.entered += [int(self.grid.costs[cell]) for cell in cells]
        self.grid.enter(cells)
        self.place = destination
        self.moves += 1
        path = " -> ".join(f"({at},{across})" for at, across in cells)
        return (
            f"You moved to ({to_row},{to_column}) through {count} entered cells: {path}. Cumulative normalized loss: "
            f"{self.loss:.4f}."
        )

    def _problem(self, destination: Place | None) -> str:
        if destination is None:
            return "expected exactly one <answer>row,col</answer> destination."
        row, column = destination
        if not (0 <= row < self.grid.size and 0 <= column < self.grid.size):
            return f"Destination ({row},{column}) is outside the grid."
        if destination == self.place:
            return "The destination must differ from the current position."
        if row != self.place[0] and column != self.place[1]:
            return "The destination must be in the same row or the same column."
        return ""

    def outcome(self) -> str:
        """Return the text that tells the author of hints how the task ended. Its form comes from Trinity-RFT."""
        if self.invalid:
            end = self.invalid
        elif self.place == self.goal:
            end = (
                f"Success: finished round {self.rounds} at the target. Normalized loss: {self.loss:.4f}; reward: "
                f"{self.reward:.4f}."
            )
        else:
            end = (
                f"Failed: after {self.rounds} rounds, position {self.place} did not equal target {self.goal}. "
                "Reward: 0."
            )
        return f"{end}\n\nFinal observed cost grid:\n{self.grid.show()}"


class GridNavigationPackWorkflow(ConversationWorkflow):
    """A pack of tasks on one map. The tasks of a run follow one another; after each task but the last the model writes
    hints, which the system prompt of the next task contains.

    The experiences of a task have the task's reward. The experience of hints has minus their penalty as its reward.
    ``info`` has the fields that the advantage ``cod`` needs: ``exp_type``, ``task_idx`` or ``hint_idx``, and
    ``task_rewards``.
    """

    arguments_kind = GridPackArguments
    record_keys = ("seed", "seeds", "pack_seed")
    arguments: GridPackArguments

    async def run_async(self) -> list[Experience]:
        """Solve the tasks of the pack one after another."""
        seeds, map_seed = pack_seeds(self.arguments)
        grid = GridMap(draw_costs(self.arguments, map_seed), self.arguments.reveal_radius)
        hints, rewards = FIRST_HINTS, []
        experiences: list[Experience] = []
        for number, seed in enumerate(seeds):
            task = GridTask(grid, self.arguments, seed)
            solved, trajectory = await self._solve(task, hints, is_first=not number)
            reward = float(solved[-1].reward or 0.0)
            for experience in solved:
                experience.info.update(exp_type="solve_task", task_idx=number)
            solved[-1].metrics[f"reward_pos_{number}"] = reward
            rewards.append(reward)
            experiences += solved
            if number < len(seeds) - 1:
                update, hints = await self._update(hints, trajectory, reward, task.outcome())
                for experience in update:
                    experience.info.update(exp_type="gen_hint", hint_idx=number)
                experiences += update
        for step, experience in enumerate(experiences):
            experience.eid.run, experience.eid.step = self.run_id_base, step
            experience.info["task_rewards"] = list(rewards)
        experiences[-1].metrics["pack_reward"] = sum(rewards) / len(rewards)
        return experiences

    async def _solve(self, task: GridTask, hints: str, *, is_first: bool) -> tuple[list[Experience], str]:
        """Return the experiences of a task, and its course as the author of hints reads it. A later task whose first
        prompt is too long, because of its hints, has a masked experience with reward 0.
        """
        arguments = self.arguments
        system = GRID_NAVIGATION.format(reveal_radius=arguments.reveal_radius)
        limit = arguments.max_response_tokens_restraint
        conversation = EpisodeConversation(
            self.model,
            f"{system}{HINTS_SECTION}{hints}" + (LENGTH_SECTION.format(limit=limit) if limit else ""),
            is_first=is_first,
        )
        feedback = ""
        while not task.over:
            answer = await conversation.ask(_question(task, feedback))
            if answer is None:
                break
            feedback = task.move(read_destination(answer))
            conversation.messages[-1]["content"] = compressed(answer, arguments.context_compression_mode)
        reward = max(0.0, task.reward - self._length_penalty(conversation.answers, task)) if task.reward else 0.0
        info = {"env_rounds": task.moves, "invalid_move": int(bool(task.invalid)), "normalized_loss": task.loss}
        experiences = conversation.experiences(reward, info, self.run_id_base)
        return experiences, _course(system, conversation.messages[1:], task)

    def _length_penalty(self, answers: Sequence[Experience], task: GridTask) -> float:
        arguments = self.arguments
        low, high = arguments.len_zero_penalty, arguments.len_full_penalty
        if not arguments.length_penalty_coef or low is None or high is None:
            return 0.0
        shares = [_ramp(answer.response_length, low, high) for answer in answers]
        return arguments.length_penalty_coef * (sum(shares) / len(shares) + len(answers) / task.rounds)

    async def _update(self, hints: str, trajectory: str, reward: float, feedback: str) -> tuple[list[Experience], str]:
        """Let the model write hints; return its experience and the hints. Hints stay as they are if the course of the
        task is too long for the model.
        """
        arguments = self.arguments
        system = UPDATE_HINTS + (UPDATE_HINTS_EXAMPLE if arguments.hint_example else "")
        if arguments.max_response_tokens_restraint:
            system += UPDATE_LENGTH.format(limit=arguments.max_response_tokens_restraint)
        conversation = EpisodeConversation(self.model, system, is_first=False)
        request = UPDATE_REQUEST.format(hints=hints, trajectory=trajectory, reward=reward, feedback=feedback)
        answer = await conversation.ask(request)
        if answer is None:
            return [], hints
        text = between(answer, HINTS_BEGIN, HINTS_END).strip()
        length = conversation.answers[0].response_length
        info = {"hint_parse_success": int(bool(text)), "hint_length": len(text)}
        penalty = arguments.hint_penalty_coef * self._hint_fault(length, is_read=bool(text))
        return conversation.experiences(-penalty, info, self.run_id_base), f"Hints: {text}" if text else NO_HINTS

    def _hint_fault(self, length: int, *, is_read: bool) -> float:
        """Return the share of the penalty, from 0 to 1, for hints of ``length`` tokens."""
        arguments = self.arguments
        low, high = arguments.hint_len_zero_penalty, arguments.hint_len_max_penalty
        if not is_read:
            return 1.0
        if low is None or high is None:
            return 0.0
        if arguments.hint_len_min_penalty is not None and length < arguments.hint_len_min_penalty:
            return 1.0
        return _ramp(length, low, high)


def pack_seeds(arguments: GridPackArguments) -> tuple[list[int], int]:
    """Return the seeds of the tasks of a pack, and the seed of its map."""
    drawn = np.random.SeedSequence(arguments.seeds or arguments.seed).generate_state(arguments.pack_size).tolist()
    map_seed = drawn[0] if arguments.pack_seed is None else arguments.pack_seed
    return list(arguments.seeds) or [arguments.seed, *drawn[1:]], map_seed


def read_destination(answer: str) -> Place | None:
    """Return the row and the column in the only pair of answer tags. None: the answer has no such pair."""
    match = _DESTINATION.fullmatch(between(answer, "<answer>", "</answer>").strip())
    return None if match is None else (int(match[1]), int(match[2]))


def between(text: str, begin: str, end: str) -> str:
    """Return the text between two marks; "" unless each occurs exactly once, in this order."""
    if text.count(begin) != 1 or text.count(end) != 1:
        return ""
    inside, is_closed, _ = text.partition(begin)[2].partition(end)
    return inside if is_closed else ""


def compressed(answer: str, mode: str) -> str:
    """Return the part of an answer that later rounds see."""
    if mode == "remove_think":
        *parts, rest = answer.split(THINK_END)
        kept = [part.partition(THINK_BEGIN)[0] if THINK_BEGIN in part else part + THINK_END for part in parts]
        return "".join([*kept, rest]).strip()
    if mode == "keep_answer":
        stated = between(answer, "<answer>", "</answer>").strip()
        return f"<answer>{stated}</answer>" if stated else "(Failed to parse answer from response)"
    return answer


def _course(system: str, messages: Sequence[Mapping[str, str]], task: GridTask) -> str:
    """Return the course of a task as the author of hints reads it: the system prompt without hints, the rounds, and the
    final state.
    """
    rounds = zip_longest(messages[::2], messages[1::2], fillvalue={"content": "(no action)"})
    steps = [
        f"Step {number}:\nObservation: {question['content']}\nAction: {action['content']}"
        for number, (question, action) in enumerate(rounds, 1)
    ]
    end = (
        f"Final environment state:\nPosition: {task.place}\nTarget: {task.goal}\nNormalized loss: {task.loss:.4f}\n"
        f"Observed cost grid:\n{task.grid.show()}"
    )
    return "\n\n".join([f"System:\n{system}", *steps, end])


def _question(task: GridTask, feedback: str) -> str:
    (row, column), (goal_row, goal_column) = task.place, task.goal
    return GRID_ROUND.format(
        number=task.moves + 1, rounds=task.rounds, feedback=f"\n{feedback}\n" if feedback else "", row=row,
        column=column, goal_row=goal_row, goal_column=goal_column, grid=task.grid.show(),
    )  # fmt: skip


def _ramp(length: int, low: int, high: int) -> float:
    return min(1.0, max(0.0, (length - low) / (high - low)))

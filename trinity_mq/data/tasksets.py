"""Tasksets: records as task bodies, in an order that survives restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.config import TasksetConfig
from trinity_mq.data.epochs import EpochOrder
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.records import Record, read_tasks
from trinity_mq.messages import TaskBody


class Taskset:
    """Records with a position that continues over epochs.

    With the selector ``shuffle`` each epoch has its own order, which follows from the seed and the epoch alone: the
    position is two numbers, and going on from it gives the tasks that would have come.
    """

    def __init__(
        self,
        config: TasksetConfig,
        rows: Sequence[Record],
        identity: str,
        *,
        repeat_times: int,
        seed: int,
        is_eval: bool,
    ) -> None:
        self.config = config
        self.identity = identity
        """Changes with the records, their number or their order."""
        self._rows = rows
        self._repeat_times = repeat_times
        self._seed = seed
        self._is_eval = is_eval
        self._order = EpochOrder(len(rows), config.selector, seed)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._order.epoch

    @property
    def cursor(self) -> int:
        """Number of records of the epoch that were returned."""
        return self._order.cursor

    def __len__(self) -> int:
        """Records in one epoch."""
        return len(self._rows)

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next ``size`` tasks; where an epoch ends the next one begins, within the batch too."""
        return [self._body(position) for position in self._order.take(size)]

    def all_tasks(self) -> list[TaskBody]:
        """Return every task once, in the order of the records; the position stays where it is."""
        return [self._body(position) for position in range(len(self._rows))]

    def state(self) -> dict[str, Any]:
        """Return the position, for :meth:`restore` of a taskset opened alike."""
        return {
            "identity": self.identity,
            "seed": self._seed,
            "selector": self.config.selector,
            "epoch": self.epoch,
            "cursor": self.cursor,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            TasksetError: It was saved with other records, another seed or another selector, which give another order.
        """
        for key, now in self.state().items():
            if key not in {"epoch", "cursor"} and state.get(key) != now:
                raise TasksetError(
                    f"taskset {self.config.name!r}: the saved position belongs to {key} {state.get(key)!r}, this one "
                    f"has {now!r}; put the old data and settings back, or train anew with `trinity-mq run CONFIG "
                    "--fresh`"
                )
        try:
            self._order.move_to(state.get("epoch"), state.get("cursor"))
        except ValueError as error:
            raise TasksetError(f"taskset {self.config.name!r}: {error}") from error

    def _body(self, position: int) -> TaskBody:
        return TaskBody(
            workflow=self.config.workflow,
            raw_task=dict(self._rows[position]),
            repeat_times=self._repeat_times,
            format_args=self.config.format.model_dump(),
            rollout_args=self.config.rollout_args,
            workflow_args=self.config.workflow_args,
            reward_fn=self.config.reward_fn or None,
            reward_fn_args=self.config.reward_fn_args,
            is_eval=self._is_eval,
            index={"taskset": self.config.name, "index": position},
        )


def open_taskset(
    config: TasksetConfig,
    *,
    repeat_times: int | None = None,
    seed: int = 0,
    is_eval: bool = False,
    max_bytes: int | None = None,
) -> Taskset:
    """Return the taskset that ``config`` names, at its beginning.

    Args:
        config: Where the records are, and what their tasks run.
        repeat_times: Runs of each task: ``algorithm.repeat_times`` in training. None: ``config.repeat_times``.
        seed: Of the order, with the selector ``shuffle``.
        is_eval: Marks the tasks as evaluation.
        max_bytes: Upper bound of a record in a message; None: unbounded.

    Raises:
        TasksetError: The records cannot be read, or none of them is there; one line that says where and why.
    """
    rows, identity = read_tasks(config, max_bytes)
    return Taskset(
        config,
        rows,
        identity,
        repeat_times=config.repeat_times if repeat_times is None else repeat_times,
        seed=seed,
        is_eval=is_eval,
    )

"""Tasksets: records as task bodies, in an order that survives restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.config import TasksetConfig
from trinity_mq.data.epochs import checked_position
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.records import Record, check_records_unchanged, read_records
from trinity_mq.data.selectors import TaskStats, create_selector
from trinity_mq.messages import TaskBody


class Taskset:
    """Makes tasks from records, at a position that continues over epochs.

    A selector chooses the next record. Its choice is a function of the seed, the position and the observations, so a
    restored taskset returns the same tasks as an uninterrupted taskset.
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
        """Hash that changes with the records, their number or their order."""
        self._rows = rows
        self._repeat_times = repeat_times
        self._seed = seed
        self._is_eval = is_eval
        self._returned = 0
        self._selector = create_selector(config.effective_selector, rows, seed, config.name)

    @property
    def epoch(self) -> int:
        """Number of completed epochs: returned tasks divided by the number of records, rounded down."""
        return self._returned // len(self._rows)

    @property
    def cursor(self) -> int:
        """Number of tasks that were returned in the current epoch."""
        return self._returned % len(self._rows)

    @property
    def learns(self) -> bool:
        """Whether the selector must receive the rewards of finished tasks."""
        return self.config.learns

    def __len__(self) -> int:
        """Return the number of records in one epoch."""
        return len(self._rows)

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next ``size`` tasks. At the end of an epoch the next epoch begins, also within the batch."""
        chosen = self._selector.next(size)
        if len(chosen) != size or not all(type(index) is int and 0 <= index < len(self._rows) for index in chosen):
            raise TasksetError(
                f"taskset {self.config.name!r}: its selector chose {chosen!r:.200}, wanted {size} indexes from 0 to "
                f"{len(self._rows) - 1}; fix {self.config.effective_selector.selector_type}"
            )
        self._returned += size
        return [self._body(position) for position in chosen]

    def observe(self, stats: Mapping[str, Sequence[TaskStats]]) -> None:
        """Pass statistics of finished tasks, by taskset name, to the selector. Other tasksets are ignored."""
        self._selector.observe(
            [task_stats for task_stats in stats.get(self.config.name, ()) if 0 <= task_stats.task < len(self._rows)]
        )

    def metrics(self) -> dict[str, float]:
        """Return the selector's metrics, ``selector/<taskset>/*``."""
        return {f"selector/{self.config.name}/{name}": value for name, value in self._selector.metrics().items()}

    def all_tasks(self) -> list[TaskBody]:
        """Return every task once, in the order of the records, without changing the position."""
        return [self._body(position) for position in range(len(self._rows))]

    def state(self) -> dict[str, Any]:
        """Return the position, for :meth:`restore` of a taskset opened with the same settings."""
        state: dict[str, Any] = {
            "identity": self.identity,
            "seed": self._seed,
            "selector": self.config.selector,
            "epoch": self.epoch,
            "cursor": self.cursor,
        }
        if self.config.data_selector is not None:
            state["selector"] = self.config.data_selector.model_dump(mode="json")
        if (position := dict(self._selector.state())) != {"given": self._returned}:
            state["position"] = position
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            TasksetError: The position was saved with other records, another seed or another selector, so the order
                differs, or with several tasksets.
        """
        what = f"taskset {self.config.name!r}"
        if "tasksets" in state:
            raise TasksetError(
                f"{what}: the saved position belongs to several tasksets (buffer.tasksets: "
                f"{', '.join(state['tasksets'])}), wanted a position in a single taskset (buffer.taskset); put the old "
                "settings back, or start over with `trinity-mq run CONFIG --fresh`"
            )
        check_records_unchanged(what, self.config, state.get("identity"), self._rows, self.identity)
        for key, now in self.state().items():
            if key not in {"epoch", "cursor", "position"} and state.get(key) != now:
                raise TasksetError(
                    f"{what}: the saved position belongs to {key} {state.get(key)!r}, this one has {now!r}; put the "
                    "old data and settings back, or start over with `trinity-mq run CONFIG --fresh`"
                )
        try:
            epoch, cursor = checked_position(state.get("epoch"), state.get("cursor"), len(self._rows))
            count = epoch * len(self._rows) + cursor
            self._selector.restore(state.get("position", {"given": count}))
            self._returned = count
        except ValueError as error:
            raise TasksetError(f"{what}: {error}") from error

    def _body(self, position: int) -> TaskBody:
        record = self._rows[position]
        return TaskBody(
            workflow=self.config.workflow_of(record),
            raw_task=dict(record),
            repeat_times=self._repeat_times,
            format_args=self.config.format.as_args(),
            rollout_args=self.config.task_rollout_args,
            workflow_args=self.config.workflow_args,
            reward_fn=self.config.reward_fn_of(record) or None,
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
        config: The source of the records, and the settings of their tasks.
        repeat_times: Runs of each task: ``algorithm.repeat_times`` in training. None: ``config.repeat_times``.
        seed: Seed of the selector, if its settings set none, and of generated records (``reasoning_gym``).
        is_eval: Marks the tasks as evaluation.
        max_bytes: Maximum bytes of a record in a message. None: unlimited.

    Raises:
        TasksetError: The records cannot be read, the source is empty, a record names a workflow or reward function that
            records may not name or has a system prompt that is not a text, or the selector cannot be created. One line
            gives the place and the reason.
    """
    rows, identity = read_records(config, max_bytes, seed)
    for number, record in enumerate(rows):
        try:
            config.check_record(record)
        except ValueError as error:
            raise TasksetError(f"taskset {config.name!r}: record {number} of {config.path}: {error}") from error
    return Taskset(
        config,
        rows,
        identity,
        repeat_times=config.repeat_times if repeat_times is None else repeat_times,
        seed=seed,
        is_eval=is_eval,
    )

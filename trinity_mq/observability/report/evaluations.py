"""The evaluations of a run as a table: one row per step or checkpoint, one column per figure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_mq.terminal import align_columns

_FIGURE = re.compile(r"eval/(?P<taskset>.+)/(?P<figure>(?:accuracy|reward)/mean@\d+|pass@\d+|majority@\d+)(?:/mean)?")
"""Matches the names of metrics with evaluation figures. With ``monitor.detailed_stats`` they end in ``/mean``."""
_ORDER = ("accuracy", "pass", "majority", "reward")


@dataclass(frozen=True, slots=True)
class EvaluationTable:
    """Evaluation figures of a run."""

    columns: Sequence[tuple[str, str]]
    """(taskset, figure) of each column, such as ``("gsm8k", "pass@8")``."""
    rows: Mapping[int, Sequence[float | None]]
    """Figures by step, in column order. None: the evaluation does not have this figure."""

    def as_text(self) -> list[str]:
        """Return aligned lines, or an empty list without evaluations."""
        if not self.rows:
            return []
        head = ["step", *(f"{taskset} {figure}" for taskset, figure in self.columns)]
        body = [
            [str(step), *("-" if value is None else f"{value:.3f}" for value in row)] for step, row in self.rows.items()
        ]
        return align_columns([head, *body], right=True)

    def as_csv(self) -> str:
        """Return the table in full precision, for a spreadsheet."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["step", *(f"{taskset}/{figure}" for taskset, figure in self.columns)])
        writer.writerows([step, *row] for step, row in self.rows.items())
        return out.getvalue()


def evaluation_table(lines: Sequence[Mapping[str, Any]]) -> EvaluationTable:
    """Return the table of the evaluations in metrics lines. For repeated steps, later lines override earlier lines."""
    values: dict[int, dict[tuple[str, str], float]] = {}
    for line in lines:
        for name, value in line.items():
            if (match := _FIGURE.fullmatch(name)) and isinstance(value, int | float):
                values.setdefault(int(line["step"]), {})[match["taskset"], match["figure"]] = float(value)
    columns = sorted({key for row in values.values() for key in row}, key=_place)
    return EvaluationTable(columns, {step: [values[step].get(column) for column in columns] for step in sorted(values)})


def _place(column: tuple[str, str]) -> tuple[str, int, int]:
    taskset, figure = column
    kind, _, size = figure.partition("@")
    return taskset, next(number for number, start in enumerate(_ORDER) if kind.startswith(start)), int(size)

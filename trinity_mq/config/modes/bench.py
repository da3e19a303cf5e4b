"""The section of mode ``bench``: the run and the checkpoints that are evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trinity_mq.config.base import Section

SUFFIX = "-bench"
"""Suffix of the name and the folder of an evaluation without a name and folder of its own."""
LONGEST_NAME = 40


class BenchConfig(Section):
    """Mode ``bench``: evaluates checkpoints of a run on ``buffer.eval_tasksets``, each under the step of its
    checkpoint. Checkpoints that were evaluated before are evaluated again only if they have changed.
    """

    run: str = ""
    """Folder of the run whose checkpoints are evaluated. Empty: the folder of this configuration. The evaluation is
    then a separate run, with ``-bench`` appended to name and folder."""
    checkpoints: Literal["all", "latest"] | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    """``all``: all checkpoints in their order, after the first model if ``explorer.eval_on_startup`` is set.
    ``latest``: the latest checkpoint. A list: checkpoints by their number of trained batches, such as ``[50, 100]``; 0
    is the first model."""


def beside(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of mode ``bench`` with ``-bench`` appended to the name and the folder of the evaluated run. If
    ``bench.run`` is given, name and folder already belong to the evaluation and are kept.
    """
    bench = settings.get("bench") or {}
    if settings.get("mode") != "bench" or not isinstance(bench, dict) or bench.get("run"):
        return settings
    name = str(settings.get("name") or "run")
    folder = str(Path(str(settings.get("run_dir") or f"runs/{name}")).expanduser())
    return {
        **settings,
        "name": f"{name[: LONGEST_NAME - len(SUFFIX)]}{SUFFIX}",
        "run_dir": f"{folder}{SUFFIX}",
        "bench": {**bench, "run": folder},
    }

"""The section of mode ``bench``: which checkpoints are evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trinity_mq.config.base import Section

SUFFIX = "-bench"
"""End of the name and of the folder of an evaluation that is given none of its own."""
LONGEST_NAME = 40


class BenchConfig(Section):
    """Mode ``bench``: evaluates checkpoints of a run on ``buffer.eval_tasksets``, each under the step of its
    checkpoint. Those that were evaluated before are evaluated again only where they have changed.
    """

    run: str = ""
    """Folder of the run whose checkpoints are evaluated. Empty: that of this configuration; the evaluation is then a
    run of its own beside it, whose name and folder end with ``-bench``."""
    checkpoints: Literal["all", "latest"] | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    """``all`` in their order, with ``explorer.eval_on_startup`` the first model before them; the ``latest``; or a list
    of those to take, by the batches that they were trained on, such as ``[50, 100]``. 0 is the first model."""


def beside(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of mode ``bench`` with a name and a folder beside those of the run that is evaluated. Where
    ``bench.run`` is given, name and folder are the evaluation's own already, and stay.
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

"""Modes of a run, and the sections of the modes ``bench`` and ``train``. ``trinity_mq.roles`` has the agents of each
mode.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trinity_mq.config.base import Section, expand_user

Mode = Literal["both", "train", "explore", "bench", "serve"]
"""``explore``: the trainer writes the experiences instead of training on them, and sends the weights to engines.
``bench``: the trainer sends the weights of one checkpoint after another to engines. ``serve``: gateways answer; runners
turn ended sessions into experiences."""
TRAINING_MODES = frozenset[Mode]({"both", "train", "serve"})
"""Modes that produce a trained model."""

BENCH_SUFFIX = "-bench"
"""Suffix of the name and the folder of an evaluation without a name and folder of its own."""
MAX_NAME = 40


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


def with_bench_folder(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of mode ``bench`` with ``-bench`` appended to the name and the folder of the evaluated run. If
    ``bench.run`` is given, name and folder already belong to the evaluation and are kept.
    """
    bench = settings.get("bench") or {}
    if settings.get("mode") != "bench" or not isinstance(bench, dict) or bench.get("run"):
        return settings
    name = str(settings.get("name") or "run")
    folder = str(expand_user(str(settings.get("run_dir") or f"runs/{name}")))
    return {
        **settings,
        "name": f"{name[: MAX_NAME - len(BENCH_SUFFIX)]}{BENCH_SUFFIX}",
        "run_dir": f"{folder}{BENCH_SUFFIX}",
        "bench": {**bench, "run": folder},
    }


class SourceConfig(Section):
    """Mode ``train``: trains on the processed batches of another run, read from its stream. The other run may still be
    running, or have ended.
    """

    tap: str = ""
    """Folder or name of the other run. If its folder is on this machine, the folder also gives its broker and blob
    store; a name alone refers to this run's broker. The other run is only read. Empty: the run trains on its own data.
    If set, mode ``both`` becomes mode ``train``."""
    start: Literal["beginning", "now"] | Annotated[int, Field(ge=1)] = "beginning"
    """First batch: the ``beginning`` of the batches that the stream still holds, the first batch published from ``now``
    on, or a batch number."""


def with_tap_mode(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with mode ``train`` instead of ``both`` if ``source.tap`` is set, since nothing is rolled out
    then.
    """
    source = settings.get("source") or {}
    if not isinstance(source, dict) or not source.get("tap") or settings.get("mode", "both") != "both":
        return settings
    return {**settings, "mode": "train"}

"""Texts, workflows and runs that the page shows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_mq.errors import CommandError

if TYPE_CHECKING:
    from trinity_mq.config import Config
    from trinity_mq.observability.curves import Curves
    from trinity_mq.observability.experiences.token_texts import TokenTexts


def curves_of(name: str) -> Curves:
    """Return the metrics of another run as curves.

    Raises:
        CommandError: No run folder has the name.
    """
    from trinity_mq.observability.curves import Curves
    from trinity_mq.observability.follow import MetricsTail
    from trinity_mq.targets.target import find_configuration

    config = find_configuration(name, ())
    if config is None or not config.path.is_dir():
        raise CommandError(f"--beside {name}: there is no run folder with this name")
    curves = Curves()
    curves.add_all(MetricsTail(config.path).read())
    return curves


class LazyTexts:
    """The texts of a run's tokens. They are unknown until the model folder exists.

    Args:
        config: The run's configuration; None: unknown.
    """

    def __init__(self, config: Config | None) -> None:
        self._config = config
        self._loaded: TokenTexts | None = None

    def known(self) -> TokenTexts:
        """Return the known texts; retry loading if it failed before."""
        from trinity_mq.observability.experiences.token_texts import TokenTexts, tokenizer_folder

        if self._loaded is None or self._loaded.problem:
            config = self._config
            self._loaded = TokenTexts(None if config is None else tokenizer_folder(config.model, config.path))
        return self._loaded


def workflows(config: Config) -> dict[str, str]:
    """Return the workflow of each named taskset."""
    buffer = config.buffer
    tasksets = [*buffer.training_tasksets, *buffer.eval_tasksets]
    return {taskset.name: str(taskset.workflow) for taskset in tasksets if taskset.name}


def runs(folder: Path | None) -> list[dict[str, Any]]:
    """Return the runs next to a run folder, or below ``runs`` without a folder, as JSON objects."""
    from trinity_mq.observability.run_list import find_runs, row
    from trinity_mq.targets.target import RUNS

    top = RUNS if folder is None else folder.parent
    return [
        {
            **asdict(row(path)),
            "folder": str(path),
            "here": folder is not None and path.resolve() == folder.resolve(),
        }
        for path in find_runs(top)
    ]

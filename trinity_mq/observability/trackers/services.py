"""The tracker services. Each library is imported on first use, and each error states a remedy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity_mq.config import Config, TrackerConfig
from trinity_mq.errors import CommandError
from trinity_mq.observability.trackers.base import FOLDER, Tracker, TrackerError
from trinity_mq.targets.run_folder import flat_settings

KINDS = ("wandb", "mlflow", "swanlab")
STEP = "step"
"""Metric used as the x axis in Weights & Biases, because agents report the same step at different times."""


def open_trackers(config: Config, kinds: Sequence[str] | None = None) -> list[Tracker]:
    """Return the trackers of a configuration, or of the services ``kinds``. The subfolder ``trackers`` of the run's
    folder is created.

    Raises:
        CommandError: No tracker is configured, or the library of a tracker is not installed.
    """
    configured: dict[str, TrackerConfig] = {tracker.kind: tracker for tracker in config.monitor.trackers}
    names = configured if kinds is None else kinds
    tracker_configs = [configured.get(kind) or TrackerConfig.model_validate({"kind": kind}) for kind in names]
    if not tracker_configs:
        raise CommandError("the run has no monitor.trackers: name a service with --to, one of " + ", ".join(KINDS))
    try:
        return [_open_tracker(tracker, config) for tracker in tracker_configs]
    except TrackerError as error:
        raise CommandError(str(error)) from error


def _open_tracker(tracker: TrackerConfig, config: Config) -> Tracker:
    folder, settings = Path(config.path) / FOLDER, shown_settings(config)
    folder.mkdir(parents=True, exist_ok=True)
    if tracker.kind == "mlflow":
        return MlflowTracker(config.name, settings, tracker.project)
    service = WandbTracker if tracker.kind == "wandb" else SwanlabTracker
    return service(config.name, folder, settings, project=tracker.project, group=tracker.group, offline=tracker.offline)


def shown_settings(config: Config) -> dict[str, Any]:
    """Return the settings that services show next to metrics. They determine the result and contain nothing about the
    broker.
    """
    sections = ("seed", "mode", "algorithm", "model", "buffer", "explorer", "operator", "trainer", "synchronizer")
    return config.model_dump(mode="json", include=set(sections))


def _library(kind: str, module: str = "") -> Any:
    try:
        return importlib.import_module(module or kind)
    except ImportError as error:
        raise TrackerError(f"{kind} is not installed ({error}): pip install 'trinity-mq[{kind}]'") from error


@contextmanager
def _as_tracker_errors(kind: str, advice: str) -> Iterator[None]:
    """Turn any exception of a service's library into a TrackerError. The libraries do not document their exceptions."""
    try:
        yield
    except TrackerError:
        raise
    except Exception as error:
        raise TrackerError(f"{kind}: {' '.join(str(error).split()) or type(error).__name__}; {advice}") from error


class _RunTracker:
    """Base class of the trackers for services whose library has a current run: Weights & Biases, and SwanLab, whose
    library imitates it.
    """

    kind = ""

    def __init__(
        self, name: str, folder: Path, settings: Mapping[str, Any], *, project: str, group: str, offline: bool
    ) -> None:
        self._library = _library(self.kind)
        self._name, self._folder, self._settings = name, folder, dict(settings)
        self._project, self._group, self._offline = project, group, offline
        self._run: Any = None


class WandbTracker(_RunTracker):
    """Tracker for Weights & Biases."""

    kind = "wandb"
    ADVICE = "set WANDB_API_KEY, or offline: true and `wandb sync` later"

    def begin(self, run_id: str) -> str:
        """Start or resume the run. Offline, a resumed part becomes another folder of the same run."""
        with _as_tracker_errors(self.kind, self.ADVICE):
            self._run = self._library.init(
                project=self._project,
                group=self._group or None,
                name=self._name,
                id=run_id or None,
                resume="allow",
                dir=str(self._folder),
                config=self._settings,
                mode="offline" if self._offline else "online",
                settings=self._library.Settings(console="off", silent=True, disable_git=True, disable_code=True),
            )
            self._run.define_metric("*", step_metric=STEP)
            return str(self._run.id)

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Send values with the step as a metric, because the service's own step counter can only increase."""
        with _as_tracker_errors(self.kind, self.ADVICE):
            self._run.log({STEP: step, **values})

    def finish(self) -> str:
        """Wait until everything is sent. Return the run's URL or path."""
        with _as_tracker_errors(self.kind, self.ADVICE):
            location = self._run.url or f"{self._folder / 'wandb'}, for `wandb sync`"
            self._run.finish()
            return str(location)


class SwanlabTracker(_RunTracker):
    """Tracker for SwanLab."""

    kind = "swanlab"
    ADVICE = "set SWANLAB_API_KEY, or offline: true and `swanlab sync` later"

    def begin(self, run_id: str) -> str:
        """Start a run. Online, resume run ``run_id`` unless it is empty. Offline, each call starts a new run."""
        resume_arguments = {"id": run_id, "resume": "allow"} if run_id and not self._offline else {}
        with _as_tracker_errors(self.kind, self.ADVICE):
            self._run = self._library.init(
                project=self._project,
                experiment_name=self._name,
                group=self._group or None,
                logdir=str(self._folder / "swanlab"),
                config=self._settings,
                mode="offline" if self._offline else "cloud",
                **resume_arguments,
            )
            return str(getattr(self._run, "id", "") or run_id)

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        with _as_tracker_errors(self.kind, self.ADVICE):
            self._library.log(dict(values), step=step)

    def finish(self) -> str:
        """Wait until everything is sent. Return the run's location."""
        with _as_tracker_errors(self.kind, self.ADVICE):
            self._library.finish()
            return (
                f"{self._folder / 'swanlab'}, for `swanlab sync`"
                if self._offline
                else f"SwanLab, project {self._project}"
            )


class MlflowTracker:
    """Tracker for MLflow, at the server in ``MLFLOW_TRACKING_URI``."""

    kind = "mlflow"
    ADVICE = "set MLFLOW_TRACKING_URI to a server, such as http://localhost:5000"
    METRICS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100
    """Limits of MLflow's API per call."""
    PARAMETER_CHARACTERS = 500

    def __init__(self, name: str, settings: Mapping[str, Any], project: str) -> None:
        self._entities, self._client = _library("mlflow", "mlflow.entities"), _library("mlflow").MlflowClient
        self._name, self._settings, self._project = name, settings, project
        self._api: Any = None
        self._run_id = ""

    def begin(self, run_id: str) -> str:
        """Start or resume the run."""
        with _as_tracker_errors(self.kind, self.ADVICE):
            self._api = self._client()
            if run_id:
                self._api.update_run(run_id, status="RUNNING")
            else:
                existing = self._api.get_experiment_by_name(self._project)
                experiment = existing.experiment_id if existing else self._api.create_experiment(self._project)
                run_id = self._api.create_run(experiment, run_name=self._name).info.run_id
                params = [
                    self._entities.Param(key, str(value)[: self.PARAMETER_CHARACTERS])
                    for key, value in flat_settings(self._settings).items()
                ]
                for start in range(0, len(params), self.PARAMETERS_AT_ONCE):
                    self._api.log_batch(run_id, params=params[start : start + self.PARAMETERS_AT_ONCE])
            self._run_id = str(run_id)
            return self._run_id

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        metrics = [
            self._entities.Metric(key.replace("@", "_at_"), value, round(seconds * 1000), step)
            for key, value in values.items()  # MLflow does not allow @ in metric names
        ]
        with _as_tracker_errors(self.kind, self.ADVICE):
            for start in range(0, len(metrics), self.METRICS_AT_ONCE):
                self._api.log_batch(self._run_id, metrics=metrics[start : start + self.METRICS_AT_ONCE])

    def finish(self) -> str:
        """End the run. Return its location."""
        with _as_tracker_errors(self.kind, self.ADVICE):
            self._api.set_terminated(self._run_id)
            return f"MLflow, experiment {self._project}, run {self._run_id}"

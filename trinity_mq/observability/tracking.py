"""Opens the trackers that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config import Config, OtlpConfig, TrackerConfig
from trinity_mq.errors import CommandError
from trinity_mq.observability.spans import OtlpClient
from trinity_mq.observability.trackers.base import Tracker, TrackerError
from trinity_mq.observability.trackers.services import open_tracker

KINDS = ("wandb", "mlflow", "swanlab")
OTLP = "otlp"
"""Service name for an OpenTelemetry collector, which receives spans instead of metrics."""


def open_collector(config: Config, endpoint: str | None = None) -> OtlpClient:
    """Return the collector of a configuration, or the collector at ``endpoint``.

    Raises:
        CommandError: No collector is configured, the endpoint is not a URL, or a requirement of the collector is
            missing.
    """
    settings = config.monitor.otlp
    if endpoint is not None:
        configured = {} if settings is None else settings.model_dump()
        try:
            settings = OtlpConfig.model_validate({**configured, "endpoint": endpoint})
        except ValueError as error:
            raise CommandError(f"--endpoint is {endpoint!r}, wanted a URL such as http://localhost:4318") from error
    if settings is None:
        raise CommandError("the run has no monitor.otlp: name a collector with --endpoint http://localhost:4318")
    try:
        return OtlpClient(settings.endpoint, settings.headers_env, settings.timeout)
    except TrackerError as error:
        raise CommandError(str(error)) from error


def opened(config: Config, kinds: Sequence[str] | None = None) -> list[Tracker]:
    """Return the trackers of a configuration, or of ``kinds``.

    Raises:
        CommandError: No tracker is configured, or the library of a tracker is not installed.
    """
    configured: dict[str, TrackerConfig] = {tracker.kind: tracker for tracker in config.monitor.trackers}
    names = configured if kinds is None else kinds
    tracker_configs = [configured.get(kind) or TrackerConfig.model_validate({"kind": kind}) for kind in names]
    if not tracker_configs:
        raise CommandError("the run has no monitor.trackers: name a service with --to, one of " + ", ".join(KINDS))
    try:
        return [
            open_tracker(
                tracker.kind, config.name, Path(config.path), shown(config),
                project=tracker.project, group=tracker.group, offline=tracker.offline,
            )
            for tracker in tracker_configs
        ]  # fmt: skip
    except TrackerError as error:
        raise CommandError(str(error)) from error


def shown(config: Config) -> dict[str, Any]:
    """Return the settings that services show next to metrics. They determine the result and contain nothing about the
    broker.
    """
    sections = ("seed", "mode", "algorithm", "model", "buffer", "explorer", "operator", "trainer", "synchronizer")
    return config.model_dump(mode="json", include=set(sections))

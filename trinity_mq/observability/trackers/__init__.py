"""Trackers, services that collect the metrics of runs: Weights & Biases, MLflow, SwanLab."""

from trinity_mq.observability.trackers.base import Tracker, TrackerError
from trinity_mq.observability.trackers.forward import Forwarder
from trinity_mq.observability.trackers.services import open_tracker

__all__ = ["Forwarder", "Tracker", "TrackerError", "open_tracker"]

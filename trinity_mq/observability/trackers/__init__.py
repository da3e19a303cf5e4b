"""Trackers, services that collect the metrics of runs: Weights & Biases, MLflow, SwanLab."""

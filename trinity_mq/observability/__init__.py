"""Reads the state of a run from its broker and its folder, and shows it in displays, diagnoses, reports and metrics."""

"""Modes of a run, and the sections that belong to a single mode."""

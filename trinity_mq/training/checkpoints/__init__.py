"""Checkpoints of the trainer: atomic folders, what a learner puts into them, and those of earlier releases."""

"""Checkpoints of the trainer: atomic folders, the learner's state in them, and the format of earlier releases."""

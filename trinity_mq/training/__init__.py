"""The trainer's inside: source, packing, learner, checkpoints and the history of what was trained."""

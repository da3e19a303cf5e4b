"""Dispatches tasks as slices and follows them to their outcomes: shared by explorer, trainer and Scheduler."""

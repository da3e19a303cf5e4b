"""Dispatches tasks as slices and tracks the slices to their outcomes. Shared by explorer, trainer and Scheduler."""

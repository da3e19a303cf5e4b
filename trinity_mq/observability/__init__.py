"""The state of a run, from its broker and its folder, and each way to show it."""

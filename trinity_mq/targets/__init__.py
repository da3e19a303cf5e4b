"""Finds the run that a command names, with its folder, its configuration and its broker."""

"""Modes of a run, and the sections that belong to one of them alone."""

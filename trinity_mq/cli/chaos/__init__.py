"""Faults in a running run, on a schedule that a seed repeats, and the invariants that must hold all the same."""

"""Injects faults into a running run, on a schedule drawn from a seed, and checks the invariants that must still
hold.
"""

"""Proof that a run loses nothing: injects faults into a running run, and checks the invariants that must still hold."""

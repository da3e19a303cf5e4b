"""Proof that a run loses nothing: faults in a running run and the invariants that hold all the same."""

"""The shipped test kit: a virtual clock, and stand-ins for what cannot be had in a test (an engine, a learner)."""

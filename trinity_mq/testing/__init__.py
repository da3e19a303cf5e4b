"""The shipped test kit: a virtual clock, and fakes for an engine and a learner, which tests cannot use for real."""

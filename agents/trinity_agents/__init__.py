"""The daemons of a run; each package builds the parts of one agent and runs them."""

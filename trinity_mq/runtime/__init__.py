"""The base of the daemons, shared by all agents."""

"""The gateway: serves agents that know only a base URL, and turns their sessions into tasks."""

"""The host of an engine process: starts it, adopts it after a restart, and speaks to its admin API."""

"""Host of an engine process: starts it, adopts it after a restart, and calls its admin API."""

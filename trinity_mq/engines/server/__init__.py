"""HTTP server of an engine: admin API, state, lease and errors."""

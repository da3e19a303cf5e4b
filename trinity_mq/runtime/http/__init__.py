"""HTTP servers: what all of them have in common."""

"""One way to be a daemon."""

"""Common parts of all HTTP servers."""

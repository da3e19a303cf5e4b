"""In-memory bus for tests: the same protocol and the same rules, without a broker."""

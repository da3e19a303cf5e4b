"""The common base of all daemons."""

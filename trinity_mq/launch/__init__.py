"""Starts a whole run on one machine, follows it and stops it."""

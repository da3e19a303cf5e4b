"""Fixtures of all tests. Those that need a real broker are in broker_fixtures.py."""

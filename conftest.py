"""Loads the fixtures that all test folders share."""

pytest_plugins = ["tests.broker_fixtures"]

"""Runs a workflow: shared by the runner, ``trinity-mq debug`` and tests."""

"""Workflows of sessions: those that a gateway recorded, and programs that are given a base URL."""

"""Workflows in the box."""

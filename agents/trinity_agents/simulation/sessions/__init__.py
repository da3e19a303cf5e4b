"""Runs in mode ``serve``: gateways, their users, and the invariants of their sessions."""

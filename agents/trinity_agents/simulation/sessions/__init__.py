"""Runs in mode ``serve``: gateways, their users, and what must hold of their sessions."""

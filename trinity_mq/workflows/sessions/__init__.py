"""Workflows of sessions: sessions that a gateway recorded, and programs that receive a base URL."""

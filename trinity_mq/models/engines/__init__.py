"""Engines: what samples, how it is served, and how its host keeps it alive."""

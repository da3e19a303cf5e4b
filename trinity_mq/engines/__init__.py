"""Engines: sampling, serving over HTTP, and supervision by a host."""

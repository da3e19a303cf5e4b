"""Engines: sampling, serving over HTTP, and supervision by a host."""

from trinity_mq.engines.protocol import Engine, EngineJob

__all__ = ["Engine", "EngineJob"]

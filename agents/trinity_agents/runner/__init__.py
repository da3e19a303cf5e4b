"""The runner: runs workflows on task slices and publishes their experiences."""

from trinity_agents.runner.agent import Runner

__all__ = ["Runner"]

"""Whole runs in one process, on an in-memory broker and in virtual time: a harness for tests, and a command that plays
fault schedules drawn from seeds (``python -m trinity_agents.simulation``).
"""

from trinity_agents.simulation.harness import (
    RECORDED,
    NumberedTasks,
    Simulation,
    kill_and_replace_trainer,
    killed,
    until,
)

__all__ = ["RECORDED", "NumberedTasks", "Simulation", "kill_and_replace_trainer", "killed", "until"]

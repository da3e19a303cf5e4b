"""Whole runs in one process, on a broker in memory and in virtual time: a harness for tests, and an explorer of seeded
schedules of faults (``python -m trinity_agents.simulation``).
"""

from trinity_agents.simulation.harness import RECORDED, NumberedTasks, Simulation, killed, killed_once, until

__all__ = ["RECORDED", "NumberedTasks", "Simulation", "killed", "killed_once", "until"]

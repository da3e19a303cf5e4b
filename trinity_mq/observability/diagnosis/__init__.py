"""Names the agent that a run waits for, and the stage that limits its throughput, from heartbeats. Pure functions."""

from trinity_mq.observability.diagnosis.limits import bottleneck
from trinity_mq.observability.diagnosis.records import Bottleneck, Edge, Finding, Observation, Room, Stage, State
from trinity_mq.observability.diagnosis.settings import expected_agents, free_resources, limits
from trinity_mq.observability.diagnosis.steady import Steady, steady_finding, steady_limit
from trinity_mq.observability.diagnosis.verdict import diagnose
from trinity_mq.observability.diagnosis.watch import Watch

__all__ = [
    "Bottleneck",
    "Edge",
    "Finding",
    "Observation",
    "Room",
    "Stage",
    "State",
    "Steady",
    "Watch",
    "bottleneck",
    "diagnose",
    "expected_agents",
    "free_resources",
    "limits",
    "steady_finding",
    "steady_limit",
]

"""Names the agent that a run waits for, and the stage that limits its throughput, from heartbeats. Pure functions."""

from trinity_mq.observability.diagnosis.bottlenecks import bottleneck
from trinity_mq.observability.diagnosis.facts import free_resources
from trinity_mq.observability.diagnosis.flicker_filter import FlickerFilter, bottleneck_filter, finding_filter
from trinity_mq.observability.diagnosis.records import Bottleneck, Edge, Observation, Room, RunFinding, Stage, State
from trinity_mq.observability.diagnosis.verdict import diagnose

__all__ = [
    "Bottleneck",
    "Edge",
    "FlickerFilter",
    "Observation",
    "Room",
    "RunFinding",
    "Stage",
    "State",
    "bottleneck",
    "bottleneck_filter",
    "diagnose",
    "finding_filter",
    "free_resources",
]

"""What travels besides experiences: tasks, batches, sync and control events, telemetry."""

from trinity_mq.messages.base import BatchId, Message, Version
from trinity_mq.messages.batches import (
    Accepted,
    BatchClosed,
    BatchReady,
    ExperienceReference,
    Mark,
    Progress,
    RunEnd,
    Wanted,
)
from trinity_mq.messages.codec import CONTENT_TYPE, JSON_CONTENT_TYPE, DecodeError, decode, decode_any, encode
from trinity_mq.messages.sync import SyncEvent, SyncVerb
from trinity_mq.messages.tasks import (
    Deliver,
    Lane,
    Outcome,
    SubmissionOutcome,
    TaskBody,
    TaskResult,
    TaskResults,
    TaskSlice,
    TaskSubmission,
)
from trinity_mq.messages.telemetry import ControlEvent, Heartbeat, Metrics, Role

__all__ = [
    "CONTENT_TYPE",
    "JSON_CONTENT_TYPE",
    "Accepted",
    "BatchClosed",
    "BatchId",
    "BatchReady",
    "ControlEvent",
    "DecodeError",
    "Deliver",
    "ExperienceReference",
    "Heartbeat",
    "Lane",
    "Mark",
    "Message",
    "Metrics",
    "Outcome",
    "Progress",
    "Role",
    "RunEnd",
    "SubmissionOutcome",
    "SyncEvent",
    "SyncVerb",
    "TaskBody",
    "TaskResult",
    "TaskResults",
    "TaskSlice",
    "TaskSubmission",
    "Version",
    "Wanted",
    "decode",
    "decode_any",
    "encode",
]

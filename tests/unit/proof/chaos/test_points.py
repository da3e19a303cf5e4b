from __future__ import annotations

from typing import Any

from trinity_mq.messages import BatchClosed, BatchReady, Heartbeat, Progress, SyncEvent, TaskResult, TaskResults
from trinity_mq.proof.chaos.points import POINTS, PointWatch, points_for
from trinity_mq.proof.chaos.schedule import ROLES


def beat(role: Any, agent: str, incarnation: str = "a", seq: int = 1, **detail: object) -> Heartbeat:
    return Heartbeat(role=role, id=agent, seq=seq, incarnation=incarnation, lease=6.0, state="working", detail=detail)


def result(task: int) -> TaskResult:
    return TaskResult(batch=1, ticket="t", task_id=task, attempt="x", outcome="finished")


def test_each_point_is_seen() -> None:
    watch = PointWatch()
    seen = [
        watch.receive(beat("explorer", "explorer-0", run_id="r", opened=1)),
        watch.receive(beat("explorer", "explorer-0", run_id="r", opened=2)),
        watch.receive(beat("explorer", "explorer-0", run_id="r", opened=2, evaluating=0)),
        watch.receive(beat("explorer", "explorer-0", run_id="r", opened=2, evaluating=0)),
        watch.receive(beat("explorer", "explorer-0", "b", run_id="r", opened=2)),
        watch.receive(beat("runner", "runner-0", running=3)),
        watch.receive(beat("runner", "runner-0", running=0)),
        watch.receive(result(1)),
        watch.receive(TaskResults(results=[result(2), result(3)])),
        watch.receive(BatchClosed(batch=1, ticket="t")),
        watch.receive_chunk("t", "op"),
        watch.receive_chunk("t", "op"),
        watch.receive_chunk("t", "other"),
        watch.receive(BatchReady(batch=1, ticket="t", op="op")),
        watch.receive(Progress(progress=1, generation=1, step=1, batch=1, ticket="t", outcome="trained")),
        watch.receive("something else"),
    ]
    assert seen == [
        [],
        ["batch_opened"],
        ["evaluating"],
        [],
        ["agent_back"],
        ["slices_in_flight"],
        [],
        ["result_published"],
        ["result_published"],
        ["batch_closed"],
        ["chunk_published"],
        [],
        ["chunk_published"],
        ["batch_ready"],
        ["step_done"],
        [],
    ]
    assert watch.passed["chunk_published"] == 2


def test_a_sync_passes_its_points_once_each_however_often_its_events_are_repeated() -> None:
    watch, seen = PointWatch(), []
    for attempt in (0, 1):
        for verb in ("join", "prepare", "ready", "prepare", "go", "applied", "applied", "commit", "abort"):
            event = SyncEvent(verb=verb, sender="s", version=(1, 2), attempt=attempt)  # type: ignore[arg-type]
            seen += watch.receive(event)
    assert seen == ["sync_prepare", "sync_go", "sync_applied", "sync_commit"] * 2


def test_every_role_has_points_and_every_point_roles() -> None:
    assert all(points_for(role) for role in ROLES)
    assert all(set(point.roles) <= set(ROLES) for point in POINTS.values())

"""Declaration of every queue of a run (docs/protocol.md, Names)."""

from __future__ import annotations

from trinity_mq.bus import Topology

TOPOLOGY = Topology("run-1", ready_max_bytes=3_000_000_000, results_max_bytes=500_000_000)
DAY_MS = 24 * 3600 * 1000


def test_work_queues() -> None:
    work = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000, "x-dead-letter-exchange": "tmq.run-1.dead"}
    for queue in (TOPOLOGY.tasks_train, TOPOLOGY.tasks_eval, TOPOLOGY.closed):
        assert queue.arguments == work
        assert queue.redeclare
    assert TOPOLOGY.submitted.arguments == {
        **work,
        "x-max-length-bytes": 1024**3,  # outsiders fill it: a submitter is refused, and nothing is lost
        "x-overflow": "reject-publish",
    }
    assert TOPOLOGY.submitted.redeclare


def test_the_dead_queue_has_no_way_on() -> None:
    """But for letters that there is no room for: the explorer counts them."""
    assert TOPOLOGY.dead.arguments == {
        "x-queue-type": "quorum",
        "x-delivery-limit": 1_000_000,
        "x-max-length-bytes": 512 * 1024**2,
        "x-overflow": "drop-head",
        "x-dead-letter-exchange": "tmq.run-1.control",
        "x-dead-letter-routing-key": "dropped.dead",
    }


def test_batch_queues() -> None:
    queue = TOPOLOGY.batch_queue("3/gsm8k", "0f3e")
    assert queue.arguments == {
        "x-queue-type": "quorum",
        "x-delivery-limit": 1_000_000,
        "x-dead-letter-exchange": "tmq.run-1.dead",
        "x-single-active-consumer": True,
        "x-expires": 7 * DAY_MS,
    }
    assert not queue.redeclare


def test_streams() -> None:
    for queue, size in ((TOPOLOGY.ready, 3_000_000_000), (TOPOLOGY.results, 500_000_000)):
        assert queue.arguments == {
            "x-queue-type": "stream",
            "x-max-length-bytes": size,
            "x-stream-max-segment-size-bytes": 64 * 1024 * 1024,
        }


def test_where_each_queue_is_bound() -> None:
    bound = {
        queue.name.removeprefix("tmq.run-1."): [
            (binding.exchange.removeprefix("tmq.run-1."), binding.pattern) for binding in queue.bindings
        ]
        for queue in (*TOPOLOGY.durable, TOPOLOGY.batch_queue(17, "0f3e"))
    }
    assert bound == {
        "submitted": [("tasks", "submit"), ("tasks", "session")],
        "tasks.train": [("tasks", "train.#")],
        "tasks.eval": [("tasks", "eval.#")],
        "closed": [("batches", "closed")],
        "results": [("results", "#")],
        "ready": [("ready", "#")],
        "dead": [("dead", "#")],
        "batch.0f3e": [("experiences", "17.0f3e")],
    }

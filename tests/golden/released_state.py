"""Writes and reads the files that a run goes on from, with whatever ``trinity_mq`` the running Python has, as
``released.py`` does it for messages.

    python tests/golden/released_state.py write FOLDER      a run's folder with one of each
    python tests/golden/released_state.py read FOLDER OUT   what this release finds in such a folder, as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from trinity_agents.explorer.state import ExplorerState, PendingTask, StateFile
from trinity_agents.trainer.history import History, lineage
from trinity_mq.data import TaskStats
from trinity_mq.dispatch.tickets import SubmissionRef, new_ticket
from trinity_mq.messages import TaskBody, TaskResult
from trinity_mq.telemetry.sample_log import SampleLog, SampleLogReader
from trinity_mq.training.checkpoints import checkpoint
from trinity_mq.training.checkpoints.checkpoint import CheckpointStore, find_checkpoints, verify

PROGRESS = 3
# this program also runs with release 0.1, which calls the class TrainerState
TrainerProgress: Any = getattr(checkpoint, "TrainerProgress", None) or checkpoint.TrainerState


def explorer_state() -> ExplorerState:
    """Return a state with one ticket at work, one followed, and everything else that has rows of its own."""
    bodies = [TaskBody(raw_task={"n": n}, repeat_times=2) for n in range(3)]
    submissions = [SubmissionRef(submission_id="s", task_id=1)]
    ticket, closed = (
        new_ticket(number, bodies, deliver="pipeline", lane="train", time_left=60.0, submissions=submissions)
        for number in (4, PROGRESS)
    )
    fields: dict[str, Any] = {"ticket": ticket.ticket, "task_id": 2, "run_base": 0, "attempt": "a" * 32}
    ticket.record(TaskResult(batch=4, **fields, outcome="finished", runs=[0, 1], metrics=[{"reward": 1.0}] * 2))
    state = ExplorerState(
        run_id="0123abcd",
        incarnations=2,
        taskset={"identity": "golden", "cursor": 12},
        results_offset=40,
        opened=4,
        closed=PROGRESS,
        tickets={ticket.ticket: ticket},
        pending=[PendingTask(task=TaskBody(raw_task={"n": 9}))],
        submitted=2,
        accepted=["s", "t"],
        # a mapping, because releases name the class differently
        observations=[{"ticket": closed.ticket, "stats": {"golden": [TaskStats(0, 0.5, 2)]}}],
        due=[PROGRESS],
        evaluated=["2/heldout"],
    )
    state.following.add(closed.make_manifest(), (), {0: closed.tasks[0]})
    return state


async def write(folder: Path) -> None:
    """Write one of each kind."""
    await StateFile.of(folder).save(explorer_state())

    async def weights(partial: Path) -> str:
        (partial / "weights").write_text("of a model")
        return "0f"

    state = TrainerProgress(generation=1, step=2, progress=PROGRESS, source={"offset": 17}, run_id="0123abcd")
    await CheckpointStore(folder / "checkpoints", 2).save(weights, state)
    with closing(History(folder / "history", 1, None)) as history:
        for number in range(1, PROGRESS + 1):
            history.record(
                progress=number,
                step=min(number, 2),
                batch=number,
                ticket=f"ticket-{number}",
                op=f"op-{number}",
                outcome="empty" if number == PROGRESS else "trained",
                uids=[] if number == PROGRESS else [f"{number}/0/0/0/a"],
            )
        history.saved(PROGRESS)
    with closing(SampleLog(folder / "samples", 2**20)) as samples:
        samples.append(2, b"a body")


async def read(folder: Path) -> dict[str, Any]:
    """Return what is found; the explorer's file is loaded and saved again, as its next start would."""
    file = StateFile.of(folder)
    state = file.load()
    dumped = state.model_dump(mode="json")
    known = sorted(await file.known({"s", "t", "u"}))
    await file.save(state)
    again = StateFile.of(folder).load().model_dump(mode="json")
    whole, damaged = find_checkpoints(folder / "checkpoints")
    for one in whole:
        verify(one)
    return {
        "explorer": dumped,
        "saved again": again == dumped,
        "submissions": known,
        "checkpoints": [[one.path.name, one.state.model_dump(mode="json"), one.weights] for one in whole],
        "damaged": len(damaged),
        "history": lineage(folder / "history", 1, PROGRESS),
        "samples": [[one.step, one.body.decode()] for one in SampleLogReader(folder / "samples").read()],
    }


if __name__ == "__main__":
    if sys.argv[1] == "write":
        asyncio.run(write(Path(sys.argv[2])))
    else:
        found = asyncio.run(read(Path(sys.argv[2])))
        Path(sys.argv[3]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

"""The history of a checkpoint is what its own generations decided, in order, each ticket once."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from trinity_agents.simulation import Simulation
from trinity_agents.trainer.history import History, HistoryError, last_progress, last_saved, lineage
from trinity_mq.runtime.state_formats import NewerStateError
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import STATE_FILE


def write(folder: Path, generation: int, resumed_from: tuple[int, int] | None, progress: range) -> None:
    with closing(History(folder, generation, resumed_from)) as history:
        for one in progress:
            history.record(
                progress=one,
                step=one,
                batch=one,
                ticket=f"ticket-{one}",
                op=f"op-{generation}",
                outcome="trained",
                uids=[f"{one}/0/0/0/a", f"{one}/0/1/0/b"],
            )


def made_by(folder: Path, generation: int, progress: int) -> list[tuple[int, str]]:
    return [(entry["progress"], entry["op"]) for entry in lineage(folder, generation, progress)]


def test_leaves_out_what_was_decided_after_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1, None, range(1, 6))
    write(tmp_path, 2, (1, 3), range(4, 9))
    write(tmp_path, 3, (1, 3), range(4, 6))
    write(tmp_path, 5, (3, 4), range(5, 7))
    assert made_by(tmp_path, 5, 6) == [(1, "op-1"), (2, "op-1"), (3, "op-1"), (4, "op-3"), (5, "op-5"), (6, "op-5")]
    assert made_by(tmp_path, 2, 3) == [(1, "op-1"), (2, "op-1"), (3, "op-1")]
    assert made_by(tmp_path, 1, 0) == []


@pytest.mark.parametrize("fields", [{}, {"format": 2, "release": "0.9.0"}], ids=["0.1.0 says no format", "newer"])
def test_that_of_an_older_release_is_read_and_of_a_newer_one_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    write(tmp_path, 1, None, range(1, 3))
    header, *rest = (tmp_path / "1.jsonl").read_text().splitlines()
    header = json.dumps({key: v for key, v in json.loads(header).items() if key not in {"format", "release"}} | fields)
    (tmp_path / "1.jsonl").write_text("\n".join([header, *rest, ""]))
    if not fields:
        assert len(lineage(tmp_path, 1, 2)) == 2
        return
    for read in (lambda: lineage(tmp_path, 1, 2), lambda: last_saved(tmp_path)):
        with pytest.raises(
            NewerStateError, match=r"1\.jsonl has format 2, written by release 0\.9\.0; this is release"
        ):
            read()


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 1, None, range(1, 4))
    path = tmp_path / "1.jsonl"
    whole = path.read_bytes()
    torn = whole[: whole.rindex(b'{"progress":3') + cut]
    path.write_bytes(torn)
    assert len(made_by(tmp_path, 1, 2)) == 2
    with pytest.raises(HistoryError, match="progress 1 to 3"):
        lineage(tmp_path, 1, 3)


def test_a_history_that_is_empty_or_not_of_a_new_generation_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "4.jsonl").touch()
    with pytest.raises(HistoryError, match="empty"):
        lineage(tmp_path, 4, 1)
    write(tmp_path, 1, (0, 0), range(1, 2))
    with pytest.raises(HistoryError, match="new generation"):
        History(tmp_path, 1, None)
    assert made_by(tmp_path, 1, 1) == [(1, "op-1")], "nothing is asked of one that ended before its first batch"


def test_the_furthest_that_any_generation_came(tmp_path: Path) -> None:
    assert last_progress(tmp_path) == 0
    write(tmp_path, 1, None, range(1, 8))
    write(tmp_path, 2, (1, 4), range(5, 6))
    write(tmp_path, 3, (1, 4), range(0))
    assert last_progress(tmp_path) == 7
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"saved":7}\n{"progress":8,"st')
    assert last_progress(tmp_path) == 7, "a line that was cut off was never acted on"


def test_the_lines_of_a_checkpoint_are_on_disk_before_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power keeps only what was synced."""
    synced: dict[str, int] = {}
    at_commit: dict[str, str] = {}
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
        synced[path.name] = os.fstat(descriptor).st_size
        if path.name == STATE_FILE:
            kept = (tmp_path / "history" / "1.jsonl").read_bytes()[: synced.get("1.jsonl", 0)]
            at_commit[path.parent.name] = kept.decode()

    monkeypatch.setattr(os, "fsync", noting)
    run_virtually(Simulation(tmp_path, ("trainer.save_interval=2",), batches=4).run(), limit=1000)
    assert len(at_commit) == 2
    for folder, text in at_commit.items():
        progress = int(folder.split("-")[2])
        assert f'"progress":{progress},' in text, f"{folder} was committed with only this history on disk: {text}"

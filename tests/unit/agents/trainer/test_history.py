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


def test_entries_hold_what_was_recorded(tmp_path: Path) -> None:
    write(tmp_path / "new", 1, None, range(1, 2))
    assert lineage(tmp_path / "new", 1, 1) == [
        {
            "progress": 1,
            "step": 1,
            "batch": 1,
            "ticket": "ticket-1",
            "op": "op-1",
            "outcome": "trained",
            "uids": ["1/0/0/0/a", "1/0/1/0/b"],
        }
    ]


def test_leaves_out_what_was_decided_after_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1, None, range(1, 6))
    write(tmp_path, 2, (1, 3), range(4, 9))
    write(tmp_path, 3, (1, 3), range(4, 6))
    write(tmp_path, 5, (3, 4), range(5, 7))
    assert made_by(tmp_path, 5, 6) == [(1, "op-1"), (2, "op-1"), (3, "op-1"), (4, "op-3"), (5, "op-5"), (6, "op-5")]
    assert made_by(tmp_path, 2, 3) == [(1, "op-1"), (2, "op-1"), (3, "op-1")]
    assert made_by(tmp_path, 1, 0) == []


def with_header(path: Path, **fields: object) -> None:
    header, *rest = path.read_text().splitlines()
    found = {**json.loads(header), **fields}
    path.write_text("\n".join([json.dumps({k: v for k, v in found.items() if v is not None}), *rest, ""]))


def test_that_of_release_0_1_0_says_no_format(tmp_path: Path) -> None:
    write(tmp_path, 1, None, range(1, 3))
    with_header(tmp_path / "1.jsonl", format=None, release=None)
    assert len(lineage(tmp_path, 1, 2)) == 2


def test_that_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, None, range(1, 3))
    with_header(tmp_path / "1.jsonl", format=2, release="0.9.0")
    for read in (lambda: lineage(tmp_path, 1, 2), lambda: last_saved(tmp_path)):
        with pytest.raises(
            NewerStateError, match=r"1\.jsonl has format 2, written by release 0\.9\.0; this is release"
        ):
            read()


def test_each_line_can_be_read_while_the_file_is_open(tmp_path: Path) -> None:
    history = History(tmp_path, 1, None)
    history.record(progress=1, step=0, batch=1, ticket="t", op="o", outcome="empty", uids=[])
    assert len(lineage(tmp_path, 1, 1)) == 1
    history.close()


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


def test_damage_elsewhere_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1, None, range(1, 4))
    path = tmp_path / "1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"progress":2', b'"progress":', 1))
    with pytest.raises(HistoryError, match="line 3 is not JSON"):
        lineage(tmp_path, 1, 3)


@pytest.mark.parametrize("numbers", [[1, 3], [1, 2, 2], [2, 1]])
def test_a_gap_or_a_repeat_is_an_error(tmp_path: Path, numbers: list[int]) -> None:
    with closing(History(tmp_path, 1, None)) as history:
        for number in numbers:
            history.record(progress=number, step=0, batch=1, ticket="t", op="o", outcome="empty", uids=[])
    with pytest.raises(HistoryError, match="each once, in order"):
        lineage(tmp_path, 1, max(numbers))


def test_missing_empty_and_circular_histories_are_errors(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"cannot read.*4\.jsonl"):
        lineage(tmp_path, 4, 1)
    (tmp_path / "4.jsonl").touch()
    with pytest.raises(HistoryError, match="empty"):
        lineage(tmp_path, 4, 1)
    write(tmp_path, 6, (6, 0), range(1, 2))
    with pytest.raises(HistoryError, match="not before 6"):
        lineage(tmp_path, 6, 1)


def test_nothing_is_asked_of_a_generation_that_ended_before_its_first_batch(tmp_path: Path) -> None:
    write(tmp_path, 1, (0, 0), range(1, 3))
    assert [entry["progress"] for entry in lineage(tmp_path, 1, 2)] == [1, 2]


def test_a_generation_has_one_history(tmp_path: Path) -> None:
    write(tmp_path, 1, None, range(1, 2))
    with pytest.raises(HistoryError, match="new generation"):
        History(tmp_path, 1, None)
    assert len(lineage(tmp_path, 1, 1)) == 1


def test_a_repaired_batch_is_another_line_of_the_same_progress(tmp_path: Path) -> None:
    def line(history: History, progress: int, batch: int, repaired: bool = False) -> None:
        history.record(
            progress=progress,
            step=progress,
            batch=batch,
            ticket=f"t{batch}",
            op="o",
            outcome="trained",
            uids=[],
            repaired=repaired,
        )

    with closing(History(tmp_path, 1, None)) as history:
        line(history, 1, 1)
        line(history, 2, 2)
        line(history, 2, 1, repaired=True)
        line(history, 3, 3)
    found = [(entry["progress"], entry["batch"], "repaired" in entry) for entry in lineage(tmp_path, 1, 3)]
    assert found == [(1, 1, False), (2, 2, False), (2, 1, True), (3, 3, False)]
    assert len(lineage(tmp_path, 1, 1)) == 1


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

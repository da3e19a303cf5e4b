"""``trinity-mq audit``: what a run left proves its checkpoints; each planted fault is found and named."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.agents.trainer.test_repaired_batches import CHAIN, Choosy, replayed
from trinity_agents.simulation import Simulation, killed, until
from trinity_agents.trainer.audit import Auditor, as_json, verdict
from trinity_agents.trainer.history import History, HistoryError, last_progress, last_saved, lineage
from trinity_mq.cli.main import main
from trinity_mq.messages import BatchReady
from trinity_mq.proof.record import Record, read_sets
from trinity_mq.runtime.state_formats import NewerStateError
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import STATE_FILE, find_checkpoints

BATCHES = 8
SETTINGS = ("trainer.save_interval=2", "trainer.max_checkpoints_to_keep=9", "synchronizer.sync_offset=4")
Lines = list[Any]


def record_of(sim: Simulation) -> Record:
    """Read the ready stream as the command does."""

    async def read() -> Record:
        return await read_sets(await sim.client(), sim.topology)

    return run_virtually(read(), limit=1000)


def restarted(folder: Path) -> Simulation:
    """Return a run whose trainer was killed twice, and went on from a checkpoint each time."""
    sim = Simulation(folder, SETTINGS, batches=BATCHES)

    async def trainer() -> None:
        for progress in (3, 5):
            life = asyncio.get_running_loop().create_task(sim.make_trainer().run())
            await until(lambda progress=progress: sim.trainer.loop.progress == progress)  # type: ignore[misc]
            assert await killed(life)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    return sim


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """A finished run's folder, and what its stream holds."""
    folder = tmp_path_factory.mktemp("run")
    return folder, record_of(restarted(folder))


@pytest.fixture
def run(finished: tuple[Path, Record], tmp_path: Path) -> Path:
    """A copy of that folder, to do harm to."""
    shutil.copytree(finished[0], tmp_path / "run")
    config = {"name": "sim", "model": {"tiny": {}}, "run_dir": str(tmp_path / "run")}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run"


def audited(folder: Path, content: Record | None = None, number: int = 0) -> Auditor:
    auditor = Auditor(folder, find_checkpoints(folder / "checkpoints")[0][number])
    auditor.check_folder()
    if content is not None:
        auditor.check_stream(content)
    return auditor


def faults(auditor: Auditor) -> str:
    return "\n".join(f"{one.name}: {one.text}" for one in auditor.checks if one.result == "fault")


@contextmanager
def changed(folder: Path) -> Iterator[dict[int, Lines]]:
    """Give the lines of the history, by generation, to be changed; a text is written as it is."""
    files = sorted((folder / "history").glob("*.jsonl"))
    history = {int(path.stem): [json.loads(line) for line in path.read_text().splitlines()] for path in files}
    yield history
    for path in files:
        path.unlink()
    for generation, lines in history.items():
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (folder / "history" / f"{generation}.jsonl").write_text("".join(f"{text}\n" for text in texts))


def at(lines: Lines, progress: int) -> dict[str, Any]:
    entry: dict[str, Any] = next(line for line in lines if line.get("progress") == progress)
    return entry


def test_a_run_whose_trainer_was_killed_twice_is_proven(finished: tuple[Path, Record]) -> None:
    folder, content = finished
    for number, checkpoint in enumerate(find_checkpoints(folder / "checkpoints")[0]):
        found = audited(folder, content, number)
        assert not found.has_faults, faults(found)
        assert len(found.uids) == len(set(found.uids)) == checkpoint.state.progress * 4
        assert {check.result for check in found.checks} == {"holds"}
        assert verdict([found]) == "proven"
    newest = audited(folder, content)
    texts = {check.name: check.text for check in newest.checks}
    assert re.findall(r"by generation (\d)", texts["progress"]) == ["1", "2", "3"]
    assert texts["experiences"] == f"{BATCHES * 4} experiences, each trained on once, in its own batch"
    assert texts["stream"] == f"{BATCHES} batches hold only experiences of the set that decides their ticket"
    assert as_json(newest)["faults"] is False


def test_batches_that_an_operator_of_another_configuration_processed_are_faults(tmp_path: Path) -> None:
    """Started by hand in a folder that names no run, it follows the explorer that holds the lock."""
    sim = Simulation(tmp_path, SETTINGS, batches=BATCHES)
    other = ("algorithm.estimator.kind=group", "algorithm.estimator.scale=batch")
    stranger = Simulation(tmp_path, (*SETTINGS, *other), batches=BATCHES, broker=sim.broker)
    sim.operators = 0
    processed: list[bool] = []

    async def operators() -> None:
        first = asyncio.get_running_loop().create_task(stranger.make_operator().run())
        await until(lambda: bool(sim.trainers) and sim.trainer.loop.progress >= 2)
        assert await killed(first)
        processed.extend(one.other_chain for one in sim.published(BatchReady))
        await sim.make_operator().run()

    run_virtually(sim.run(beside=operators), limit=1000)
    assert len(processed) >= 2
    assert all(processed)
    found = audited(tmp_path, record_of(sim))
    lines = faults(found).splitlines()
    assert len(lines) == len(processed) < BATCHES
    assert all("another configuration than the run's explorer" in line for line in lines)


def test_a_checkpoint_that_a_tap_saved_before_it_reached_the_other_run_has_consumed_nothing(run: Path) -> None:
    file = find_checkpoints(run / "checkpoints")[0][0].path / STATE_FILE
    content = json.loads(file.read_text())
    content["state"] |= {"generation": 1, "progress": 0, "step": 0, "source": {}}
    file.write_text(json.dumps(content))
    checkpoint = next(each for each in find_checkpoints(run / "checkpoints")[0] if not each.state.source)

    def results(**changes: Any) -> list[str]:
        auditor = Auditor(run, replace(checkpoint, state=checkpoint.state.model_copy(update=changes)))
        auditor.check_folder()
        return [check.result for check in auditor.checks if check.name == "checkpoint"]

    assert results() == ["holds"]
    assert results(source={"offset": 0, "failed": []}) == ["fault"]
    (run / "history" / "1.jsonl").write_text("")
    assert results(progress=2) == ["fault"]


def test_a_checkpoint_need_not_name_the_tickets_of_long_ago(run: Path) -> None:
    file = find_checkpoints(run / "checkpoints")[0][0].path / STATE_FILE
    content = json.loads(file.read_text())
    source = content["state"]["source"]
    recent = {ticket: batch for ticket, batch in source["consumed"].items() if batch > 4}
    assert 0 < len(recent) < len(source["consumed"])
    source |= {"consumed": recent, "settled": 4}
    file.write_text(json.dumps(content))
    assert "checkpoint" not in faults(audited(run))
    source["settled"] = 3
    file.write_text(json.dumps(content))
    assert "the history lists these tickets, and the checkpoint has not consumed them" in faults(audited(run))


TWICE = "2.jsonl should hold progress 3 to 4, each once, in order; "
FAULTS: list[tuple[Any, ...]] = [
    (
        lambda h: at(h[1], 2).update(uids=at(h[1], 2)["uids"][:1] * 4),
        "experiences: experiences trained on more than once: 2/",
    ),
    (
        lambda h: at(h[3], 7).update(uids=at(h[1], 1)["uids"]),
        "experiences: progress 7 is batch 7, but holds others: 1/",
        "experiences: experiences trained on more than once: 1/",
    ),
    (lambda h: h[2].remove(at(h[2], 3)), f"{TWICE}missing: 3"),
    (lambda h: h[2].append(at(h[2], 4)), f"{TWICE}double: 4"),
    (lambda h: h.pop(2), "progress: cannot read the history"),
    (lambda h: h.update({2: h[1]}), "2.jsonl is of generation 1, wanted 2"),
    (lambda h: h[3][0]["resumed_from"].update(generation=7), "continues generation 7, which is not before 3"),
    (
        lambda h: h[3][0].update(resumed_from={"generation": 1, "progress": 2}),
        "3.jsonl should hold progress 3 to 8, each once, in order; missing: 3, 4",
    ),
    (
        lambda h: at(h[3], 6).update(ticket="of another run"),
        "the history lists these tickets, and the checkpoint has not consumed them: of another run",
        "the checkpoint has consumed these tickets, and its history does not list them: ",
    ),
    (lambda h: at(h[3], 6).update(ticket=at(h[3], 5)["ticket"]), "tickets: tickets decided more than once: "),
    (
        lambda h: h[3].insert(
            h[3].index(at(h[3], 6)) + 1, {**at(h[3], 6), "ticket": at(h[3], 5)["ticket"], "repaired": True}
        ),
        "but was trained before, wanted failed or skipped",
    ),
    (lambda h: at(h[3], 8).update(step=9), "steps: the history ends with step 9, and the checkpoint has 8"),
    (
        lambda h: at(h[3], 8)["stream"].update(chunks=at(h[3], 7)["stream"]["chunks"]),
        "messages of the stream that were used more than once, by offset: ",
    ),
    (
        lambda h: at(h[3], 8)["uids"].pop(),
        "sets: progress 8 has 3 experiences and 0 dropped ones, and its operator announced 4",
    ),
    (lambda h: h[1].insert(1, '{"progress":'), "1.jsonl, line 2 is not JSON"),
    (lambda h: at(h[2], 3).update(progress="3"), "2.jsonl, line 2 is not a line of a history"),
    (lambda h: at(h[2], 3).pop("ticket"), "is not what was written: KeyError('ticket')"),
]


@pytest.mark.parametrize(
    ("harm", "wanted"), [(harm, wanted) for harm, *wanted in FAULTS], ids=[fault[1] for fault in FAULTS]
)
def test_a_planted_fault_is_found(run: Path, harm: Callable[[dict[int, Lines]], object], wanted: list[str]) -> None:
    with changed(run) as history:
        harm(history)
    found = audited(run)
    assert found.has_faults
    assert [text for text in wanted if text not in faults(found)] == []
    assert "fault" in verdict([found])


def test_a_changed_byte_is_found(run: Path) -> None:
    (run / "checkpoints" / "progress-000008" / "weights").write_text("nine")
    assert "files: weights has the checksum " in faults(audited(run))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"uids": ["6/0/0/0/000000000000"]}, "stream: progress 6 holds experiences that no operator sent: 6/0/0/0/"),
        ({"op": "another"}, "stream: progress 6 was decided by set another, which is not there"),
    ],
)
def test_what_the_folder_alone_cannot_tell_is_found_on_the_stream(
    run: Path, finished: tuple[Path, Record], change: dict[str, Any], wanted: str
) -> None:
    with changed(run) as history:
        entry = at(history[3], 6)
        if "uids" in change:
            entry["uids"][:1] = change["uids"]
        else:
            entry.update(change)
    assert not audited(run).has_faults
    assert wanted in faults(audited(run, finished[1]))


def test_a_second_set_of_a_ticket_does_not_decide_it(run: Path, finished: tuple[Path, Record]) -> None:
    content = replace(finished[1], sets=list(finished[1].sets))
    with changed(run) as history:
        entry = at(history[3], 6)
    first = content.by_processing[entry["ticket"], entry["op"]]
    content.sets[content.sets.index(first)] = replace(first, is_first=False)
    assert "which is not the first of its ticket there" in faults(audited(run, content))


def test_what_retention_has_cut_is_told(run: Path, finished: tuple[Path, Record]) -> None:
    with changed(run) as history:
        begins = at(history[2], 4)["stream"]["offset"] + 1
    left = [processed for processed in finished[1].sets if processed.offset >= begins]
    found = audited(run, Record(ready_begin=begins, sets=left))
    assert not found.has_faults
    assert [(one.name, one.text) for one in found.checks if one.result == "not checked"] == [
        ("stream", "the stream does not hold the sets of 4 batches any more")
    ]
    assert verdict([found]) == "no fault found; 1 thing not checked"


def test_a_history_of_the_release_before_is_checked_as_far_as_it_goes(run: Path, finished: tuple[Path, Record]) -> None:
    with changed(run) as history:
        for line in [line for lines in history.values() for line in lines]:
            line.pop("stream", None)
            line.pop("dropped", None)
    found = audited(run, finished[1])
    assert not found.has_faults
    assert [one.name for one in found.checks if one.result == "not checked"] == ["sets"]


@pytest.mark.parametrize("settings", [(), ("trainer.batches_per_step=2", "synchronizer.sync_interval=2")])
def test_failed_repaired_empty_and_stale_batches_are_in_order(tmp_path: Path, settings: tuple[str, ...]) -> None:
    Choosy.repaired = False
    settings = (
        CHAIN,
        "broker.delivery_limit=2",
        "trainer.save_interval=1",
        "explorer.max_consecutive_empty=9",
        *settings,
    )
    sim = Simulation(tmp_path, settings, batches=BATCHES)
    sim.spoil = lambda task_slice: "failed" if task_slice.batch == 4 else None
    run_virtually(sim.run(beside=lambda: replayed(sim)), limit=2000)
    found = audited(tmp_path, record_of(sim))
    assert not found.has_faults, faults(found)
    outcomes = {(entry["outcome"], bool(entry.get("repaired"))) for entry in found.entries}
    assert {("failed", False), ("trained", True), ("empty", False), ("trained", False)} <= outcomes
    assert verdict([found]) == "proven"


# -- the command


def test_the_command_says_what_holds_and_what_it_could_not_check(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)
    assert main(["audit", str(run)]) == 0
    assert "the stream of processed batches cannot be read: no broker is known for run 'sim'" in capsys.readouterr().out
    assert main(["audit", str(run), "--offline"]) == 0
    out = capsys.readouterr().out
    assert "progress-000008: generation 3, step 8, 8 batches, 32 experiences" in out
    assert "ok           tickets      8 tickets, each decided once" in out
    assert "not checked  stream       skipped (--offline)" in out
    assert out.endswith("no fault found; 1 thing not checked\n")


def test_a_fault_is_an_exit_code_for_scripts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with changed(run) as history:
        FAULTS[0][0](history)
    assert main(["audit", str(run), "--offline", "--json", "--checkpoint", "all"]) == 1
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert [one["checkpoint"] for one in found] == [f"progress-{n:06d}" for n in (8, 6, 4, 2)]
    assert {one["faults"] for one in found} == {True}
    wrong = [check for check in found[0]["checks"] if check["result"] == "fault"]
    assert [check["name"] for check in wrong] == ["experiences"]
    assert captured.err.endswith("4 faults found\n")


def test_a_checkpoint_by_name_and_nothing_to_check(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run), "--offline", "--checkpoint", "step-4"]) == 0
    assert "progress-000004: generation 2" in capsys.readouterr().out
    assert main(["audit", str(run), "--offline", "--checkpoint", "step-5"]) == 2
    assert "no checkpoint step-5" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["audit", str(run), "--offline"]) == 2
    assert "holds no checkpoint to check" in capsys.readouterr().err


# -- the history of a checkpoint is what its own generations decided, in order, each ticket once


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
    tmp_path: Path, on_sync: Callable[[Callable[[int], object]], None]
) -> None:
    """A machine that loses its power keeps only what was synced."""
    synced: dict[str, int] = {}
    at_commit: dict[str, str] = {}

    def noting(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path.name] = os.fstat(descriptor).st_size
        if path.name == STATE_FILE:
            kept = (tmp_path / "history" / "1.jsonl").read_bytes()[: synced.get("1.jsonl", 0)]
            at_commit[path.parent.name] = kept.decode()

    on_sync(noting)
    run_virtually(Simulation(tmp_path, ("trainer.save_interval=2",), batches=4).run(), limit=1000)
    assert len(at_commit) == 2
    for folder, text in at_commit.items():
        progress = int(folder.split("-")[2])
        assert f'"progress":{progress},' in text, f"{folder} was committed with only this history on disk: {text}"

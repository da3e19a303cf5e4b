"""Each invariant finds what it is there for: a record that keeps it, and one that was tampered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trinity_mq.bus import Incoming
from trinity_mq.messages import BatchReady, Progress, TaskResult, Version
from trinity_mq.proof.invariants import (
    Expected,
    FaultCounts,
    InvariantVerdict,
    dead_letters_explained,
    lineage,
    nothing_left,
    one_outcome,
    streams_decode,
    trained_once,
    versions_existed,
    versions_rise,
)
from trinity_mq.proof.record import ProcessedSet, Record, VersionSeen

BATCHES, TASKS, RUNS = 4, 3, 2
EXPECTED = Expected(tasks=TASKS)
Tamper = Callable[[Record], object]


def result(batch: int, task: int, attempt: str = "first", runs: range | list[int] = range(RUNS)) -> TaskResult:
    return TaskResult(
        batch=batch,
        ticket=f"t{batch}",
        task_id=task,
        repeat_times=RUNS,
        attempt=attempt,
        outcome="finished",
        runs=list(runs),
        parts=1,
    )


def processed(batch: int, version: Version, *, first: bool = True, op: str = "op") -> ProcessedSet:
    runs = tuple((str(batch), str(task), run, 0) for task in range(TASKS) for run in range(RUNS))
    ready = BatchReady(batch=batch, ticket=f"t{batch}", op=op, chunks=1, experiences=len(runs))
    uids = tuple(f"{one}/{task}/{run}/{step}/{op}" for one, task, run, step in runs)
    return ProcessedSet(ready, batch, first, uids, runs, frozenset({version}))


def progress(number: int, generation: int, *, step: int | None = None, batch: int | None = None) -> Progress:
    found = batch or number
    return Progress(
        progress=number, generation=generation, step=step or number, batch=found, ticket=f"t{found}", outcome="trained"
    )


@pytest.fixture
def record() -> Record:
    """Four batches; the trainer was killed after the third and went on from a checkpoint at the first."""
    return Record(
        results=[result(batch, task) for batch in range(1, BATCHES + 1) for task in range(TASKS)],
        sets=[processed(batch, (1 if batch < 4 else 2, batch - 1)) for batch in range(1, BATCHES + 1)],
        progress=[*(progress(number, 1) for number in (1, 2, 3)), *(progress(number, 2) for number in (2, 3, 4))],
    )


def test_what_a_later_generation_did_anew_counts_once(record: Record) -> None:
    assert [(one.generation, one.progress) for one in lineage(record.progress)] == [(1, 1), (2, 2), (2, 3), (2, 4)]
    repeated = [*record.progress, record.progress[-1]]
    assert lineage(repeated) == lineage(record.progress)


def test_a_sound_record_holds(record: Record) -> None:
    verdicts = [
        one_outcome(record, EXPECTED),
        trained_once(record),
        versions_rise(record, [], [], []),
        versions_existed(record),
        streams_decode(record),
    ]
    assert [verdict.result for verdict in verdicts] == ["holds"] * 5, verdicts
    assert verdicts[0].text == "12 tasks in 4 batches, 24 experiences"
    assert verdicts[1].text == "24 experiences in 4 batches, over 2 starts of the trainer"


def test_a_second_attempt_and_a_second_processing_are_no_second_outcome(record: Record) -> None:
    record.results.append(result(2, 1, "second"))
    record.sets.append(processed(2, (1, 1), first=False, op="again"))
    assert one_outcome(record, EXPECTED).result == "holds"
    assert trained_once(record).result == "holds"


def _set(record: Record, place: int, **change: object) -> None:
    record.sets[place] = replace(record.sets[place], **change)  # type: ignore[arg-type]


def _result(record: Record, place: int, **change: object) -> None:
    record.results[place] = record.results[place].model_copy(update=change)


def _progress(record: Record, place: int, **change: object) -> None:
    record.progress[place] = record.progress[place].model_copy(update=change)


def violated(verdict: InvariantVerdict, said: str) -> None:
    assert verdict.result == "violated", verdict
    assert any(said in line for line in verdict.evidence), verdict


OVERLAPPING = result(2, 1).model_copy(update={"run_base": 1, "runs": [1], "repeat_times": 1})
OUTCOMES: dict[str, tuple[Tamper, str]] = {
    "a lost run": (
        lambda record: _set(record, 1, runs=record.sets[1].runs[:-1], uids=record.sets[1].uids[:-1]),
        "batch 2: finished runs (task, run) that are not in it: ('2', 1)",
    ),
    "an unreported run": (
        lambda record: _set(record, 1, runs=(*record.sets[1].runs, ("2", "9", 0, 0))),
        "no first result reports them: ('9', 0)",
    ),
    "a task without a result": (lambda record: record.results.pop(4), "batch 2: 2 tasks have an outcome, wanted 3"),
    "overlapping slices": (
        lambda record: record.results.append(OVERLAPPING),
        "runs (task, run) that two slices report: ('1', 1)",
    ),
    "a result with too few runs": (
        lambda record: _result(record, 0, runs=[0]),
        "batch 1, task 0 from run 0: finished with 1 runs",
    ),
}
TRAINED: dict[str, tuple[Tamper, str]] = {
    "a batch twice": (lambda record: record.progress.append(progress(5, 2, batch=3)), "ticket t3 was consumed 2 times"),
    "an experience twice": (
        lambda record: _set(record, 3, uids=(*record.sets[3].uids, record.sets[0].uids[0])),
        "experience 1/0/0/0/op is in 2 places",
    ),
    "a run twice": (
        lambda record: _set(record, 2, runs=(*record.sets[2].runs, record.sets[2].runs[0])),
        "batch 3: task 0, run 0, step 0 is in it 2 times",
    ),
    "no set": (lambda record: record.sets.pop(2), "batch 3 was trained on, and no complete set of it"),
    "a gap": (lambda record: record.progress.pop(4), "progress without a message of the trainer: 3"),
    "a batch passed over": (lambda record: _progress(record, 5, batch=5, ticket="t5"), "batches that were skipped: 4"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_outcome_that_is_missing_or_double_is_found(record: Record, name: str) -> None:
    tamper, said = OUTCOMES[name]
    tamper(record)
    violated(one_outcome(record, EXPECTED), said)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained_on_twice_or_not_at_all_is_found(record: Record, name: str) -> None:
    tamper, said = TRAINED[name]
    tamper(record)
    violated(trained_once(record), said)


def seen(*versions: Version, who: str = "trainer-0") -> list[VersionSeen]:
    return [VersionSeen(float(at), who, version) for at, version in enumerate(versions)]


def test_a_version_that_goes_back_is_found(record: Record) -> None:
    rising = seen((1, 1), (1, 1), (1, 3), (2, 1))
    assert versions_rise(record, rising, rising, rising).result == "holds"
    falling = seen((1, 1), (1, 3), (1, 2))
    violated(versions_rise(record, falling, [], []), "committed: 1.3 was followed by 1.2")
    violated(versions_rise(record, [], falling, []), "in the trainer's heartbeats")
    violated(versions_rise(record, [], [], seen((2, 1), (1, 9), who="engine-0 a/0")), "engine engine-0 serves")
    fresh_engine = [*seen((2, 1), who="engine-0 a/0"), *seen((1, 9), who="engine-0 a/1")]
    assert versions_rise(record, [], [], fresh_engine).result == "holds", "another life begins anew"
    record.progress.append(progress(4, 1))
    violated(versions_rise(record, [], [], []), "progress 4 of generation 1 was published after 4 of 2")


@pytest.mark.parametrize("version", [(1, 7), (3, 5), (2, 9)])
def test_a_version_that_no_trainer_had_is_found(record: Record, version: Version) -> None:
    _set(record, 3, versions=frozenset({(2, 3), version}))
    violated(versions_existed(record), f"batch 4 names version {version[0]}.{version[1]}, which no trainer had")


def letter(kind: str, deliveries: int, reason: str = "poisoned") -> Incoming:
    headers = {"kind": kind, "dead-reason": reason, "dead-deliveries": deliveries}
    return Incoming(body=b"", exchange="", routing_key="", queue="dead", message_id="m", headers=headers)


def test_dead_letters_are_explained_by_faults_or_named() -> None:
    many, few = FaultCounts({"runner": 4, "broker": 1, "trainer": 2}), FaultCounts({"runner": 3, "trainer": 1})
    assert dead_letters_explained([], 0, few, 5).text == "there is none"
    assert dead_letters_explained([letter("task_slice", 5), letter("batch_ready", 0)], 2, many, 5).result == "holds"
    violated(dead_letters_explained([letter("task_slice", 5)], 1, few, 5), "task_slice m: poisoned")
    violated(dead_letters_explained([letter("task_slice", 1)], 1, many, 5), "task_slice m")
    violated(dead_letters_explained([letter("batch_ready", 0)], 1, few, 5), "batch_ready m")
    violated(dead_letters_explained([letter("task_result", 0, "does not decode")], 1, many, 5), "does not decode")
    assert dead_letters_explained([], 3, many, 5).result == "not checked"


def test_what_is_left_and_what_cannot_be_read_is_found(record: Record) -> None:
    assert nothing_left([], over=True).result == "holds"
    violated(nothing_left(["process 7: python"], over=True), "process 7")
    assert nothing_left(None, over=False).result == "not checked"
    record.undecodable.append("offset 3: torn")
    violated(streams_decode(record), "offset 3: torn")


def test_what_retention_has_cut_is_not_called_lost(record: Record) -> None:
    record.results_begin = record.ready_begin = 100
    del record.sets[0], record.progress[0]
    assert one_outcome(record, EXPECTED).result == "not checked"
    assert versions_existed(record).result == "not checked"
    assert trained_once(record).result == "holds"

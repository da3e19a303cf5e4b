"""Audits a checkpoint with the run's folder and the ``ready`` stream: each experience must be trained on once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trinity_agents.trainer.decisions import NONE_SETTLED
from trinity_agents.trainer.history import Lineage, trace
from trinity_mq.errors import excerpt
from trinity_mq.proof.invariants import Entry, each_trained_once, set_faults, tickets_decided_once
from trinity_mq.proof.record import Record
from trinity_mq.training.checkpoints.checkpoint import Checkpoint, DamagedCheckpointError, verify

Result = Literal["holds", "fault", "not checked"]
MODEL_FOLDER, FINAL_FOLDER = "model", "final"


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    result: Result
    text: str
    """The finding; for a fault the actual and the expected value."""


class Auditor:
    """Checks one checkpoint.

    Args:
        folder: The run's folder.
        checkpoint: The checkpoint to check.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        self.checkpoint, self._folder = checkpoint, folder
        state = checkpoint.state
        self._line: Lineage = trace(folder / "history", state.generation, state.progress)
        self.checks: list[Check] = []

    @property
    def entries(self) -> Sequence[Entry]:
        """The history of the checkpoint, in order."""
        return self._line.entries

    @property
    def uids(self) -> list[str]:
        """Uids of the experiences that the checkpoint was trained on, in order, without replayed experiences."""
        return [uid for entry in self.entries for uid in entry.get("uids", ())]

    @property
    def has_faults(self) -> bool:
        """Whether a check found a fault."""
        return any(check.result == "fault" for check in self.checks)

    def check_folder(self, run_id: str | None = None) -> None:
        """Run all checks that need only the run's folder.

        Args:
            run_id: Id of the run in the explorer's state. None: the run ids are not compared.
        """
        self._add("files", self._files)
        self._add("progress", self._progress)
        self._add("tickets", self._tickets)
        self._add("experiences", self._experiences)
        self._add("steps", self._steps)
        self._add("checkpoint", lambda: self._state(run_id))
        self._add("sets", self._sets)
        self._add("final model", self._final)

    def check_stream(self, record: Record) -> None:
        """Compare the history with the sets that operators published, as far as the stream still holds these sets.
        ``record`` has the content of the stream.
        """
        self._add("stream", lambda: self._stream(record))

    def leave_out(self, name: str, why: str) -> None:
        """Record that a check was not done, with the reason ``why``."""
        self.checks.append(Check(name, "not checked", why))

    def _add(self, name: str, check: Callable[[], Iterator[Check | str]]) -> None:
        """Run a check, which yields each fault as a string and its conclusions as :class:`Check`.

        The conclusions count only if there is no fault. An error that a damaged history or state causes is a fault.
        """
        try:
            findings = list(check())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            findings = [f"a line of the history, or the checkpoint's state, is not what was written: {error!r}"]
        faults = [finding for finding in findings if isinstance(finding, str)]
        self.checks += [Check(name, "fault", fault) for fault in faults]
        self.checks += [] if faults else [finding for finding in findings if isinstance(finding, Check)]

    def _files(self) -> Iterator[Check | str]:
        count = len(self.checkpoint.checksums)
        if not count:
            yield Check("files", "not checked", "the checkpoint holds no checksums: an older release wrote it")
            return
        try:
            verify(self.checkpoint)
        except DamagedCheckpointError as error:
            yield str(error)
        yield Check("files", "holds", f"{count} files have the checksums that were written")

    def _progress(self) -> Iterator[Check | str]:
        yield from self._line.faults
        spans = "; ".join(f"{first} to {last} by generation {number}" for number, first, last in self._line.spans)
        yield Check("progress", "holds", f"every batch is in the history, in order, without a gap: {spans}")

    def _tickets(self) -> Iterator[Check | str]:
        yield from tickets_decided_once(self.entries)
        repaired = sum(bool(entry.get("repaired")) for entry in self.entries)
        more = f", {repaired} of them again after a repair" if repaired else ""
        yield Check("tickets", "holds", f"{len(self.entries) - repaired} tickets, each decided once{more}")

    def _experiences(self) -> Iterator[Check | str]:
        yield from each_trained_once(self.entries)
        yield Check("experiences", "holds", f"{len(self.uids)} experiences, each trained on once, in its own batch")

    def _steps(self) -> Iterator[Check | str]:
        before = 0
        for entry in self.entries:
            if not before <= entry["step"] <= before + 1:
                yield (
                    f"progress {entry['progress']} is of step {entry['step']}, and the progress before it of step "
                    f"{before}"
                )
            before = entry["step"]
        if before != self.checkpoint.state.step:
            yield f"the history ends with step {before}, and the checkpoint has {self.checkpoint.state.step}"
        yield Check("steps", "holds", f"{before} train steps, counted by one")

    def _state(self, run_id: str | None) -> Iterator[Check | str]:
        state = self.checkpoint.state
        is_tap = "tap" in state.source
        source = state.source["stream"] if is_tap else state.source
        if "selector" in source:
            yield Check("checkpoint", "not checked", "it was trained on records: it keeps only their position")
            return
        if not source and not state.progress:  # a tap saved it before it reached the other run's broker
            source = {"consumed": (), "batches": 0}
        decided = {entry["ticket"] for entry in self.entries}
        consumed = set(source["consumed"]) | set(source.get("failed", ()))
        # A run that taps another run also consumed the tickets before its first batch, without training on them.
        if missing := [] if is_tap else sorted(consumed - decided):
            yield f"the checkpoint has consumed these tickets, and its history does not list them: {excerpt(missing)}"
        settled = source.get("settled", NONE_SETTLED)  # the checkpoint lists no tickets of batches up to this number
        recent = {entry["ticket"] for entry in self.entries if int(entry["batch"]) > settled}
        if foreign := sorted(recent - consumed):
            yield f"the history lists these tickets, and the checkpoint has not consumed them: {excerpt(foreign)}"
        batches = Counter(int(entry["batch"]) for entry in self.entries if not entry.get("repaired"))
        expected = {*range(1, source["batches"] + 1), *source.get("ahead", ())}
        if different := sorted((batches.keys() ^ expected) | {batch for batch, count in batches.items() if count > 1}):
            yield f"the checkpoint and its history differ in batches: {excerpt(different)}"
        if run_id and state.run_id and run_id != state.run_id:
            yield f"the checkpoint is of run {state.run_id}, and the explorer's state of run {run_id}"
        whose = f" of run {state.run_id}" if state.run_id else ""
        yield Check("checkpoint", "holds", f"its own list of tickets and batches{whose} equals the list of the history")

    def _sets(self) -> Iterator[Check | str]:
        places = [(entry, entry["stream"]) for entry in self.entries if "stream" in entry]
        offsets = Counter(offset for _, place in places for offset in (place["offset"], *place["chunks"]))
        if double := sorted(offset for offset, count in offsets.items() if count > 1):
            yield f"messages of the stream that were used more than once, by offset: {excerpt(double)}"
        for entry, place in places:
            if any(chunk >= place["offset"] for chunk in place["chunks"]):
                yield f"progress {entry['progress']} used a chunk that comes after its BatchReady"
            counted = len(entry["uids"]) + entry.get("dropped", 0)
            if entry["outcome"] == "trained" and counted != place["experiences"]:
                yield (
                    f"progress {entry['progress']} has {len(entry['uids'])} experiences and {entry.get('dropped', 0)} "
                    f"dropped ones, and its operator announced {place['experiences']}"
                )
        if lacking := len(self.entries) - len(places):
            text = (
                f"{lacking} of {len(self.entries)} lines do not record the position of their set: an older release "
                "wrote them"
            )
            yield Check("sets", "not checked", text)
        if places:
            text = (
                f"{len(places)} sets, each as large as its operator announced; {len(offsets)} messages, each used once"
            )
            yield Check("sets", "holds", text)

    def _final(self) -> Iterator[Check | str]:
        final, prefix = self._folder / FINAL_FOLDER, f"{MODEL_FOLDER}/"
        names = [
            name for name in self.checkpoint.checksums if name.startswith(prefix) and name.endswith(".safetensors")
        ]
        weights = {name.removeprefix(prefix): self.checkpoint.checksums[name] for name in names}
        with contextlib.suppress(DamagedCheckpointError):  # final/ belongs to another checkpoint, or was not written
            if weights:
                verify(Checkpoint(final, self.checkpoint.state, checksums=weights))
                yield Check("final model", "holds", "final/ holds the weights of this checkpoint")

    def _stream(self, record: Record) -> Iterator[Check | str]:
        sets = record.by_processing
        cut = compared = unread = 0
        for entry in self.entries:
            place = entry.get("stream")
            first = None if place is None else min([place["offset"], *place["chunks"]])
            if first is not None and first < record.ready_begin:
                cut += 1
                continue
            actual = sets.get((entry["ticket"], entry["op"]))
            if actual is None and first is None:
                cut += 1  # the offset of the set is unknown
                continue
            yield from set_faults(entry, actual)
            if actual is not None:
                compared += 1
                unread += bool(actual.unread)
        if cut:
            yield Check("stream", "not checked", f"the stream does not hold the sets of {cut} batches any more")
        if unread:
            yield Check("stream", "not checked", f"the chunks of {unread} sets cannot be read")
        if compared - unread:
            text = f"{compared - unread} batches hold only experiences of the set that decides their ticket"
            yield Check("stream", "holds", text)


def verdict(audits: Iterable[Auditor]) -> str:
    """Return a one-line summary of all checks."""
    all_audits = list(audits)
    faults = sum(check.result == "fault" for audit in all_audits for check in audit.checks)
    unchecked = sum(check.result == "not checked" for audit in all_audits for check in audit.checks)
    if faults:
        return f"{faults} fault{'s' if faults > 1 else ''} found"
    return "proven" if not unchecked else f"no fault found; {unchecked} thing{'s' if unchecked > 1 else ''} not checked"


def as_json(audit: Auditor) -> Mapping[str, Any]:
    """Return an audit as a mapping for JSON."""
    state = audit.checkpoint.state
    return {
        "checkpoint": audit.checkpoint.path.name,
        "generation": state.generation,
        "step": state.step,
        "progress": state.progress,
        "weights": audit.checkpoint.weights,
        "experiences": len(audit.uids),
        "faults": audit.has_faults,
        "checks": [{"name": check.name, "result": check.result, "text": check.text} for check in audit.checks],
    }

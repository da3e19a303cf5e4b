"""Recorded ratios of the benchmarks, and the comparison of new ones with them: what run_recorded.py decides and shows.

Ratios compare between machines where seconds do not: both sides of one ran on the same machine, in turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

FALL = 0.2
"""Share by which a ratio may fall against the recorded one."""
NOISE = 0.1
"""A fixed loop whose speed changes by more than this share from before a benchmark until after it tells of others."""
BUSY = 10.0
"""Percent of the processor that others use, before a benchmark, from which on the machine counts as busy."""
FILE = Path(__file__).with_name("recorded.json")
BEGIN, END = (
    "<!-- recorded ratios: scripts/benchmarks --record writes this table -->",
    "<!-- end of recorded ratios -->",
)


class Strict(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(extra="forbid")


class Machine(Strict):
    """The state of the machine of a measurement. Figures of an older record may not be known."""

    processor: str
    cores: int = Field(gt=0)
    rabbitmq: str
    """Release."""
    python: str
    """Release."""
    busy: float | None = None
    """Percent of the processor that others used in the seconds before the benchmark."""
    calibration: tuple[float, float] | None = None
    """Speed of a fixed loop on all cores, before and after the benchmark: MB of SHA-256 a second."""

    def noise(self) -> str:
        """Return what may have disturbed the measurement; empty where nothing is known to have."""
        found = []
        if self.calibration and abs(self.calibration[1] / self.calibration[0] - 1) > NOISE:
            found.append(f"a fixed loop made {self.calibration[0]:.0f} MB/s before, {self.calibration[1]:.0f} after")
        if self.busy is not None and self.busy > BUSY:
            found.append(f"others used {self.busy:.0f} % of the processor before it")
        return "; ".join(found)


class Ratio(Strict):
    """A ratio of a benchmark, by the name that it has in the benchmark's ``--json`` file."""

    better: Literal["more", "less"] = "more"
    value: float | None = Field(None, gt=0)
    """None: not recorded yet, so shown and not judged."""
    needs: str = ""
    """Python module without which the benchmark leaves this ratio out."""


class Benchmark(Strict):
    """A benchmark, and what was recorded of it."""

    command: list[str] = Field(min_length=1)
    """Script in benchmarks/ and arguments."""
    needs: str = ""
    """File, relative to the checkout, without which it cannot run; scripts/benchmarks makes it."""
    ratios: dict[str, Ratio] = Field(min_length=1)
    date: str = ""
    machine: Machine | None = None
    """Machine on which the recorded values were measured; the date is theirs too."""


Recorded = dict[str, Benchmark]
Verdict = Literal["held", "FELL", "MISSING", "not recorded", "left out"]
_ADAPTER: TypeAdapter[Recorded] = TypeAdapter(Recorded)


def load(path: Path = FILE) -> Recorded:
    """Return what is recorded.

    Raises:
        pydantic.ValidationError: The file does not fit; the message says where.
    """
    return _ADAPTER.validate_json(path.read_bytes())


def dump(recorded: Recorded) -> str:
    """Return the text of the file."""
    return _ADAPTER.dump_json(recorded, indent=1, exclude_defaults=True).decode() + "\n"


@dataclass(frozen=True)
class Row:
    """A ratio beside the recorded one."""

    benchmark: str
    name: str
    recorded: float | None
    seen: float | None
    verdict: Verdict

    @property
    def failed(self) -> bool:
        """Whether it fails the comparison."""
        return self.verdict in ("FELL", "MISSING")

    def problem(self) -> str:
        """Return one sentence on a row that failed."""
        if self.seen is None:
            return f"{self.benchmark}, {self.name}: in recorded.json, but the benchmark wrote no such ratio"
        return (
            f"{self.benchmark}, {self.name}: recorded {self.recorded:.3g}, seen {self.seen:.3g}; "
            f"it may fall by {FALL:.0%} at most"
        )


def fall(ratio: Ratio, seen: float) -> float:
    """Return the share by which a ratio fell against the recorded one, below 0 where it rose.

    Of a ratio that is better the less it is, the inverse counts: 1.25 after 1.0 fell by a fifth.
    """
    assert ratio.value is not None
    return 1 - (seen / ratio.value if ratio.better == "more" else ratio.value / seen)


def compare(name: str, benchmark: Benchmark, found: Mapping[str, float], absent: Iterable[str] = ()) -> list[Row]:
    """Compare what a benchmark found with what is recorded.

    Args:
        name: Of the benchmark.
        benchmark: What is recorded of it.
        found: Its ratios; those that nobody records do not count.
        absent: Python modules that are not installed.
    """
    left_out = set(absent)
    rows = []
    for key, ratio in benchmark.ratios.items():
        seen = found.get(key)
        verdict: Verdict
        if seen is None:
            verdict = "left out" if ratio.needs in left_out else "MISSING"
        elif ratio.value is None:
            verdict = "not recorded"
        else:
            verdict = "FELL" if fall(ratio, seen) > FALL else "held"
        rows.append(Row(name, key, ratio.value, seen, verdict))
    return rows


def with_new_values(benchmark: Benchmark, found: Mapping[str, float], date: str, machine: Machine) -> Benchmark:
    """Return a benchmark with new values recorded; ratios that were left out keep theirs."""
    ratios = {
        key: ratio.model_copy(update={"value": found[key]}) if key in found else ratio
        for key, ratio in benchmark.ratios.items()
    }
    return benchmark.model_copy(update={"ratios": ratios, "date": date, "machine": machine})


def table(rows: Sequence[Row], machines: Mapping[str, Machine]) -> str:
    """Return a text table: each ratio beside the recorded one, and the state of the machine by benchmark."""
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for name in dict.fromkeys(row.benchmark for row in rows):
        lines.append(f"{name}: {state(machines[name])}" if name in machines else name)
        for row in rows:
            if row.benchmark == name:
                before, now = (
                    f"{value:9.3f}" if value is not None else f"{'':9}" for value in (row.recorded, row.seen)
                )
                lines.append(f"  {row.name:{width}} recorded {before}  seen {now}  {row.verdict}")
    return "\n".join(lines)


def state(machine: Machine) -> str:
    """Return the state of a machine as one line, what disturbed it included."""
    parts = [f"{machine.cores} cores, {machine.processor}, RabbitMQ {machine.rabbitmq}, Python {machine.python}"]
    if machine.busy is not None:
        parts.append(f"{machine.busy:.0f} % busy before")
    if machine.calibration:
        parts.append(f"fixed loop {machine.calibration[0]:.0f}, {machine.calibration[1]:.0f} MB/s")
    if noise := machine.noise():
        parts.append(f"NOISY ({noise})")
    return ", ".join(parts)


def markdown(recorded: Recorded) -> str:
    """Return the table of docs/performance.md between its two markers."""
    lines = [BEGIN, "", "| benchmark | ratio | recorded | better | on | with |", "|---|---|---|---|---|---|"]
    for name, benchmark in recorded.items():
        for key, ratio in benchmark.ratios.items():
            if ratio.value is not None:
                where = benchmark.machine
                beside = state(where) if where else ""
                lines.append(f"| `{name}` | {key} | {ratio.value:.3g} | {ratio.better} | {benchmark.date} | {beside} |")
    return "\n".join([*lines, "", END])


def in_document(text: str, recorded: Recorded) -> str:
    """Return a document with the table between its markers written anew.

    Raises:
        ValueError: A marker is not there once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"wanted the lines {BEGIN!r} and {END!r} once each")
    before, _, rest = text.partition(BEGIN)
    return before + markdown(recorded) + rest.partition(END)[2]

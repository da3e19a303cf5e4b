"""The schedule of faults: drawn from a seed, written to a file, or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trinity_mq.errors import CommandError
from trinity_mq.proof.chaos.points import INSIDE, POINTS, inside_points_for, points_for
from trinity_mq.runtime.process import write_atomic

KINDS: Mapping[str, str] = {
    "kill": "SIGKILL, as a crash or the kernel's OOM killer ends a process",
    "freeze": "SIGSTOP, and SIGCONT some seconds later: a long pause of the process, its connections stay open",
    "cut": "its connections to the broker are reset; for the broker: all connections are reset, and new connections "
    "are refused for some seconds",
    "restart": "SIGTERM and a new start, as a deployment does it",
}
ROLES = ("explorer", "runner", "operator", "trainer", "engine", "broker", "gateway")
WEIGHTS: Mapping[str, int] = {"kill": 5, "freeze": 2, "cut": 2, "restart": 1}
"""Relative frequency of each kind of fault."""
BROKER_SHARE = 0.4
"""Relative frequency of the broker as a victim; every other role has 1. It is lower because each fault of the broker
delays all agents."""
MARKED_SHARE = 0.6
"""Share of the faults that wait for a marked point."""
TOGETHER_SHARE = 0.2
"""Share of the faults that do not wait for the recovery from the previous fault."""
SHORT, LONG = (0.5, 4.0), (12.0, 25.0)
"""Seconds for which a process is frozen or a broker refuses connections: shorter and longer than the timeouts of its
peers."""
LONG_SHARE = 0.15
MOST_OCCURRENCES = 3
ENDS = ("kill", "restart")
"""Kinds of faults after which a new process replaces the victim."""
AGENT_BACK = "agent_back"
"""The point at which the agent that the previous fault ended is back. It is passed once, after that fault."""
RARE = (AGENT_BACK, "evaluating")
"""Points for which only the first occurrence is used."""
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule."""

    number: int
    wait: float
    """Seconds from the recovery from all earlier faults to this fault or to the wait for its point. With ``together``,
    seconds from the previous fault itself.
    """
    role: str
    kind: str
    pick: float
    """Selects the victim among the living processes of its role, sorted by name, as a fraction from 0 to 1."""
    point: str | None = None
    """The marked point of the fault; None: right after ``wait``."""
    occurrence: int = 1
    """Occurrence of the point after ``wait`` that triggers the fault, counted from 1."""
    seconds: float = 0.0
    """Seconds that a freeze or a cut lasts."""
    together: bool = False
    """True if the fault does not wait for the recovery from the previous fault."""


@dataclass(frozen=True)
class ChaosSchedule:
    """Faults in order, with the arguments that they were drawn from."""

    faults: Sequence[Fault]
    seed: int | None = None
    drawn_from: Mapping[str, Any] = field(default_factory=dict)


def draw(
    seed: int, count: int, possible: Mapping[str, Sequence[str]], every: float, inside: float = 0.0
) -> ChaosSchedule:
    """Return the schedule of a seed. Equal arguments give equal schedules on every machine.

    Args:
        seed: Any number.
        count: Number of faults.
        possible: By role, the possible kinds of faults.
        every: Mean seconds from the recovery from one fault to the next fault.
        inside: Share of the faults at a point inside an agent, for roles with such points.

    Raises:
        ValueError: No fault is possible.
    """
    roles = [role for role in ROLES if possible.get(role)]
    if not roles:
        raise ValueError("no fault is possible for any of the roles")
    dice = random.Random(f"trinity-mq chaos {FORMAT} {seed}")
    faults: list[Fault] = []
    for number in range(1, count + 1):
        ended = bool(faults) and faults[-1].kind in ENDS and faults[-1].role in POINTS[AGENT_BACK].roles
        faults.append(_draw_fault(dice, number, roles, possible, every, ended=ended))
    drawn_from = {"count": count, "every": every, "possible": {role: list(possible[role]) for role in roles}}
    if inside:
        return ChaosSchedule(_with_inside_points(faults, seed, inside), seed, {**drawn_from, "inside": inside})
    return ChaosSchedule(faults, seed, drawn_from)


def _with_inside_points(faults: Sequence[Fault], seed: int, share: float) -> list[Fault]:
    """Return the faults, with the share ``share`` of them moved to points inside agents. All inside points of a role
    are used before a point is repeated. Faults of roles without such points, and at the return of an agent, stay.
    """
    # a separate generator, so that the other values stay the same
    dice = random.Random(f"trinity-mq chaos {FORMAT} {seed} inside")
    unused: dict[str, list[str]] = {}
    moved: list[Fault] = []
    for fault in faults:
        chance, occurrence = dice.random(), dice.randint(1, MOST_OCCURRENCES)
        names = inside_points_for(fault.role)
        if not names or chance >= share or fault.point == AGENT_BACK:
            moved.append(fault)
            continue
        waiting = unused.setdefault(fault.role, [])
        if not waiting:
            waiting += dice.sample(names, len(names))
        moved.append(replace(fault, point=waiting.pop(), occurrence=occurrence))
    return moved


def _draw_fault(
    dice: random.Random,
    number: int,
    roles: Sequence[str],
    possible: Mapping[str, Sequence[str]],
    every: float,
    *,
    ended: bool,
) -> Fault:
    """Draw one fault; ``ended``: the previous fault ends a process, so its return is a possible point."""
    role = dice.choices(roles, [BROKER_SHARE if role == "broker" else 1.0 for role in roles])[0]
    kinds = [kind for kind in KINDS if kind in possible[role]]
    kind = dice.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
    # Draw every number for each fault, so that a change of one fault does not change the following faults.
    wait, pick, share, length = (dice.random() for _ in range(4))
    point, occurrence, together = dice.choice(points_for(role)), dice.randint(1, MOST_OCCURRENCES), dice.random()
    low, high = LONG if dice.random() < LONG_SHARE else SHORT
    is_return = point == AGENT_BACK
    is_marked = share < MARKED_SHARE and (ended or not is_return)
    is_return = is_return and is_marked
    return Fault(
        number=number,
        wait=0.0 if is_return else round(2 * every * wait, 3),
        role=role,
        kind=kind,
        pick=round(pick, 6),
        point=point if is_marked else None,
        occurrence=occurrence if is_marked and point not in RARE else 1,
        seconds=round(low + (high - low) * length, 3) if kind in {"freeze", "cut"} else 0.0,
        together=is_return or (number > 1 and together < TOGETHER_SHARE),
    )


def save(schedule: ChaosSchedule, path: Path) -> None:
    """Write a schedule as JSON, with one line for each fault.

    Raises:
        OSError: The file cannot be written.
    """
    head = {"format": FORMAT, "seed": schedule.seed, "drawn_from": schedule.drawn_from}
    lines = ",\n".join(f"  {json.dumps(asdict(fault))}" for fault in schedule.faults)
    text = json.dumps(head)[:-1] + f', "faults": [\n{lines}\n]}}\n'
    write_atomic(path, text.encode())


def load(path: Path) -> ChaosSchedule:
    """Read a schedule that :func:`save` or a person wrote.

    Raises:
        CommandError: The file is not readable or not valid; the message names the place and the expected value.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, wanted {FORMAT}")
        faults = [Fault(**line) for line in data["faults"]]
    except OSError as error:
        raise CommandError(f"schedule {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommandError(f"{path} is not a valid schedule: {error}; `trinity-mq chaos` writes one") from error
    for fault in faults:
        _check(fault, path)
    return ChaosSchedule(faults, data.get("seed"), data.get("drawn_from") or {})


def _check(fault: Fault, path: Path) -> None:
    wrong: list[str] = []
    if fault.role not in ROLES:
        wrong.append(f"role is {fault.role!r}, wanted one of {', '.join(ROLES)}")
    if fault.kind not in (*KINDS,):
        wrong.append(f"kind is {fault.kind!r}, wanted one of {', '.join(KINDS)}")
    if fault.point is not None and fault.point not in (*POINTS, *INSIDE):
        wrong.append(f"point is {fault.point!r}, wanted null or one of {', '.join((*POINTS, *INSIDE))}")
    inside = INSIDE.get(fault.point) if isinstance(fault.point, str) else None
    if inside is not None and inside.role != fault.role:
        wrong.append(f"point is {fault.point!r}, which only a {inside.role} passes, not a {fault.role}")
    numbers = {name: getattr(fault, name) for name in ("pick", "wait", "seconds", "occurrence")}
    others = {name: value for name, value in numbers.items() if not isinstance(value, int | float)}
    wrong += [f"{name} is {value!r}, wanted a number" for name, value in others.items()]
    if isinstance(occurrence := numbers["occurrence"], float):
        wrong.append(f"occurrence is {occurrence!r}, wanted a whole number")
    if not others and not (0 <= fault.pick <= 1 and fault.wait >= 0 and fault.seconds >= 0 and fault.occurrence >= 1):
        wrong.append("pick must be from 0 to 1, wait and seconds at least 0, occurrence at least 1")
    if wrong:
        raise CommandError(f"{path}, fault {fault.number}: {'; '.join(wrong)}")

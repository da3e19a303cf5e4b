"""A gateway's sessions: reading their stream at the start, and looking at those that wait.

    python benchmarks/bench_sessions.py [--quick] [--check] [--json FILE]

Reading: events of calls with 2500 tokens go through the ledger, against ``msgpack.unpackb`` of the same bodies, which
nobody can do without. Looking: a pass over sessions that wait for a batch while one changes, against a look at each of
them. The sides take turns in one process. ``--check`` exits with 1 where reading takes more than READING_TARGET times
as long as unpacking, or a pass more than PASS_TARGET of a look at all.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import msgpack

import figures
from trinity_mq.gateway.ledger import Agenda, Ledger
from trinity_mq.gateway.session import Event
from trinity_mq.messages import SampledChoice, SessionCall, SessionEnd, SessionOpened, decode, encode

READING_TARGET = 6.0
PASS_TARGET = 0.05


def calls(number: int) -> list[bytes]:
    """Return the bodies of some calls, ten a session."""
    draw = random.Random(0)
    bodies = []
    for index in range(number):
        choice = SampledChoice(
            ids=[draw.randrange(150_000) for _ in range(1000)],
            logprobs=[-draw.random() for _ in range(1000)],
            text="answer " * 600,
            finish_reason="stop",
        )
        prompt = [draw.randrange(150_000) for _ in range(1500)]
        made = SessionCall(session=f"s{index // 10}", call=f"c{index}", at=1.0, prompt=prompt, choices=[choice])
        bodies.append(encode(made))
    return bodies


def opened(session: str) -> SessionOpened:
    return SessionOpened(session=session, opened=1.0, idle_ttl=3600.0, reward_ttl=86_400.0)


def read(bodies: list[bytes]) -> None:
    ledger = Ledger()
    for index in range(len(bodies) // 10 + 1):
        ledger.apply(Event(index, 0, f"opened-s{index}", 1.0, opened(f"s{index}"), 100))
    for offset, body in enumerate(bodies, 10**6):
        ledger.apply(Event(offset, 0, f"call-{offset}", 1.0, decode(body, SessionCall), len(body)))


def waiting(number: int) -> Ledger:
    """Return a ledger of sessions that are queued."""
    ledger, offset = Ledger(), 0
    for index in range(number):
        call = SessionCall(session=f"s{index}", call="c", at=1.0, choices=[SampledChoice(ids=[1], logprobs=[0.0])])
        for body in (opened(f"s{index}"), call, SessionEnd(session=f"s{index}", reward=1.0)):
            offset += 1
            ledger.apply(Event(offset, 0, f"m{offset}", 1.0, body, 100))
    for decision in ledger.due(2.0):
        offset += 1
        ledger.apply(Event(offset, 0, f"m{offset}", 2.0, decision, 100))
    return ledger


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the processor seconds of one turn, the median of some."""
    found = []
    for _ in range(times):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return statistics.median(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little of everything: does it still run?")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    figures.add_option(parser)
    options = parser.parse_args()
    bodies = calls(50 if options.quick else 1000)
    size = sum(map(len, bodies)) / 2**20
    reading, unpacking = seconds(lambda: read(bodies), 3), seconds(lambda: [msgpack.unpackb(one) for one in bodies], 3)
    number = 500 if options.quick else 16_384
    ledger, numbers = waiting(number), iter(range(10**6, 2 * 10**6))

    def look() -> None:
        offset = next(numbers)
        ledger.apply(Event(offset, 0, f"m{offset}", 3.0, opened(f"new{offset}"), 100))
        ledger.due(3.0)
        ledger.take_new_tasks()

    def look_at_all() -> None:
        agenda = Agenda(ledger.live)
        for session in ledger.live.values():
            agenda.touch(session)
        agenda.due(3.0)
        ledger.queued()

    changed = seconds(look, 50)
    everything = seconds(look_at_all, 5)
    ratios = {"reading of unpacking": reading / unpacking, "a pass of a look at all": changed / everything}
    print(f"reading {size:.0f} MiB of calls: {reading:.2f} s, {size / reading:.0f} MiB/s; unpacking {unpacking:.2f} s")
    print(f"a pass over {number} waiting sessions: {changed * 1e3:.3f} ms, a look at all {everything * 1e3:.1f} ms")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.4g}")
    figures.write(options, ratios)
    missed = reading / unpacking > READING_TARGET or changed / everything > PASS_TARGET
    return int(options.check and missed and not options.quick)


if __name__ == "__main__":
    sys.exit(main())

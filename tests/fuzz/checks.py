"""What must hold for any bytes, of whatever decoder they are given to.

* Nothing but the decoder's own ``DecodeError`` escapes.
* It takes at most :data:`MAX_SECONDS` of processor time for bodies up to :data:`MAX_BYTES`.
* Python's allocations stay below a multiple of the body, and so does what the process touches for the first time
  (torch and zstd allocate where tracemalloc does not see it).
* What was decoded can be encoded, and that decodes to the same.
"""

from __future__ import annotations

import resource
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

from benchmarks.bench_codec import make_batch, reference_encode
from tests.fuzz import bodies
from trinity_mq.experience import DecodeError, Experience, ExperienceBatch, decode, encode
from trinity_mq.experience.codec.tail import read_tail
from trinity_mq.messages import codec as control

T = TypeVar("T")

MAX_BYTES = 64 << 10
MAX_SECONDS = 0.25
FREE_BYTES = 1 << 20
UNSEEN_BYTES = 32 << 20
"""What the process may grow by in one decoding besides, at page and arena granularity."""

LIST_FACTOR = 160
"""The worst is an experience of 12 bytes, one token and no response, which is an object of some 1400."""
CONTROL_FACTOR = 96
"""The worst are empty maps: one byte each, 80 as objects."""
BATCH_FACTOR = TAIL_FACTOR = 32
"""The worst is a header of nothing but names."""
LEGACY_FACTOR, LEGACY_FREE = 32, 1 << 26
"""As experience/legacy/reader.py says."""


class FoundError(AssertionError):
    """A rule of this module does not hold."""


def measured(
    call: Callable[[], T], size: int, factor: int, free: int = FREE_BYTES, max_seconds: float = MAX_SECONDS
) -> T | None:
    """Return what ``call`` gives, None where it refuses; it may not cost more than is said above.

    What costs too much is tried again, since once may be an import, a collection of garbage or a cold cache. Wants
    tracemalloc to be on.
    """
    limit = factor * size + free
    touched, own = touched_bytes(), tracemalloc.get_tracemalloc_memory()
    result, seconds, peak = _traced(call)
    # A table of tracemalloc's that is full is copied into one twice as long. Under atheris these get large: each
    # comparison of arrays that it watches leaks its result.
    grown = touched_bytes() - touched - 2 * max(tracemalloc.get_tracemalloc_memory() - own, 0)
    if peak > limit:
        peak = min(_traced(call)[2] for _ in range(2))
        if peak > limit:
            raise FoundError(f"{size} bytes made Python allocate {peak}, wanted at most {factor} times and {free} more")
    if grown > limit + UNSEEN_BYTES:
        raise FoundError(f"{size} bytes made the process grow by {grown}, wanted at most {limit + UNSEEN_BYTES}")
    if size <= MAX_BYTES and seconds > max_seconds:
        tracemalloc.stop()
        seconds = min(_timed(call)[1] for _ in range(3))
        tracemalloc.start()
        if seconds > max_seconds:
            raise FoundError(f"{size} bytes took {seconds:.3f} s, wanted at most {max_seconds}")
    return result


def touched_bytes() -> int:
    """Return the most bytes of memory that the process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _traced(call: Callable[[], T]) -> tuple[T | None, float, int]:
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    result, seconds = _timed(call)
    return result, seconds, tracemalloc.get_traced_memory()[1] - before


def _timed(call: Callable[[], T]) -> tuple[T | None, float]:
    started = time.thread_time()
    try:
        result = call()
    except (DecodeError, control.DecodeError):
        result = None
    return result, time.thread_time() - started


def experiences(body: bytes, read: Callable[[bytes], list[Experience]] = decode) -> None:
    """Check an experience body, read as a list by ``read`` and as a batch."""
    size = len(body)
    if size >= 24 and body[5] == bodies.ZSTD:
        # What is compressed may be 32 times as long and 64 KiB more, if it says so.
        head, tail = struct.unpack_from("<IQ", body, 12)
        size = min(max(size, head + tail), 33 * size + (64 << 10))
    as_list = measured(lambda: read(body), size, LIST_FACTOR)
    as_batch = measured(lambda: ExperienceBatch.decode(body), size, BATCH_FACTOR)
    if as_batch is None:
        if as_list is not None:
            raise FoundError("as a list it is good, as a batch it is not")
        return
    if as_list is None:
        # Texts and documents of a batch are opened when asked for, and are refused then.
        if measured(as_batch.to_list, size, LIST_FACTOR) is not None:
            raise FoundError("as a batch it is good, as a list it is not")
        passed_on = measured(as_batch.encode, size, BATCH_FACTOR)
        if passed_on is not None and _timed(lambda: decode(passed_on))[0] is not None:
            raise FoundError("encoded again, what was refused is good")
        return
    if len(as_list) != len(as_batch) or as_batch.to_list() != as_list:
        raise FoundError("the batch holds something else than the list")
    if decode(encode(as_list)) != as_list or decode(as_batch.encode()) != as_list:
        raise FoundError("encoded again, it is something else")


def safetensors(data: bytes) -> None:
    """Check the tail of an experience body alone."""
    measured(lambda: read_tail(bytearray(data)), len(data), TAIL_FACTOR)


def legacy(data: bytes) -> None:
    """Check a body that Trinity may have written; its readers state their own, wider bounds."""
    found = measured(
        lambda: Experience.deserialize_many(data, allow_legacy=True), len(data), LEGACY_FACTOR, LEGACY_FREE
    )
    if found is not None and decode(encode(found)) != found:
        raise FoundError("encoded again, it is something else")


def control_msgpack(data: bytes) -> None:
    """Check a control body in msgpack."""
    _control(data, control.CONTENT_TYPE)


def control_json(data: bytes) -> None:
    """Check a control body in JSON."""
    _control(data, control.JSON_CONTENT_TYPE)


def _control(data: bytes, content_type: str) -> None:
    message: Any = measured(lambda: control.decode_any(data, content_type), len(data), CONTROL_FACTOR)
    if message is not None:
        again = control.encode(message)
        back = control.decode_any(again)
        if type(back) is not type(message) or control.encode(back) != again:
            raise FoundError("encoded again, it is something else")


TARGETS: tuple[tuple[str, Callable[[bytes], None]], ...] = (
    ("body", experiences),
    ("body, frame made right", lambda data: experiences(bodies.resealed(data))),
    ("head and tail", lambda data: experiences(bodies.from_parts(data))),
    ("zstd frame", lambda data: experiences(bodies.from_zstd(data))),
    ("edits of a body", lambda data: experiences(bodies.edited(data))),
    ("documents", lambda data: experiences(bodies.with_documents(data))),
    ("safetensors", safetensors),
    ("control msgpack", control_msgpack),
    ("control JSON", control_json),
    ("legacy", legacy),
)
"""By what the first byte of a fuzzer's input says: what the rest is taken for."""


def check(data: bytes) -> None:
    """Check what the first byte of ``data`` says, on the rest."""
    if data:
        TARGETS[data[0] % len(TARGETS)][1](data[1:])


def corpus() -> dict[str, bytes]:
    """Return inputs of :func:`check` to begin with, by name."""
    found = {f"{number}-{at}": bytes([number]) + body for at, body in enumerate(bodies.seeds()) for number in (0, 1)}
    for at, body in enumerate(bodies.seeds()):
        head, tail = bodies.opened(body)
        packed = body[24 : 24 + struct.unpack_from("<I", body, 12)[0]]
        if body[5] == bodies.PLAIN:
            found[f"2-{at}"] = bytes([2]) + struct.pack("<H", len(packed)) + packed + tail
        found[f"4-{at}"] = bytes([4, 0, at]) + bytes(range(at, at + 16))
        found |= {
            f"5-{at}-{name}": bytes([5]) + column["d"]
            for name, column in head["columns"].items()
            if isinstance(column, dict) and "d" in column
        }
        found[f"6-{at}"] = bytes([6]) + tail
        if body[5] == bodies.ZSTD:
            lengths = body[12:14] + body[16:19]
            found[f"3-{at}"] = bytes([3]) + lengths + body[24:]
    found["9-trxp"] = bytes([9]) + reference_encode(make_batch(2, 32)[1])
    for number, form in ((7, "msgpack"), (8, "json")):
        for path in sorted((bodies.GOLDEN / "control").glob(f"*.{form}")):
            found[f"{number}-{path.name}"] = bytes([number]) + path.read_bytes()
    return found

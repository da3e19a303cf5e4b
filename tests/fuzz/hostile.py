"""Messages that no client library would publish: hostile properties and bodies, drawn by a seed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgpack

from tests.raw_amqp import FLAGS, long, nested, properties, short
from trinity_mq.messages import CONTENT_TYPE, DecodeError, decode_any
from trinity_mq.messages.codec import JSON_CONTENT_TYPE
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
SHORTS = (b"", b"\xff\xfe", b"\x00", b"x" * 255, b"\xed\xa0\x80", b"\x1b[2J", b"-1", b"1e400", b"0" * 255, b"a/../b")
CONTENT_TYPES = (CONTENT_TYPE, JSON_CONTENT_TYPE, EXPERIENCES, REFERENCE, "text/plain")
TEXTS = (b"", b"\xff\xfe\x00", b"x" * 100_000, b"9" * 5000, b"\xed\xa0\x80", b"a\nb\n" * 1000, b"nan", b"1,2,x")
INTEGERS = (0, -1, 1, 255, 2**31, -(2**31), 2**63 - 1, -(2**63))
HEADERS = (
    *("kind", "version", "batch", "ticket", "attempt", "part", "given-back", "failed-tries", "returned", "failures"),
    *("put-back", "traceparent", "operator", "offsets", "at", "by", "x-delivery-count", "x-death", "x-stream-offset"),
    *("dead-reason", "dead-queue", "dead-time", "x-first-death-queue", "CC", "x", ""),
)
SESSION_KINDS = ("session_call", "session_reward", "session_end", "session_opened")
LEAVES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**63 - 1, -(2**63), 2**64, 10**25, 10**400, 1e308, float("nan"), float("inf")),
    *("", "\ud800", "a\udcffb", "x" * 100_000, "\0", "1" * 5000, "a/b", "../..", [], {}, [[]], {"": 1}, [1, "a", None]),
)


@dataclass(frozen=True)
class Target:
    """A place that somebody reads: where a message for it is published, and what it is to hold."""

    name: str
    """Of the queue, or of the exchange of exclusive queues."""
    exchange: str
    keys: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kinds of messages that belong there."""
    obeyed: tuple[str, ...] = ()
    """Kinds that its readers obey without doubt, since only agents of the run may publish there: such a message, if it
    is a right one, ends agents or makes them wait as it should."""


TARGETS = (
    Target("submitted", "tasks", ("submit", "session"), ("task_submission",)),
    Target("tasks.train", "tasks", ("train.1",), ("task_slice", "task_slices")),
    Target("tasks.eval", "tasks", ("eval.1",), ("task_slice", "task_slices")),
    Target("closed", "batches", ("closed",), ("batch_closed",), ("batch_closed",)),
    Target("results", "results", ("1", "x"), ("task_result", "task_results", "mark"), ("progress", "run_end")),
    Target("ready", "ready", ("1", "mark"), ("batch_ready", "mark"), ("batch_ready",)),
    Target(
        "sessions", "sessions", ("session", "x"), ("session_call", "session_reward", "session_end", "session_opened")
    ),
    Target("review", "review", ("verdict", "request", "closed", "mark"), ("review_verdict", "review_request")),
    Target("sync", "sync", ("weights.join", "weights.prepare"), ("sync_event",), ("sync_event",)),
    Target("control", "control", ("drain.all", "dropped.dead"), ("control_event",), ("control_event",)),
    Target("telemetry", "telemetry", ("beat.explorer.x", "beat.engine.x", "beat.runner.x"), ("beat",), ("beat",)),
    Target("dead", "dead", ("x",), ("batch_closed", "batch_ready")),
)


@dataclass(frozen=True)
class Hostile:
    """A message to try."""

    target: Target
    key: str
    what: str
    """The property that is hostile, ``none`` or ``several``."""
    fields: bytes
    body: bytes

    def __str__(self) -> str:
        """Say how to publish it again."""
        return (
            f"{self.target.name} ({self.target.exchange}/{self.key}), {self.what}: "
            f"properties {_shown(self.fields)} body {_shown(self.body)}"
        )


def _shown(data: bytes) -> str:
    return data.hex() if len(data) <= 400 else f"{data[:200].hex()}... ({len(data)} bytes)"


def draw(dice: random.Random, target: Target) -> Hostile:
    """Draw a message for a target."""
    body, content_type = _body(dice, target)
    values = {
        "content_type": short(content_type.encode()),
        "headers": _table({b"kind": b"S" + long(dice.choice(target.kinds).encode()), b"version": b"b\1"}),
        "message_id": short(b"%032x" % dice.getrandbits(128)),
    }
    what = dice.choice(("none", "several", *FLAGS))
    for name in dice.sample(sorted(FLAGS), 4) if what == "several" else [what] if what in FLAGS else []:
        values[name] = _property(dice, name)
    return Hostile(target, dice.choice(target.keys), what, properties(**values), body)


# -- properties


def _property(dice: random.Random, name: str) -> bytes:
    if name == "headers":
        return _headers(dice)
    if name in {"delivery_mode", "priority"}:
        return bytes([dice.choice((0, 1, 2, 3, 10, 255))])
    if name == "timestamp":
        return struct.pack(">Q", dice.choice((0, 1, 2**31, 2**62, 2**63, 2**64 - 1)))
    if name == "expiration" and dice.random() < 0.5:
        return short(dice.choice((b"0", b"60000")))
    if name == "content_type" and dice.random() < 0.5:
        return short(dice.choice(CONTENT_TYPES).encode())
    if name == "reply_to" and dice.random() < 0.5:
        return short(dice.choice((b"amq.gen-none", b"tmq.x.submitted", b"amq.rabbitmq.reply-to.x")))
    return short(dice.choice(SHORTS))


def _headers(dice: random.Random) -> bytes:
    if dice.random() < 0.1:
        return long(nested(dice.choice((2, 100, 3000))))
    names = dice.sample(HEADERS, dice.choice((1, 1, 2, 6)))
    table = {name.encode(): _field(dice) for name in names}
    if dice.random() < 0.1:
        table[dice.choice(SHORTS)] = _field(dice)
    return _table(table)


def _table(entries: Mapping[bytes, bytes]) -> bytes:
    return long(b"".join(short(name) + value for name, value in entries.items()))


def _field(dice: random.Random, depth: int = 0) -> bytes:
    number = dice.choice(INTEGERS)
    packed = struct.pack(">q", number)
    forms: tuple[Callable[[], bytes], ...] = (
        lambda: b"l" + packed,
        lambda: b"I" + packed[4:],
        lambda: b"i" + packed[4:],
        lambda: b"s" + packed[6:],
        lambda: b"u" + packed[6:],
        lambda: b"b" + packed[7:],
        lambda: b"B" + packed[7:],
        lambda: b"t" + packed[7:],
        lambda: b"T" + struct.pack(">Q", dice.choice((0, 2**40, 2**62, 2**64 - 1))),
        lambda: b"d" + struct.pack(">d", dice.choice((1e308, -1e308, float("nan"), float("inf"), 5e-324))),
        lambda: b"f" + struct.pack(">f", dice.choice((3e38, float("nan"), 0.1))),
        lambda: b"D" + bytes([dice.choice((0, 2, 255))]) + packed[4:],
        lambda: b"V",
        lambda: b"S" + long(dice.choice(TEXTS)),
        lambda: b"S" + long(dice.choice(TEXTS)),
        lambda: b"x" + long(dice.choice(TEXTS)),
        lambda: b"A" + long(b"".join(_field(dice, depth + 1) for _ in range(3))) if depth < 3 else b"V",
        lambda: b"F" + _table({b"a": _field(dice, depth + 1)}) if depth < 3 else b"V",
        lambda: dice.choice((b"Z", b"\0", b"\xff", b"L" + packed)),
    )
    return dice.choice(forms)()


# -- bodies


@cache
def goldens() -> Mapping[str, tuple[bytes, ...]]:
    """Return the golden bodies in JSON by kind."""
    found: dict[str, list[bytes]] = {}
    for path in sorted((GOLDEN / "control").glob("*.json")):
        found.setdefault(path.name.partition(".")[0], []).append(path.read_bytes())
    return {kind: tuple(bodies) for kind, bodies in found.items()}


@cache
def _experiences() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted((GOLDEN / "experiences").glob("*.tmqx")))


def _body(dice: random.Random, target: Target) -> tuple[bytes, str]:
    """Return a body and its content type; none that the target's readers would have to obey."""
    body, content_type = _any_body(dice, target)
    for name in (CONTENT_TYPE, JSON_CONTENT_TYPE):
        try:
            if decode_any(body, name).kind in target.obeyed:
                return body[: dice.randrange(len(body))], content_type
        except DecodeError:
            continue
    return body, content_type


def _any_body(dice: random.Random, target: Target) -> tuple[bytes, str]:
    how = dice.randrange(10)
    if how == 0:
        raw = (
            b"",
            dice.randbytes(40),
            b"[" * 50_000,
            b"\x91" * 50_000,
            b"{" * 9,
            b'{"kind":1}',
            b'{"kind":"x"}',
            b"null",
        )
        return dice.choice(raw), dice.choice((CONTENT_TYPE, JSON_CONTENT_TYPE))
    if how == 1:
        return dice.choice(_experiences()), EXPERIENCES
    kind = dice.choice(target.kinds) if how > 3 else dice.choice(sorted(goldens()))
    document = json.loads(dice.choice(goldens()[kind]))
    if how > 4:
        document = _changed(dice, document)
    if dice.random() < 0.5:
        body, content_type = json.dumps(document).encode(), JSON_CONTENT_TYPE
    else:
        body, content_type = _packed(document)
    return (body[: dice.randrange(len(body))] if how == 4 else body), content_type


def _packed(document: Any) -> tuple[bytes, str]:
    """Return it in msgpack, in JSON where msgpack has no form for it."""
    try:
        return msgpack.packb(document, unicode_errors="surrogatepass"), CONTENT_TYPE
    except OverflowError:
        return json.dumps(document).encode(), JSON_CONTENT_TYPE


def _changed(dice: random.Random, tree: Any) -> Any:
    """Return ``tree`` with one node somewhere replaced or removed."""
    if not isinstance(tree, dict | list) or not tree or dice.random() < 0.1:
        return dice.choice(LEAVES)
    keys = sorted(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = dice.choice([name for name in keys if name not in ("kind", "version")] or keys)
    changed: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    if dice.random() < 0.1:
        del changed[key]
    else:
        changed[key] = _changed(dice, tree[key])
    return changed

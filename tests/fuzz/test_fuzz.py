"""The fuzzer's checks for a bounded time, without atheris: the same inputs on every run."""

import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
import psutil
import pytest
import torch
from hypothesis import given, settings

from tests.examples import examples
from tests.fuzz import bodies, checks
from trinity_mq.experience import EID, DecodeError, Experience, decode, encode

NAMES = [name for name, _ in checks.TARGETS]
CORPUS = checks.corpus()


@pytest.fixture(autouse=True, scope="module")
def _traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_what_the_fuzzer_begins_with(number):
    inputs = [data for data in CORPUS.values() if data[0] == number]
    assert inputs, "a target without a real input is not fuzzed"
    for data in inputs:
        checks.check(data)


def damaged(rng, data):
    """Return ``data`` with a few bytes changed, cut out, put in or taken from another input."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        at = rng.randrange(1, len(result) + 1)
        what = rng.randrange(5)
        if what == 0:
            del result[at : at + rng.randrange(1, 9)]
        elif what == 1:
            result[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif what == 2:
            other = rng.choice(list(CORPUS.values()))
            start = rng.randrange(len(other))
            result[at : at + 8] = other[start : start + rng.randrange(1, 40)]
        elif at < len(result):
            result[at] = rng.choice((rng.randrange(256), result[at] ^ 1 << rng.randrange(8), 0, 0xFF))
    return bytes(result)


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_damaged_inputs(number):
    rng = random.Random(number)
    inputs = [data for data in CORPUS.values() if data[0] == number]
    for _ in range(examples(120)):
        checks.check(damaged(rng, rng.choice(inputs)))


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.binary(max_size=40))
def test_edits_of_real_bodies(data):
    checks.experiences(bodies.edited(data))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.sampled_from(range(len(NAMES))), st.binary(max_size=200))
def test_arbitrary_bytes(number, data):
    checks.check(bytes([number]) + data)


def test_edits_get_past_the_checksum():
    """Or nothing behind it is tested: some edited bodies are decoded, others refused for what they say."""
    rng = random.Random(2)
    said = set()
    for _ in range(200):
        try:
            decode(bodies.edited(rng.randbytes(40)))
        except DecodeError as error:
            said.add(str(error).split(":")[0])
        else:
            said.add("decoded")
    assert "decoded" in said
    assert len(said) > 20
    assert not [text for text in said if text.startswith("checksum")]


def small_experiences():
    """Return the body with the most experiences for its size."""
    tiny = Experience(
        eid=EID(1, 1, 0, 0, "x"),
        tokens=[1],
        action_mask=[],
        truncate_status="prompt_truncated",
        experience_type="single_turn",
    )
    return encode([tiny] * 3000)


def in_control(data):
    return b"\x82\xa4kind\xadcontrol_event\xa4data" + data


def many(one, count=0xFF00):
    return b"\xdc" + count.to_bytes(2, "big") + one * count


def named(count):
    names = {chr(33 + n % 90) + chr(33 + n // 90 % 90) + chr(33 + n // 8100): 0 for n in range(count)}
    text = json.dumps(names).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def as_list(data):
    return checks.measured(lambda: decode(data), len(data), checks.LIST_FACTOR)


@pytest.mark.parametrize(
    ("check", "data"),
    [
        (as_list, small_experiences()),
        (as_list, bodies.with_documents(many(b"\x90", 0x9000))),
        (as_list, bodies.with_documents(many(b"\x80", 0x9000))),
        (as_list, bodies.with_documents(many(b"\x05", 0x9000))),
        (as_list, bodies.with_documents(many(b"\x81\xa1a\x01", 0x2400))),
        (checks.safetensors, named(6000)),
        (checks.control_msgpack, in_control(many(b"\x90", 0x9000))),
        (checks.control_msgpack, in_control(many(b"\x80", 0x9000))),
        (checks.control_msgpack, in_control(many(b"\x81\xa1a\x01", 0x2400))),
        (checks.control_json, b'{"kind":"control_event","data":[' + b"{}," * 15_000 + b"1]}"),
    ],
    ids=[
        "experiences",
        "lists",
        "maps",
        "numbers",
        "maps of one",
        "names",
        "control lists",
        "control maps",
        "control maps of one",
        "JSON maps",
    ],
)
def test_what_costs_most(check, data):
    assert 32 << 10 < len(data) <= checks.MAX_BYTES
    check(data)


class TestChecks:
    """The checks can fail."""

    def test_memory(self):
        with pytest.raises(checks.FoundError, match="made Python allocate"):
            checks.measured(lambda: bytes(2 << 20), 10, 8)

    def test_memory_out_of_sight(self):
        # seen is what the process has never had before: a test before this one may have had more than there is now
        spare = max(0, checks.touched_bytes() - psutil.Process().memory_info().rss)
        with pytest.raises(checks.FoundError, match="made the process grow"):
            checks.measured(lambda: torch.ones(spare + (128 << 20), dtype=torch.uint8), 10, 8)

    def test_time(self):
        with pytest.raises(checks.FoundError, match=r"took \d\.\d+ s, wanted at most 0\.01"):
            checks.measured(lambda: sum(i * i for i in range(500_000)), 10, 8, max_seconds=0.01)

    def test_other_errors(self):
        with pytest.raises(TypeError):
            checks.experiences(encode([]), lambda body: body["x"])

    def test_batch_and_list_disagree(self):
        with pytest.raises(checks.FoundError, match="the batch holds something else than the list"):
            checks.experiences(bodies.seeds()[0], lambda _: [])


def test_runs_under_atheris(tmp_path):
    pytest.importorskip("atheris")
    script = Path(__file__).with_name("fuzz_decode.py")
    result = subprocess.run(
        [sys.executable, str(script), "--seconds", "1", "--findings", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "executions in 1 s" in result.stdout

"""``inspect`` on a stream in memory and on files: what is shown, what is said instead, and that nothing is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.experience_cases import SINGLE, TINY, dpo, multi
from tests.legacy_bodies import trxp
from tests.unit.agents.world import experience
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.cli.main import main
from trinity_mq.config import BrokerConfig
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.messages import BatchClosed, BatchReady, ExperienceReference
from trinity_mq.observability.experiences.show_experience import as_json, json_fields
from trinity_mq.observability.experiences.stream import ExperienceFilter, ReadyReader, StreamSummary
from trinity_mq.observability.experiences.tap import ExperienceLinePrinter, select_fields
from trinity_mq.observability.experiences.token_texts import TokenTexts
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.telemetry.evaluations.log import Evaluation, EvaluationAnswer, EvaluationLog, EvaluationQuestion
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.transport.experience_parts import chunk_message

Act = Callable[["Stream"], Coroutine[Any, Any, Any]]


def made(batch: int, task: int = 0, run: int = 0, step: int = 0) -> Experience:
    eid = EID(batch=batch, task=task, run=run, step=step)
    return Experience(eid=eid, tokens=[3, 4, 5], prompt_length=1, logprobs=[-0.5, -0.25], reward=float(run))


class Stream:
    """A ready stream, and what a look at it takes in."""

    def __init__(self, max_bytes: int = 2**31) -> None:
        self.topology, self.broker = Topology("seen", max_bytes), MemoryBroker()
        self.bus = MemoryBus(self.broker, self.topology, config=BrokerConfig())
        self.taken: list[Experience] = []
        self.enough = 10**6

    async def put(self, mail: Envelope) -> None:
        assert await self.bus.publish(self.topology.exchange("ready"), "x", mail)

    async def chunk(self, batch: int, *experiences: Experience, op: str = "o", n: int = 0, body: Any = None) -> None:
        content = Experience.serialize_many(list(experiences)) if body is None else body
        await self.put(chunk_message(BatchClosed(batch=batch, ticket=f"t{batch}"), op, n, content))

    async def ready(self, batch: int, chunks: int = 1, op: str = "o", **more: Any) -> None:
        await self.put(envelope(BatchReady(batch=batch, ticket=f"t{batch}", op=op, chunks=chunks, **more)))

    async def whole(self, batch: int, *experiences: Experience) -> None:
        await self.chunk(batch, *(experiences or [made(batch)]))
        await self.ready(batch)

    async def look(self, **wanted: str) -> StreamSummary:
        def take(batches: Any) -> bool:
            self.taken += [one for batch in batches for one in batch]
            return len(self.taken) >= self.enough

        self.taken = []
        reader = ReadyReader(self.bus, self.topology, ExperienceFilter(**wanted), None, take)
        return await reader.read()

    @property
    def runs(self) -> list[tuple[Any, ...]]:
        return [(one.eid.batch, one.eid.task, one.eid.run, one.eid.step) for one in self.taken]


def play(act: Act, stream: Stream | None = None) -> Any:
    async def main() -> Any:
        one = stream or Stream()
        await one.bus.connect()
        await one.bus.declare(*one.topology.durable)
        return await act(one)

    return run_virtually(main(), limit=2000)


def staged(act: Act) -> Callable[[], None]:
    """Make a test of what is done with a stream."""
    return lambda: play(act)


@staged
async def test_only_what_is_wanted(stream: Stream) -> None:
    await stream.whole(1, made(1, 7, 1))
    await stream.whole(2, made(2, 7, 0), made(2, 7, 1), made(2, 8, 1, 3))
    for wanted, runs in (
        ({"batch": "2"}, [(2, 7, 0, 0), (2, 7, 1, 0), (2, 8, 1, 3)]),
        ({"task": "7"}, [(1, 7, 1, 0), (2, 7, 0, 0), (2, 7, 1, 0)]),
        ({"run": "1"}, [(1, 7, 1, 0), (2, 7, 1, 0), (2, 8, 1, 3)]),
        ({"batch": "2", "run": "1", "step": "3"}, [(2, 8, 1, 3)]),
        ({"batch": "02"}, []),
    ):
        await stream.look(**wanted)
        assert stream.runs == runs, wanted


@staged
async def test_of_a_known_run_nothing_of_earlier_runs_of_its_name_is_shown(stream: Stream) -> None:
    for run_id, task in (("earlier", 1), ("this", 2)):
        stream.bus.run_id = run_id
        await stream.whole(1, made(1, task=task))
    summary = await stream.look()
    assert [run[1] for run in stream.runs] == [2]
    assert summary.foreign == 2
    assert any("earlier runs of this name" in note for note in summary.notes)


@staged
async def test_a_failed_batch_that_was_run_again_is_seen(stream: Stream) -> None:
    await stream.ready(1, 0, state="failed", reason="its operator failed")
    await stream.whole(2)
    await stream.chunk(1, made(1), op="half")
    assert (await stream.look()).incomplete == ["1"]
    await stream.ready(1, 0, op="y", state="failed", reason="once more")
    assert (await stream.look()).incomplete == []
    await stream.chunk(1, made(1, run=1), op="again")
    await stream.ready(1, op="again")
    await stream.chunk(1, made(1, run=2), op="third")
    await stream.ready(1, op="third")
    seen = await stream.look()
    assert stream.runs == [(2, 0, 0, 0), (1, 0, 1, 0)], "once, as a trainer sees it"
    assert (seen.batches, seen.incomplete, len(seen.notes)) == (["1", "2"], [], 1)


@staged
async def test_enough_is_enough(stream: Stream) -> None:
    for batch in range(5):
        await stream.whole(batch)
    stream.enough = 2
    assert (await stream.look()).batches == ["0", "1"]


@staged
async def test_only_the_set_that_counts_is_shown(stream: Stream) -> None:
    await stream.chunk(1, made(1, run=5), op="slow")
    await stream.chunk(1, made(1, run=1), op="fast")
    await stream.chunk(1, made(1, run=1), op="fast")
    await stream.chunk(1, made(1, run=2), op="fast", n=1)
    await stream.ready(1, 2, op="fast")
    await stream.ready(1, 1, op="slow")
    await stream.chunk(1, made(1, run=6), op="late")
    seen = await stream.look()
    assert [run for _, _, run, _ in stream.runs] == [1, 2]
    assert (seen.batches, seen.incomplete, seen.notes) == (["1"], [], [])


@staged
async def test_batches_without_experiences_say_why(stream: Stream) -> None:
    await stream.ready(1, 0, state="failed", reason="its operator failed")
    await stream.ready(2, 0, state="empty")
    seen = await stream.look()
    assert seen.notes == [
        "batch 1 has no experiences, it is failed: its operator failed",
        "batch 2 has no experiences, it is empty",
    ]
    assert (await stream.look(batch="2")).notes == seen.notes[1:]


@staged
async def test_what_cannot_be_read_is_said_and_left_out(stream: Stream) -> None:
    await stream.chunk(1, body=b"TMQX nonsense")
    await stream.chunk(1, made(1), n=1)
    reference = ExperienceReference(url="s3://b/x", bytes=5, sha256="0" * 64)
    await stream.chunk(1, body=reference, n=2)
    await stream.ready(1, 3)
    await stream.put(Envelope(body=b"\xc1", kind="odd"))
    await stream.put(Envelope(body=b"TMQX", kind="odd", content_type="application/vnd.trinity-mq.experiences"))
    seen = await stream.look()
    assert stream.runs == [(1, 0, 0, 0)]
    notes = sorted(seen.notes)
    parts = ("chunk 0 of batch 1", "chunk 2 of batch 1", "does not decode", "without the headers")
    assert [part for part, note in zip(parts, notes, strict=True) if part not in note] == []
    assert "blob_store" in notes[1]


def test_a_cut_stream_begins_where_it_begins() -> None:
    body = len(Experience.serialize(made(1)))
    stream = Stream(max_bytes=body * 3)

    async def act(stream: Stream) -> None:
        await stream.chunk(1, made(1))
        await stream.chunk(1, made(1), n=1)
        for _ in range(2):
            await stream.chunk(9, made(9))
        await stream.ready(1, 2)
        await stream.ready(9, 1)
        seen = await stream.look()
        assert "the stream begins at offset" in seen.notes[0]
        assert "broker.ready_max_bytes" in seen.notes[0]
        assert "a set of batch 1 is not whole" in seen.notes[1]
        assert stream.runs == [(9, 0, 0, 0)]

    play(act, stream)


# -- files


BODY = Experience.serialize_many([TINY, SINGLE])


def stored(folder: Path, body: bytes) -> str:
    path = folder / "some.tmqx"
    path.write_bytes(body)
    return str(path)


@pytest.fixture
def body(tmp_path: Path) -> str:
    return stored(tmp_path, BODY)


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (["--limit", "3"], [0, 1, 2]),
        (["--limit", "3", "--last"], [2, 3, 4]),
        (["--limit", "9"], [0, 1, 2, 3, 4]),
        (["--limit", "9", "--last"], [0, 1, 2, 3, 4]),
    ],
)
def test_the_first_or_the_last_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], runs: list[int]
) -> None:
    path = stored(tmp_path, Experience.serialize_many([made(1, run=run) for run in range(5)]))
    assert main(["inspect", path, "--json", *words]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["eid"]["run"] for line in out.splitlines()] == runs
    assert ("3 shown; there are more" in err) is (len(runs) == 3)


def test_a_file_token_by_token(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", body]) == 0
    out, err = capsys.readouterr()
    assert "token ids without texts" in err
    for part in ("batch 1 task 2 run 0 step 0 [0a1b2c3d4e5f]", "batch 7 task 3", "reward  -0.625", "1.40 from token 0"):
        assert part in out
    row = next(
        line for line in out.splitlines() if "2147483647" in line and "2.7500" not in line and "mask" not in line
    )
    assert row.split() == ["3", "2147483647", "-", "1", "-0.5000", "0.2500", "-1.0000", "-0.2500", "0.0000"]


def test_a_file_without_values_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a buffer of Trinity-RFT becomes one: no logprobs, only the mask that follows from the length of the prompt."""
    plain = Experience(tokens=torch.tensor([5, 6, 7]), prompt_length=1)
    assert main(["inspect", stored(tmp_path, Experience.serialize_many([plain]))]) == 0
    assert re.search(r"^ +1 +6 +- +1 *\n +2 +7 +- +1 *$", capsys.readouterr().out, re.MULTILINE)


def test_the_expected_answer_is_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered = made(1)
    answered.response_text, answered.info = "it is 8", {"truth": "7", "engine": "e"}
    assert main(["inspect", stored(tmp_path, Experience.serialize_many([answered]))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    place = lines.index(["answered", "it", "is", "8"])
    assert lines[place + 1] == ["expected", "7"]
    assert ["info", "engine", "=", "'e'"] in lines


def test_a_file_as_json(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", body, "--json", "--task", "3"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["tokens"], found["action_mask"], found["logprobs"]) == (
        SINGLE.tokens.tolist(),
        [True, True],
        [-0.5, -2.75],
    )
    assert found["advantages"] == [0.25, 0.125]
    assert found["teacher_logprobs"] == [-0.25, None], "JSON has no word for infinity"
    assert found["uid"] == SINGLE.eid.uid


@pytest.mark.parametrize("experiences", [multi(), dpo()])
def test_every_type_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], experiences: list[Experience]
) -> None:
    path = stored(tmp_path, Experience.serialize_many(experiences))
    for more in ([], ["--json"]):
        assert main(["inspect", path, *more]) == 0
        out = capsys.readouterr().out
        assert [one for one in experiences if one.eid.suffix not in out] == []


@pytest.mark.parametrize(
    ("data", "words", "code", "said"),
    [
        (BODY, ["--task", "99", "--run", "1"], 1, "none of 2 experiences matches task 99, run 1"),
        (BODY, ["--limit", "0"], 2, "--limit is 0"),
        (BODY, ["--tokenizer", "/nowhere"], 2, "tokenizer.json cannot be loaded"),
        (None, [], 2, "cannot be read: No such file"),
        (b"TMQX nonsense", [], 2, "body"),
        (trxp(), [], 2, "convert it with `trinity-mq convert-experiences`"),
    ],
)
def test_what_cannot_be_shown_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes | None, words: list[str], code: int, said: str
) -> None:
    path = tmp_path / "odd.tmqx"
    if data is not None:
        path.write_bytes(data)
    assert main(["inspect", str(path), *words]) == code
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with three evaluations of two sets."""
    (tmp_path / "config.yaml").write_text(f"name: r\nmodel: {{tiny: {{}}}}\nrun_dir: {tmp_path}\n")
    log = EvaluationLog(tmp_path, 2**20)
    for name, label in (("sums", 0), ("sums", 5), ("words", 5)):
        questions = [
            EvaluationQuestion(
                task=task,
                question=f"{name} {task}?",
                expected="7" if task else None,
                answers=[EvaluationAnswer(run=run, answer=f"{run} at {label}", reward=run / 2) for run in range(2)],
                failure="run 2: KeyError" if task == 2 else None,
            )
            for task in range(3)
        ]
        log.append(Evaluation(set=name, label=label, time=9.0, questions=questions))
    return tmp_path


def test_the_last_evaluation_of_each_set_by_question(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--evaluation"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("question 2") == 2
    for words in (
        "sums at 5, question 1",
        "asked  sums 1?",
        "expected  7",
        "expected  unknown",
        "run 1  reward 0.5: 1 at 5",
    ):
        assert words in out
    assert "failure  run 2: KeyError" in out
    assert "at 0" not in out


def test_one_question_of_one_evaluation_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(folder), "--evaluation", "sums", "--step", "0", "--task", "1", "--json"]
    assert main(words) == 0
    [line] = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["set"], found["label"], found["task"], found["expected"]) == ("sums", 0, 1, "7")
    assert [one["answer"] for one in found["answers"]] == ["0 at 0", "1 at 0"]


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--limit", "2"], 0, "2 of 6 questions shown"),
        (["nothing"], 1, "answers are kept of: sums at 0, sums at 5, words at 5"),
        (["--step", "7"], 1, "no question matches"),
    ],
)
def test_what_is_not_shown_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: int, words: str
) -> None:
    assert main(["inspect", str(folder), "--evaluation", *more]) == code
    assert words in capsys.readouterr().err


def test_a_run_without_answers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(f"name: r\nmodel: {{tiny: {{}}}}\nrun_dir: {tmp_path}\n")
    assert main(["inspect", str(tmp_path), "--evaluation"]) == 1
    assert "eval_answers_max_bytes" in capsys.readouterr().err
    assert main(["inspect", "no-such-run", "--evaluation"]) == 2
    assert "has none here" in capsys.readouterr().err


def test_parts_of_a_field_by_a_dot_and_what_is_not_there_as_null() -> None:
    whole = {"eid": {"batch": 1}, "metrics": {"a.b": 2.0}, "reward": 1.0}
    assert select_fields(whole, ["reward", "eid.batch", "eid.none", "prompt_text", "reward.x"]) == {
        "reward": 1.0,
        "eid.batch": 1,
        "eid.none": None,
        "prompt_text": None,
        "reward.x": None,
    }


def test_every_field_of_an_experience_may_be_chosen() -> None:
    one = experience(length=5, advantages=[0.0, 0.0, 0.0], response_text="x")
    assert set(as_json(one, TokenTexts())) <= set(json_fields())


def test_each_third_one_over_the_limits_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ExperienceLinePrinter(None, ["eid.run"], 3)
    made = [experience(eid=EID(batch=1, task=0, run=run)) for run in range(10)]
    for part in (made[:1], made[1:5], made[5:]):
        assert lines.take([ExperienceBatch.of(part)]) is False
    shown = [json.loads(line)["eid.run"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [0, 3, 6, 9]
    assert lines.printed == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "yesterday"], "wanted beginning, now, or the number of a batch"),
        (["--no-follow"], "--from now with --no-follow shows nothing"),
        (["--every", "0"], "wanted at least 1"),
        (["--fields", "reward,advantage"], "wanted names separated by commas, out of: eid"),
        (["--fields", ","], "wanted names separated by commas"),
        ([], "no broker is known for run 'nowhere'"),
    ],
)
def test_mistakes_are_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRINITY_MQ_BROKER_URL", "TRINITY_MQ_BROKER_URL_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["tap", "nowhere", *words]) == 2
    assert said in capsys.readouterr().err

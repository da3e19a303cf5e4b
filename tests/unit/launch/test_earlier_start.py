"""``trinity-mq run`` in a folder whose run has finished: told, extended, or refused; and begun anew."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_agents.explorer.task_source import TaskSource, open_tasksets
from trinity_agents.trainer.sources.records import recorded
from trinity_mq.bus import Topology
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.cli.main import main
from trinity_mq.config import load_config
from trinity_mq.data.records import read_records
from trinity_mq.experience import Experience, encode
from trinity_mq.launch.earlier_start import (
    check_data_unchanged,
    describe_extension,
    discard_earlier_run,
    rewind_to_checkpoint,
)
from trinity_mq.launch.exit_codes import closing_line, exit_code
from trinity_mq.launch.session import RunSession
from trinity_mq.observability.display import PlainDisplay
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import CheckpointStore, TrainerProgress, find_checkpoints


def finished_run(folder: Path, batches: int, *settings: str) -> Path:
    """Write the configuration of a run, and its folder as it is after so many batches; return the configuration."""
    path = folder / "c.yaml"
    path.write_text(
        f"name: earlier\nrun_dir: {folder}/run\nmodel: {{tiny: {{}}}}\nbuffer:\n  batch_size: 4\n"
        "  taskset: {storage_type: synthetic, path: max3, limit: 10}\n"
    )
    config = load_config(path, settings)
    RunFolder(config).write_configuration()
    RunFolder(config).mark_finished()
    taskset = open_tasksets(config)[0]
    assert taskset is not None
    source = TaskSource(config, state := ExplorerState(), taskset)
    while not source.is_over:
        source.take()
        state.opened += 1
    assert state.opened == batches
    state.closed, state.ended, state.finished = batches, True, True
    asyncio.run(StateFile.of(folder / "run").save(state))
    return path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 0, ["this run has finished", "buffer.total_steps=N", "--fresh"]),
        (
            ["trainer.save_interval=7"],
            2,
            ["finished after 3 batches", "trainer.save_interval: 50 -> 7", "--fresh"],
        ),
        (["seed=7"], 2, ["must stay the same: seed: 0 -> 7"]),
    ],
    ids=["its settings", "other settings are no silent success", "settings that must stay"],
)
def test_in_the_folder_of_a_finished_run_it_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: list[str]
) -> None:
    path = finished_run(tmp_path, 3, "buffer.total_steps=3")
    assert main(["run", str(path), "buffer.total_steps=3", *words]) == code
    captured = capsys.readouterr()
    assert [text for text in said if text not in captured.out + captured.err] == []
    assert (tmp_path / "run" / "finished").exists()


@pytest.mark.parametrize(
    ("before", "settings", "total"),
    [
        (("buffer.total_steps=3",), ("buffer.total_steps=5", "trainer.save_interval=7"), 5),
        (("buffer.total_epochs=1",), ("buffer.total_epochs=2",), 6),  # 10 tasks an epoch, 4 a batch: 4, 4, 2
        (("buffer.total_steps=3",), ("buffer.total_epochs=2",), 5),  # 4, 4, 4
    ],
)
def test_more_batches_extend_it(tmp_path: Path, before: tuple[str], settings: tuple[str], total: int) -> None:
    config = load_config(finished_run(tmp_path, 3, *before), settings)
    line = describe_extension(config, RunFolder(config).changes())
    assert line is not None
    assert f"finished after 3 batches and continues to batch {total}" in line
    assert ("the learning rate decays" in line) == ("buffer.total_steps" in str(settings)), "epochs have no number"


def test_begun_anew_the_folder_is_moved_aside_and_nothing_in_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    config = load_config(finished_run(tmp_path, 3))
    for number in (1, 2):
        RunFolder(config).write_configuration()
        (tmp_path / "run" / "metrics.jsonl").write_text(f"{number}")
        assert discard_earlier_run(config, RunFolder(config)) == [f"the earlier run is in {tmp_path}/run.{number}"]
        assert (tmp_path / f"run.{number}" / "metrics.jsonl").read_text() == f"{number}"
        assert not (tmp_path / "run").exists()
    assert discard_earlier_run(config, RunFolder(config)) == []


# -- other data


def write_records(folder: Path, count: int) -> None:
    lines = (f'{{"question": "q{n}", "answer": "a"}}\n' for n in range(count))
    (folder / "t.jsonl").write_text("".join(lines))


def with_records(folder: Path, settings: str) -> Path:
    """Write a configuration on ten records, and the folder of its run; return the configuration."""
    write_records(folder, 10)
    path = folder / "c.yaml"
    path.write_text(f"name: earlier\nrun_dir: {folder}/run\nmodel: {{tiny: {{}}}}\n{settings}\n")
    RunFolder(load_config(path)).write_configuration()
    return path


@pytest.mark.parametrize("words", [[], ["--from", "step-1"]])
@pytest.mark.parametrize("of", ["explorer", "trainer", "recorded", "experts"])
def test_changed_data_are_told_before_an_agent_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of: str, words: list[str]
) -> None:
    """Whoever has a position in them, in the words of who would find it out later."""
    data = f"{{storage_type: file, path: {tmp_path}/t.jsonl, schema_type: sft}}"
    sections = {
        "explorer": f"buffer: {{taskset: {{path: {tmp_path}/t.jsonl}}}}",
        "trainer": "mode: train\nalgorithm: {algorithm_type: sft}\n"
        f"buffer: {{trainer_input: {{experience_buffer: {data}}}}}",
        "recorded": "mode: train\nbuffer: {trainer_input: {experience_buffer: "
        f"{{storage_type: file, path: {tmp_path}/t.tmqx, schema_type: experience}}}}}}",
        "experts": "algorithm: {algorithm_type: mix}\nbuffer: {taskset: {storage_type: queue}, trainer_input: "
        f"{{auxiliary_buffers: {{experts: {data}}}}}}}",
    }
    experience = Experience(tokens=[1, 2], prompt_length=1, logprobs=[-1.0])
    (tmp_path / "t.tmqx").write_bytes(encode([experience] * 10))
    path = with_records(tmp_path, sections[of])
    config, state = load_config(path), ExplorerState()
    source: dict[str, Any] = {}
    if of == "explorer":
        TaskSource(config, state, open_tasksets(config)[0]).take()
    elif of == "recorded":
        source = {"identity": recorded(config.buffer.trainer_input.experience_buffer)[1]}
    else:
        records = config.buffer.trainer_input.experience_buffer
        records = next(iter(config.buffer.trainer_input.auxiliary_buffers.values()), records)
        identity = {"identity": read_records(records)[1]}
        source = {"experts": identity} if of == "experts" else identity
    asyncio.run(StateFile.of(tmp_path / "run").save(state))
    saved(tmp_path, 2, source=source)
    before = sorted((tmp_path / "run").rglob("*"))
    check_data_unchanged(config)

    write_records(tmp_path, 11)
    (tmp_path / "t.tmqx").write_bytes(encode([experience] * 11))
    assert main(["run", str(path), *words]) == 2
    err = capsys.readouterr().err
    assert "have changed since the run began: " in err
    told = "there were 10 and are 11" if of == "recorded" else "1 were appended to the 10 earlier records"
    assert told in err
    assert sorted((tmp_path / "run").rglob("*")) == sorted([*before, tmp_path / "run" / "lock"])


# -- back to a checkpoint


def saved(folder: Path, *progress: int, source: dict[str, Any] | None = None) -> None:
    """Write checkpoints with these numbers of batches, and half as many train steps."""

    async def write(into: Path) -> None:
        (into / "weights").touch()

    store = CheckpointStore(folder / "run" / "checkpoints", 9)
    for one in progress:
        state = TrainerProgress(generation=1, step=one // 2, progress=one, source=source or {})
        asyncio.run(store.save(write, state))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--from", "step-4"], "--from: there is no checkpoint step-4 in "),
        (["--from", "step-4"], "available: progress-000002 (step-1), progress-000004 (step-2)"),
        (["--from", "newest"], "'newest' is not the name of a checkpoint, such as step-120 or progress-120"),
        (["--from", "step-2", "--fresh"], "--fresh starts from the first model, and --from from a checkpoint"),
        (["--from", "step-2", "seed=7"], "must stay the same: seed: 0 -> 7"),
        (["--from", "step-2", "model.device=cuda"], "model.device"),
    ],
)
def test_what_cannot_be_gone_back_to_is_told_and_nothing_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], wanted: str
) -> None:
    path = finished_run(tmp_path, 5, "buffer.total_steps=5")
    saved(tmp_path, 2, 4)
    assert main(["run", str(path), "buffer.total_steps=5", *words]) == 2
    assert wanted in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints" / "chosen.json").exists()
    assert (tmp_path / "run" / "finished").exists()
    assert StateFile.of(tmp_path / "run").load().finished


@pytest.mark.parametrize("name", ["step-1", "progress-2", "progress-000002"])
def test_going_back_opens_a_finished_run_again(tmp_path: Path, name: str) -> None:
    path = finished_run(tmp_path, 5, "buffer.total_steps=5")
    saved(tmp_path, 2, 4)
    file = StateFile.of(tmp_path / "run")
    state = file.load()
    state.evaluated = ["0/held", "4/held", "5/held"]
    asyncio.run(file.save(state))
    lines = rewind_to_checkpoint(load_config(path, ("buffer.total_steps=5",)), name)
    assert lines == ["resumes from progress-000002 (step-1); up to 3 later batches are trained on again"]
    state = file.load()
    assert (state.finished, state.opened, state.evaluated) == (False, 5, ["0/held", "4/held"])
    assert find_checkpoints(tmp_path / "run" / "checkpoints")[0][0].state.progress == 2


# -- the exit code of a run


@pytest.mark.parametrize(
    ("finished", "steps", "code"),
    [
        (True, 3, 0),
        (True, None, 0),  # a trainer elsewhere may have reported to nobody here
        (True, 0, 4),
        (False, 3, 3),
        (False, 0, 4),
        (False, None, 4),
    ],
)
def test_the_code_tells_what_was_trained(finished: bool, steps: int | None, code: int) -> None:
    assert exit_code(finished=finished, steps=steps) == code
    line = closing_line(code, "trinity-mq run x.yaml", finished=finished)
    assert (line is None) == (code == 0)
    assert line is None or f"(exit code {code})" in line


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 3)])
def test_a_mode_that_does_not_train_keeps_its_results(finished: bool, code: int) -> None:
    assert exit_code(finished=finished, steps=None, trains=False) == code
    assert "--fresh" not in str(closing_line(code, "trinity-mq run x.yaml", finished=finished))


def test_the_same_command_is_no_advice_where_nothing_is_left_or_it_would_fail_again() -> None:
    assert "same command" not in str(closing_line(4, "trinity-mq run x.yaml", finished=True))
    assert "resume with the same command" not in str(closing_line(3, "trinity-mq run x", finished=False, curable=False))
    assert closing_line(130, "trinity-mq run x.yaml", finished=False) == (
        "not finished (exit code 130); resume with the same command: trinity-mq run x.yaml"
    )


# -- what a run says on the screen about its broker


SENTENCE = "all agents wait for the broker: "


async def alarmed(tmp_path: Path) -> None:
    config = load_config({"name": "r", "run_dir": str(tmp_path), "model": {"tiny": {}}})
    shown, broker, topology = io.StringIO(), MemoryBroker(), Topology("r")
    session = RunSession(config, RunFolder(config), PlainDisplay(shown), "amqp://h/", None)
    bus = MemoryBus(broker, topology, config=config.broker)
    await bus.connect()
    await session._tell_broker_trouble(bus, topology)
    assert shown.getvalue() == ""
    broker.block()
    await session._tell_broker_trouble(bus, topology)
    assert shown.getvalue().count(SENTENCE) == 1
    assert "alarm" in shown.getvalue()
    assert "what to do: free memory or disk on the broker" in shown.getvalue()
    watching = asyncio.create_task(session._depths(bus, topology))
    await asyncio.sleep(45)
    session._draw()
    assert shown.getvalue().count("no progress for 3") == 1
    assert shown.getvalue().count(SENTENCE) == 2
    broker.unblock()
    await asyncio.sleep(10)
    assert session.state.finding is None
    watching.cancel()
    await asyncio.wait([watching])
    await bus.close()


def test_an_alarm_is_told_before_the_start_and_after_half_a_minute(tmp_path: Path) -> None:
    run_virtually(alarmed(tmp_path))

"""The explorer's state file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trinity_agents.explorer.state import ExplorerState, PendingTask, StateFile
from trinity_mq.messages import TaskBody
from trinity_mq.runtime.errors import FatalError, RestartMe


def test_what_is_saved_is_loaded_and_a_missing_file_is_a_fresh_start(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state" / "explorer.msgpack")
    assert file.load() == ExplorerState()
    state = ExplorerState(opened=3, due=[2], pending=[PendingTask(task=TaskBody(raw_task={"n": 1}))])
    asyncio.run(file.save(state))
    assert StateFile(tmp_path / "state" / "explorer.msgpack").load() == state


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80" * 2, b"\x81\xa6opened\xa1x", b"\x93\x01\x02"])
def test_damage_is_one_line_that_names_the_file_and_the_way_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "explorer.msgpack"
    path.write_bytes(content)
    with pytest.raises(FatalError) as caught:
        StateFile(path).load()
    assert str(path) in str(caught.value)
    assert "start a run under another name" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_saves_at_once_end_with_the_latest_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "explorer.msgpack")
    state = ExplorerState()

    async def save_all() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                state.opened = number
                group.create_task(file.save(state))
                await asyncio.sleep(0)

    file.load()
    asyncio.run(save_all())
    assert file.load().opened == 19


def test_what_another_wrote_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    """It had the lock while we were cut off, and let it go before we were back: the lock alone tells nothing."""
    path = tmp_path / "explorer.msgpack"
    mine, other = StateFile(path), StateFile(path)
    asyncio.run(mine.save(ExplorerState(opened=1)))
    taken_over = other.load()
    taken_over.opened = 5
    asyncio.run(other.save(taken_over))
    with pytest.raises(RestartMe, match="another explorer has gone on"):
        asyncio.run(mine.save(ExplorerState(opened=2)))
    assert StateFile(path).load().opened == 5

"""A run that is over leaves a mark; who is started after that ends by itself."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from tests.unit.runtime.test_agent import Idler
from trinity_mq.bus.memory.bus import MemoryBroker
from trinity_mq.runtime.process import is_run_over, mark_run_over
from trinity_mq.testing.virtual_time import run_virtually


class Latecomer(Idler):
    """Notes whether it was let work."""

    served = False

    async def serve(self) -> None:
        self.served = True


def test_the_mark(tmp_path: Path) -> None:
    assert not is_run_over(tmp_path)
    mark_run_over(tmp_path)
    mark_run_over(tmp_path)  # by the explorer and by the supervisor
    assert is_run_over(tmp_path)
    assert not is_run_over(tmp_path / "another")


def test_who_comes_after_the_end_ends_too(tmp_path: Path) -> None:
    def lives(over: bool) -> Latecomer:
        latecomer = Latecomer(MemoryBroker())
        latecomer.run_folder = tmp_path
        if over:
            mark_run_over(tmp_path)
        with capture_logs():
            run_virtually(latecomer.run())
        return latecomer

    before, after = lives(False), lives(True)
    assert before.served
    assert not after.served
    assert after.state == "finished"

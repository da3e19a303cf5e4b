"""Connecting to the private broker of the run that is tapped, which may end at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.virtual import virtually
from trinity_agents.trainer.sources.tap import TapSource
from trinity_mq.bus import AddressError, BusUnavailable, Topology
from trinity_mq.config import load_config
from trinity_mq.testing.virtual_time import run_virtually

URL = "amqp://a:b@127.0.0.1:1/%2F"


class Connecting:
    """A bus to a broker that does as it is told while it is connected to."""

    def __init__(self, broker: Callable[[], None]) -> None:
        self._broker = broker

    async def connect(self) -> None:
        self._broker()


def tapped(folder: Path, broker: Callable[[], None]) -> TapSource:
    (folder / "broker").mkdir(parents=True)
    (folder / "config.yaml").write_text("{name: first, model: {tiny: {}}}")
    config = load_config({"name": "second", "model": {"tiny": {}}, "source": {"tap": str(folder)}})
    unused: Any = None
    bus: Any = Connecting(broker)
    return TapSource(config, unused, Topology("second"), "trainer-0", unused, lambda *_: bus)


@virtually
async def test_one_that_ends_meanwhile_is_waited_for(tmp_path: Path) -> None:
    url, tries = tmp_path / "first" / "broker.url", []

    def broker() -> None:
        tries.append(url.read_text())
        if len(tries) == 1:
            url.unlink()
            raise AddressError(f"the broker's URL cannot be read from {url}")
        raise BusUnavailable("enough")

    source = tapped(tmp_path / "first", broker)
    url.write_text(URL)
    connecting = asyncio.create_task(source.run())
    await asyncio.sleep(60)
    assert not connecting.done()
    url.write_text(URL)  # the run goes on
    async with asyncio.timeout(60):
        with pytest.raises(BusUnavailable, match="enough"):
            await connecting
    assert tries == [URL, URL]


def test_an_address_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    def broker() -> None:
        raise AddressError("the URL begins with http")

    source = tapped(tmp_path / "first", broker)
    (tmp_path / "first" / "broker.url").write_text("http://127.0.0.1")
    with pytest.raises(AddressError, match="begins with http"):
        run_virtually(source.run())

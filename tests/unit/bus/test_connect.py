"""From a configuration to a bus, or to an error that says what to write."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinity_mq.bus import AddressError, Topology, broker_url, create_bus
from trinity_mq.bus.rabbit import RabbitBus
from trinity_mq.config.bus import BrokerConfig

TOPOLOGY = Topology("unit")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)


def test_the_configuration_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert broker_url(BrokerConfig()) is None
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://env/")
    assert broker_url(BrokerConfig()) == "amqp://env/"
    assert broker_url(BrokerConfig(url="amqp://config/")) == "amqp://config/"


async def test_makes_a_bus_with_the_configured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://user:secret@host:1234/%2F")
    bus = create_bus(BrokerConfig(max_message_bytes=100_000), TOPOLOGY, "test")
    assert isinstance(bus, RabbitBus)
    assert bus.max_message_bytes == 100_000
    assert not bus.usable
    assert bus.trouble == "not connected yet: connect() comes first"
    await bus.close()


def test_no_address_says_where_to_give_one() -> None:
    with pytest.raises(AddressError, match=r"set broker\.url or TRINITY_MQ_BROKER_URL to amqp://user:password@"):
        create_bus(BrokerConfig(), TOPOLOGY, "test")


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://user:secret@host", "begins with 'http'"),
        ("user:secret@host:5672", "wanted amqp or amqps"),
        ("amqp://user:secret@:5672", "names no host"),
        ("amqp://user:secret@host:port", "is not a URL"),
        ("amqp://user:secret@host:99999", "is not a URL"),
    ],
)
def test_a_wrong_address_is_explained_without_its_password(url: str, wrong: str) -> None:
    with pytest.raises(AddressError, match=wrong) as error:
        create_bus(BrokerConfig(url=url), TOPOLOGY, "test")
    assert "secret" not in str(error.value)


def test_naming_things_needs_no_amqp_client() -> None:
    program = "import sys, trinity_mq.bus; print({'aio_pika', 'aiormq', 'torch', 'yaml'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"

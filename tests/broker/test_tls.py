"""TLS to a real broker: who is trusted, who is asked for a certificate, and the write path under load."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from structlog.testing import capture_logs

from tests.waiting import until
from trinity_mq.bus import AddressError, create_bus
from trinity_mq.bus.base import BusRefused, Envelope
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.local_broker.ports import LOOPBACK, free_ports
from trinity_mq.testing.tcp_proxy import FaultProxy

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]

HOSTS = ("localhost", LOOPBACK)
PASSWORD = "correct-horse:/@battery"
NOW = datetime.datetime.now(datetime.UTC)


class TlsBroker:
    """A private node with a plain and a TLS port, whose certificate a test may replace."""

    def __init__(self, base: Path, *, asks: bool) -> None:
        self.base, self.ca = base, trustme.CA()
        self.ca_file, self.certificate, self.key = base / "ca.pem", base / "cert.pem", base / "key.pem"
        base.mkdir()
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.write(self.ca.issue_cert(*HOSTS))
        self.port = free_ports(1)[0]
        options = {"cacertfile": self.ca_file, "certfile": self.certificate, "keyfile": self.key}
        lines = [f"ssl_options.{name} = {path}" for name, path in options.items()]
        lines += [f"ssl_options.verify = {'verify_peer' if asks else 'verify_none'}"]
        lines += [f"ssl_options.fail_if_no_peer_cert = {str(asks).lower()}"]
        lines += [f"listeners.ssl.1 = {LOOPBACK}:{self.port}"]
        self.node = PrivateNode(base / "broker", password=PASSWORD, config="\n".join(lines))

    def write(self, issued: trustme.LeafCert) -> None:
        issued.private_key_pem.write_to_path(str(self.key))
        self.certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))

    async def show(self, issued: trustme.LeafCert) -> None:
        """Have the broker use another certificate from now on."""
        self.write(issued)
        await self.node.ctl("eval", "ssl:clear_pem_cache().")

    def url(self, scheme: str = "amqps", host: str = "localhost", port: int | None = None) -> str:
        return f"{scheme}://tmq@{host}:{self.port if port is None else port}/%2F"

    def config(self, url: str | None = None, **tls: object) -> BrokerConfig:
        password = self.base / "password"
        password.write_text(PASSWORD + "\n")
        given = {"ca_file": str(self.ca_file)} | tls if (url or "amqps").startswith("amqps") else {}
        fields = {"url": url or self.url(), "password_file": str(password), "connect_timeout": 20.0, "tls": given}
        return BrokerConfig.model_validate(fields)


def running(asks: bool) -> Iterator[TlsBroker]:
    folder = Path(tempfile.mkdtemp(prefix="tmq-"))
    broker = TlsBroker(folder / "t", asks=asks)
    try:
        asyncio.run(broker.node.launch())
        yield broker
    finally:
        asyncio.run(broker.node.kill())
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def broker() -> Iterator[TlsBroker]:
    yield from running(asks=False)


@pytest.fixture(scope="module")
def strict() -> Iterator[TlsBroker]:
    """It lets in only who shows a certificate of its own authority."""
    yield from running(asks=True)


def note(body: bytes, name: str) -> Envelope:
    return Envelope(body=body, kind="note", message_id=name)


async def once(config: BrokerConfig, topology: Topology) -> None:
    """Connect, publish, take it back."""
    bus = create_bus(config, topology, "test")
    try:
        await bus.connect()
        await bus.declare(topology.dead)
        assert await bus.publish("", topology.dead.name, note(b"over TLS", "n"))
        async with asyncio.timeout(10), await bus.consume(topology.dead) as feed:
            delivery = await anext(feed)
            await delivery.ack()
            assert delivery.body == b"over TLS"
    finally:
        await bus.close()


async def refusal(config: BrokerConfig, topology: Topology) -> str:
    """Return the one line that a connect is refused with, at once and for good."""
    bus = create_bus(config, topology, "test")
    try:
        async with asyncio.timeout(15):  # below the connect timeout: it is not tried again
            with pytest.raises(BusRefused) as refused:
                await bus.connect()
    finally:
        await bus.close()
    said = str(refused.value)
    assert "\n" not in said
    assert "battery" not in said
    return said


class TestTrust:
    @pytest.mark.parametrize("host", HOSTS)
    async def test_the_right_authority_and_name_connect(self, broker: TlsBroker, topology: Topology, host: str) -> None:
        await once(broker.config(broker.url(host=host)), topology)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            pytest.param(
                {"ca_file": "other.pem"}, ("does not come from a trusted authority", "set broker.tls.ca_file"),
                id="another authority",
            ),
            pytest.param(
                {"ca_file": None}, ("the authorities that this system trusts",), id="without a file the system's decide"
            ),
            pytest.param(
                {"server_name": "rabbit.example"},
                ("is for another name than 'rabbit.example'", "broker.tls.server_name"),
                id="another name",
            ),
        ],
    )  # fmt: skip
    async def test_who_is_not_trusted_is_told_the_setting(
        self,
        broker: TlsBroker,
        topology: Topology,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        changes: dict[str, object],
        said: tuple[str, ...],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        trustme.CA().cert_pem.write_to_path("other.pem")
        told = await refusal(broker.config(**changes), topology)
        assert [words for words in said if words not in told] == []

    async def test_a_name_of_its_own_is_asked_for_by_setting(self, broker: TlsBroker, topology: Topology) -> None:
        await broker.show(broker.ca.issue_cert("rabbit.example"))
        try:
            assert "is for another name than 'localhost'" in await refusal(broker.config(), topology)
            await once(broker.config(server_name="rabbit.example"), topology)
        finally:
            await broker.show(broker.ca.issue_cert(*HOSTS))

    async def test_an_expired_certificate(self, broker: TlsBroker, topology: Topology) -> None:
        old = broker.ca.issue_cert(
            *HOSTS, not_before=NOW - datetime.timedelta(9), not_after=NOW - datetime.timedelta(1)
        )
        await broker.show(old)
        try:
            said = await refusal(broker.config(), topology)
        finally:
            await broker.show(broker.ca.issue_cert(*HOSTS))
        assert "certificate has expired" in said
        assert "Renew it" in said

    async def test_verification_is_only_off_where_that_is_said_and_it_warns(
        self, broker: TlsBroker, topology: Topology
    ) -> None:
        with capture_logs() as logs:
            await once(broker.config(ca_file=None, verify=False), topology)
        assert {"event": "broker_not_verified", "log_level": "warning"}.items() <= logs[0].items()
        for query in ("?no_verify_ssl=1", "?cafile=/etc/x.pem"):
            with pytest.raises(AddressError, match=r"TLS is set in broker\.tls"):
                create_bus(broker.config(broker.url() + query), topology, "test")


class TestWrongPort:
    async def test_tls_to_the_plain_port(self, broker: TlsBroker, topology: Topology) -> None:
        said = await refusal(broker.config(broker.url(port=broker.node.ports["amqp"])), topology)
        assert "does not speak TLS, but broker.url begins with amqps" in said

    async def test_plain_to_the_tls_port(self, broker: TlsBroker, topology: Topology) -> None:
        said = await refusal(broker.config(broker.url("amqp")), topology)
        assert "speaks TLS, but broker.url begins with amqp: write amqps://" in said

    def test_a_password_is_not_sent_in_clear_where_tls_is_set(self, broker: TlsBroker, topology: Topology) -> None:
        config = broker.config().model_copy(update={"url": broker.url("amqp")})
        with pytest.raises(AddressError, match="the password would travel in clear"):
            create_bus(config, topology, "test")

    async def test_of_several_nodes_one_that_does_is_enough(self, broker: TlsBroker, topology: Topology) -> None:
        """In turn from a random one on, so each of these three is the first one at times."""
        urls = [broker.url(port=free_ports(1)[0]), broker.url(port=broker.node.ports["amqp"]), broker.url()]
        await once(broker.config(",".join(urls)), topology)


class TestOwnCertificate:
    def files(self, ca: trustme.CA, folder: Path) -> dict[str, object]:
        """Return the settings of a new certificate of ours, in two files."""
        issued = ca.issue_cert("agent.example")
        issued.private_key_pem.write_to_path(str(folder / "own-key.pem"))
        issued.cert_chain_pems[0].write_to_path(str(folder / "own-cert.pem"))
        return {"cert_file": str(folder / "own-cert.pem"), "key_file": str(folder / "own-key.pem")}

    async def test_with_it_we_are_let_in_and_else_told_what_is_wanted(
        self, strict: TlsBroker, topology: Topology, tmp_path: Path
    ) -> None:
        await once(strict.config(**self.files(strict.ca, tmp_path)), topology)
        without = await refusal(strict.config(), topology)
        assert "requires a client certificate" in without
        assert "set broker.tls.cert_file" in without
        another = await refusal(strict.config(**self.files(trustme.CA(), tmp_path)), topology)
        assert "does not accept the certificate" in another
        assert "ssl_options.cacertfile" in another

    async def test_files_are_read_anew_at_each_connect(
        self, strict: TlsBroker, topology: Topology, tmp_path: Path
    ) -> None:
        """Our certificate, our password and the authority change while we are connected; the next connect uses them."""
        settings = self.files(strict.ca, tmp_path)
        async with FaultProxy(strict.url()) as proxy:
            trust = tmp_path / "trust.pem"
            trust.write_bytes(strict.ca_file.read_bytes())
            bus = create_bus(strict.config(proxy.url, ca_file=str(trust), **settings), topology, "test")
            await bus.connect()
            try:
                await bus.declare(topology.dead)
                self.files(strict.ca, tmp_path)
                new = PASSWORD + "2"
                await strict.node.ctl("change_password", "tmq", new)
                (strict.base / "password").write_text(new)
                trust.write_bytes(trustme.CA().cert_pem.bytes() + strict.ca_file.read_bytes())
                proxy.cut()
                async with asyncio.timeout(30):
                    assert await bus.publish("", topology.dead.name, note(b"again", "n"))
            finally:
                await bus.close()
                await strict.node.ctl("change_password", "tmq", PASSWORD)

    async def test_half_rotated_files_heal(self, strict: TlsBroker, topology: Topology, tmp_path: Path) -> None:
        """While certificate and key do not fit each other there is no connection, and no end either."""
        settings = self.files(strict.ca, tmp_path)
        async with FaultProxy(strict.url()) as proxy:
            bus = create_bus(strict.config(proxy.url, **settings), topology, "test")
            await bus.connect()
            try:
                await bus.declare(topology.dead)
                (tmp_path / "own-key.pem").write_bytes(strict.ca.issue_cert("x").private_key_pem.bytes())
                proxy.cut()
                async with asyncio.timeout(30):
                    await until(lambda: "key values mismatch" in (bus.trouble or ""))
                    self.files(strict.ca, tmp_path)
                    await bus.wait_usable()
                assert await bus.publish("", topology.dead.name, note(b"again", "n"))
            finally:
                await bus.close()


async def test_a_connection_cut_in_the_middle_of_a_body(broker: TlsBroker, topology: Topology) -> None:
    """Held back until buffers are full and writes are partial, then cut: repeated, confirmed, whole."""
    bodies = {f"b{n}": bytes([n]) * 8 * 1024**2 for n in range(5)} | {f"s{n}": b"x" * n for n in range(500)}
    arrived: dict[str | None, bytes] = {}
    async with FaultProxy(broker.url()) as proxy:
        config = broker.config().model_copy(update={"max_message_bytes": 16 * 1024**2, "url": proxy.url})
        bus = create_bus(config, topology, "test")
        await bus.connect()
        try:
            await bus.declare(topology.dead)
            proxy.hold_requests()
            async with asyncio.timeout(90), asyncio.TaskGroup() as group:
                made = [
                    group.create_task(bus.publish("", topology.dead.name, note(body, name)))
                    for name, body in bodies.items()
                ]
                await asyncio.sleep(2)
                assert not all(task.done() for task in made)
                proxy.cut()
                async with await bus.consume(topology.dead, prefetch=200) as feed:
                    while len(arrived) < len(bodies):
                        delivery = await anext(feed)
                        arrived[delivery.message_id] = delivery.body
                        await delivery.ack()
        finally:
            await bus.close()
    assert arrived == bodies

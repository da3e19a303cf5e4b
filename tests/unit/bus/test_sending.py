"""What is written in one turn of the event loop leaves with one call, in order; publishes keep to their turn."""

from __future__ import annotations

import asyncio

from aiormq.connection import Connection

from trinity_mq.bus.rabbit.sending import PLACES, GatheringWriter, Places


class Wire(asyncio.Transport):
    """Remembers the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def write_eof(self) -> None:
        self.calls.append(b"<end>")

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.calls.append(b"<closed>")
        self.closing = True


def writer_on(wire: Wire) -> GatheringWriter:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    protocol.connection_made(wire)
    return GatheringWriter(wire, protocol, reader, loop)


async def test_one_call_for_what_is_written_in_one_turn() -> None:
    wire = Wire()
    writer = writer_on(wire)
    writer.write(b"a")
    writer.writelines([b"b", b"c"])
    assert wire.calls == []
    await asyncio.sleep(0)
    writer.write(b"d")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.calls == [b"abc", b"d"]
    writer.close()


async def test_drain_eof_and_close_send_what_is_gathered_first() -> None:
    wire = Wire()
    writer = writer_on(wire)
    writer.write(b"a")
    await writer.drain()
    writer.write(b"b")
    writer.write_eof()
    writer.write(b"c")
    writer.close()
    await asyncio.sleep(0)
    assert wire.calls == [b"a", b"b", b"<end>", b"c", b"<closed>"]


async def test_bytes_arrive_through_a_real_socket() -> None:
    got = bytearray()
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.read(-1))
        writer.close()
        over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, *server.sockets[0].getsockname())
    writer = GatheringWriter(transport, protocol, reader, loop)
    wanted = bytearray()
    for number in range(300):
        piece = number.to_bytes(2, "big") * (1 + number * 7)
        writer.write(piece)
        wanted += piece
        if number % 5 == 0:
            await writer.drain()
        if number % 3 == 0:
            await asyncio.sleep(0)
    writer.close()
    await over.wait()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    assert got == wanted


async def test_so_many_publishes_in_a_turn_and_the_others_in_order() -> None:
    places, turn, taken = Places(3), 0, []

    async def take(number: int) -> None:
        await places.take()
        taken.append((number, turn))

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(take(number))
        while len(taken) < 10:
            await asyncio.sleep(0)
            turn += 1
    assert [number for number, _ in taken] == list(range(10))
    turns = [turn for _, turn in taken]
    assert max(turns.count(each) for each in turns) <= 3
    assert turns[-1] - turns[0] <= 6, "a place is free again in the next turn"


async def test_who_is_cancelled_takes_no_place() -> None:
    places = Places(1)
    await places.take()
    first, second, third = (asyncio.create_task(places.take()) for _ in range(3))
    await asyncio.sleep(0)
    assert first.done(), "a new turn"
    assert not second.done()
    second.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert second.cancelled()
    assert third.done()


async def test_a_place_is_at_once_where_nobody_waits() -> None:
    places = Places(2)
    for _ in range(5):
        task = places.take()
        try:
            task.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_the_client_takes_so_many_without_a_pause() -> None:
    assert 0 < PLACES < Connection.FRAME_BUFFER_SIZE

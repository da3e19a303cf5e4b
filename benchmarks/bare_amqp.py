"""The bare aio-pika loop of bench_scheduling.py: the same messages of the same sizes, with nothing done to them.

A task is three messages, each persistent, mandatory and confirmed: a slice to a quorum queue; from there one of the
worker processes publishes a part to a second quorum queue and a result to a stream, then acknowledges the slice. The
loop reads both, acknowledges the parts, and counts results. Nothing is encoded, decoded, checked or repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator

import aio_pika
from aio_pika.abc import AbstractIncomingMessage, HeadersType
from aiormq.abc import FieldTable

TASKS, PARTS, RESULTS = "bare.tasks", "bare.parts", "bare.results"
QUORUM: FieldTable = {"x-queue-type": "quorum"}
STREAM: FieldTable = {"x-queue-type": "stream"}
WINDOW = 128
"""Slices published and not yet confirmed, as the Scheduler has them."""


def message(size: int) -> aio_pika.Message:
    """Return a persistent message of ``size`` bytes with as many headers as ours have."""
    headers: HeadersType = {"kind": "bare", "version": 1, "batch": 1, "ticket": "0" * 32, "attempt": "0" * 32}
    return aio_pika.Message(
        os.urandom(size),
        headers=headers,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        message_id=os.urandom(16).hex(),
    )


async def work(url: str, prefetch: int, part: int, result: int, milliseconds: int) -> None:
    """Answer slices until killed, each after so many milliseconds."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=prefetch)
        exchange = channel.default_exchange

        async def answer(slice_: AbstractIncomingMessage) -> None:
            if milliseconds:
                await asyncio.sleep(milliseconds / 1e3)
            await exchange.publish(message(part), PARTS)
            await exchange.publish(message(result), RESULTS)
            await slice_.ack()

        queue = await channel.declare_queue(TASKS, durable=True, arguments=QUORUM)
        await queue.consume(answer)
        await asyncio.Future()


@contextlib.asynccontextmanager
async def workers(count: int, *arguments: object) -> AsyncIterator[None]:
    """Have worker processes while in the block."""
    command = [sys.executable, __file__, *map(str, arguments)]
    processes = [await asyncio.create_subprocess_exec(*command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


async def rate(
    url: str, tasks: int, *, runners: int, prefetch: int, slice_: int, part: int, result: int, seconds: float = 0.0
) -> float:
    """Return tasks a second; the sizes are bytes of a body, ``seconds`` is the time that a worker holds a task."""
    arguments = (url, prefetch, part, result, round(seconds * 1e3))
    async with await aio_pika.connect(url) as connection, workers(runners, *arguments):
        publishing = await connection.channel()
        consuming = await connection.channel()
        await consuming.set_qos(prefetch_count=256)
        done = asyncio.Semaphore(0)

        async def settle(incoming: AbstractIncomingMessage) -> None:
            await incoming.ack()

        async def count(incoming: AbstractIncomingMessage) -> None:
            await incoming.ack()
            done.release()

        await publishing.declare_queue(TASKS, durable=True, arguments=QUORUM)
        parts = await consuming.declare_queue(PARTS, durable=True, arguments=QUORUM)
        results = await consuming.declare_queue(RESULTS, durable=True, arguments=STREAM)
        await parts.consume(settle)
        await results.consume(count, arguments={"x-stream-offset": "next"})
        left = iter(range(tasks))

        async def publish() -> None:
            for _ in left:
                await publishing.default_exchange.publish(message(slice_), TASKS)

        async def run(number: int) -> float:
            nonlocal left
            left, start = iter(range(number)), time.perf_counter()
            await asyncio.gather(*(publish() for _ in range(WINDOW)))
            for _ in range(number):
                await done.acquire()
            return time.perf_counter() - start

        await run(min(200, tasks))  # the workers are up, the queues warm
        seconds = await run(tasks)
        for queue in (TASKS, PARTS, RESULTS):
            await publishing.queue_delete(queue)
        return tasks / seconds


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], *map(int, sys.argv[2:])))

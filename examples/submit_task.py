"""Publish a task to a running trinity-mq and wait for its outcome. Only an AMQP client is needed.

    trinity-mq run examples/arithmetic.yaml            # in one terminal
    python examples/submit_task.py --broker "$(cat runs/arithmetic/broker.url)" --run arithmetic

Any language with an AMQP 0-9-1 client can do the same: a JSON body to the exchange tmq.<run>.tasks under the key
"submit", with the name of your own queue in reply_to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid

import aio_pika


async def submit(broker: str, run: str, question: str, answer: str, seconds: float) -> dict[str, object]:
    """Return the outcome of one task."""
    async with await aio_pika.connect(broker) as connection:
        # a message that reaches no queue is returned, and raises an error here
        channel = await connection.channel(on_return_raises=True)
        replies = await channel.declare_queue(exclusive=True)
        tasks = await channel.get_exchange(f"tmq.{run}.tasks", ensure=False)
        submission = uuid.uuid4().hex
        body = {"task": {"raw_task": {"question": question, "answer": answer}}}
        message = aio_pika.Message(
            json.dumps(body).encode(),
            content_type="application/json",
            message_id=submission,  # a second message with this id is not executed
            correlation_id=submission,
            reply_to=replies.name,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            headers={"kind": "task_submission", "version": 1},
        )
        await tasks.publish(message, routing_key="submit", mandatory=True)
        print(f"published {submission}", file=sys.stderr)
        async with asyncio.timeout(seconds), replies.iterator() as outcomes:
            async for outcome in outcomes:
                async with outcome.process():
                    if outcome.correlation_id == submission:
                        return decode(outcome)
    raise RuntimeError("the reply queue was closed")


def decode(message: aio_pika.abc.AbstractIncomingMessage) -> dict[str, object]:
    """Return the body of an outcome, a map: in JSON if its content type says so, else in msgpack."""
    if message.content_type == "application/json":
        found: dict[str, object] = json.loads(message.body)
        return found
    import msgpack

    unpacked: dict[str, object] = msgpack.unpackb(message.body)
    return unpacked


def main() -> None:
    """Read the command line and print the outcome as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", required=True, help="amqp://user:password@host:port/vhost")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--question", default="+372=")
    parser.add_argument("--answer", default="7")
    parser.add_argument("--wait", type=float, default=120.0, help="seconds")
    words = parser.parse_args()
    outcome = asyncio.run(submit(words.broker, words.run, words.question, words.answer, words.wait))
    print(json.dumps(outcome, indent=2))


if __name__ == "__main__":
    main()

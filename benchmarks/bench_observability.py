"""Measures the cost of seeing a run: tokens a second with everything on that shows it, against the same with all off.

    python benchmarks/bench_observability.py [--steps 30] [--rounds 3] [--parts trace dash ...] [--sample 0.1]
                                             [--set KEY=VALUE ...] [--check]

*on* is a run with ``monitor.trace`` and ``monitor.otlp`` to a receiver on this machine, which gets one of ten batches,
and ``trinity-mq exporter`` and ``trinity-mq dash`` beside it; ``--parts`` chooses among these. Runs are of
examples/arithmetic.yaml without evaluations. On and off take turns, and which is first changes from round to round.
Tokens are those of the train steps but the first third, so that the start of further processes, once for a run of any
length, is left out. The ratio is the
median of those of the rounds, whose two runs are side by side: a machine's speed changes over minutes.
``--set`` changes settings of all runs: by default a step takes an eighth of a second and keeps two cores busy, so that
what is done for each message and each batch weighs most; a larger model makes steps that are more like those of others.
Processor seconds are those of all processes of a run and of all beside it, from start to end.

``--check`` exits with 1 if the ratio is below 0.97.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
PARTS = ("trace", "otlp", "exporter", "dash")
BESIDE = ("exporter", "dash")
BOUND = 0.97
SKIPPED = 1 / 3
"""Share of the train steps before the time that is measured."""
LIMIT = 900.0
"""Seconds after which a run is given up."""
POLL = 0.2
"""Seconds between two looks for a run's broker."""


@dataclass
class Collector:
    """Counts the spans that it gets."""

    url: str = ""
    spans: int = 0

    async def take(self, request: web.Request) -> web.Response:
        """Answer a request of OTLP."""
        body = await request.read()
        if body[:2] == b"\x1f\x8b":  # aiohttp has decompressed it, or not
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        self.spans += sum(len(scope.spans) for one in message.resource_spans for scope in one.scope_spans)
        return web.Response(content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Have a receiver of OTLP listen meanwhile."""
    collector = Collector()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


@asynccontextmanager
async def watched(folder: Path, commands: Sequence[str]) -> AsyncIterator[None]:
    """Run the commands that watch a run beside it, once its broker is known.

    Raises:
        SystemExit: One of them ended before the run did.
    """
    processes: dict[str, asyncio.subprocess.Process] = {}

    async def start() -> None:
        while not (folder / "broker.url").exists():  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(POLL)
        for name in commands:
            words = [sys.executable, "-m", "trinity_mq.cli.main", name, str(folder), "--port", "0"]
            processes[name] = await asyncio.create_subprocess_exec(
                *words, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
            )

    starting = asyncio.create_task(start())
    try:
        yield
        if ended := {name: one.returncode for name, one in processes.items() if one.returncode}:
            raise SystemExit(f"beside the run ended with an error: {ended}")
    finally:
        starting.cancel()
        for one in processes.values():
            if one.returncode is None:
                one.terminate()
            await one.wait()


@dataclass(frozen=True)
class Measured:
    """One run."""

    speed: float
    """Tokens a second."""
    processor: float
    """Seconds of all processes."""
    spans: int
    """Spans that came to the receiver."""


async def run(steps: int, parts: Sequence[str], sample: float, more: Sequence[str]) -> Measured:
    """Do a whole run with these parts of :data:`PARTS` on, ``sample`` of its batches exported, and ``more`` settings.

    Raises:
        SystemExit: It ended badly; with its output.
    """
    settings = [f"buffer.total_steps={steps}", "explorer.eval_on_startup=false", f"explorer.eval_interval={steps + 1}"]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tmq-observability-"))) / "run"
        collector = await stack.enter_async_context(collecting())
        if "trace" in parts:
            settings.append("monitor.trace=true")
        if "otlp" in parts:
            settings.append(f"monitor.otlp={{endpoint: {collector.url}, sample: {sample}}}")
        before = processor_seconds()
        async with LocalRun(EXAMPLE, folder, [*settings, *more]) as whole:
            async with watched(folder, [name for name in BESIDE if name in parts]):
                code, output = await whole.ended(LIMIT)
        if code != 0:
            raise SystemExit(f"the run ended with {code}:\n{output}")
        return Measured(tokens_a_second(whole.metrics()), processor_seconds() - before, collector.spans)


def processor_seconds() -> float:
    """Return the processor time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tokens_a_second(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens of the train steps after the first third, by the seconds that these took."""
    steps = sorted((line for line in lines if "trainer/step" in line), key=lambda line: line["time"])
    skipped = max(1, round(SKIPPED * len(steps)))
    tokens = sum(line["data/trained_tokens"] for line in steps[skipped:])
    return float(tokens / (steps[-1]["time"] - steps[skipped - 1]["time"]))


async def compare(steps: int, rounds: int, parts: Sequence[str], sample: float, more: Sequence[str] = ()) -> float:
    """Print the figures of each round; return the ratio of the medians."""
    found: dict[bool, list[Measured]] = {True: [], False: []}
    print(f"on: {', '.join(parts)}; {sample:g} of the batches exported; {steps} steps, {os.cpu_count()} cores")
    for number in range(rounds):
        for on in (False, True) if number % 2 == 0 else (True, False):
            began = time.monotonic()
            one = await run(steps, parts if on else (), sample, more)
            found[on].append(one)
            what = f"on,  {one.spans} spans" if on else "off"
            spent = f"{one.processor:.1f} processor seconds, {time.monotonic() - began:.0f} s"
            print(f"round {number + 1}: {one.speed:7.0f} tokens/s {what} ({spent})", flush=True)
            if on and "otlp" in parts and not one.spans:
                raise SystemExit("no span came to the receiver: nothing was compared")
    pairs = list(zip(found[True], found[False], strict=True))
    ratio = statistics.median(on.speed / off.speed for on, off in pairs)
    spent_by = statistics.median(on.processor / off.processor for on, off in pairs)
    print(f"on/off: {ratio:.3f}, wanted at least {BOUND}; processor seconds {spent_by:.3f}")
    return ratio


def main() -> int:
    """Run the benchmark."""
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="train steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs with all on, and as many with all off")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is on (default: all)")
    parser.add_argument("--sample", type=float, default=0.1, help="share of the batches that are exported")
    parser.add_argument("--set", nargs="+", default=(), metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if the ratio is below {BOUND}")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, to see that it runs")
    figures.add_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds, options.sample = 6, 1, 1.0
    ratio = asyncio.run(compare(options.steps, options.rounds, options.parts, options.sample, options.set))
    figures.write(options, {"tokens/s with all on, of all off": ratio})
    return 1 if options.check and ratio < BOUND else 0


if __name__ == "__main__":
    sys.exit(main())

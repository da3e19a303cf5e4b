"""Each channel of the weight sync against the plainest way to move the same bytes, in one run.

    python benchmarks/bench_sync.py [--megabytes 500] [--rounds 5] [--quick] [--check] [--json FILE]

Two processes on this machine, a trainer and an engine, take turns: our broadcast and ``torch.distributed.broadcast`` of
one flat tensor that both have; our files, our stream, and a plain copy of one file. Medians. *transfer* is from "go"
until the engine has all tensors, verified, beside its model: the gate's messages, and the copying into the model, are
not in it. *staging* is what the trainer does before, while engines serve on; the collective's copy goes on during its
transfer, so that *both* is what counts there. *gather* is what a trainer on two ranks does before that: all weights
are gathered from row shards, by one command to the other rank per block of 256 MiB and, as baseline, by one per
tensor. ``--check`` exits with 1 if the collective takes more than 1.3 times its baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared as exported
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trinity_mq.config import load_config
from trinity_mq.sync.channels.base import Channel, Manifest, Tensors
from trinity_mq.sync.channels.buckets import plan
from trinity_mq.sync.channels.factory import open_channel
from trinity_mq.sync.channels.receiver import WeightReceiver
from trinity_mq.training.learner import GATHER_BYTES
from trinity_mq.training.parallel.ranks import PARENT_VARIABLE, Ranks
from trinity_mq.training.parallel.sharding import gathered

LAYERS = 24
LIMIT = 1.3
WARM = 2
METHODS = ("collective", "checkpoint", "memory")


def model(megabytes: int) -> Tensors:
    """Return float32 tensors in the proportions of a transformer: many small ones, some large ones."""
    width = max(8, int((megabytes * 2**20 / 4 / LAYERS / 12) ** 0.5))
    tensors = []
    for layer in range(LAYERS):
        for name, shape in (("norm", (width,)), ("attention", (4 * width, width)), ("mlp", (8 * width, width))):
            tensors.append((f"{layer}.{name}", torch.full(shape, float(layer))))
    return tensors


def manifest_of(tensors: Tensors) -> Manifest:
    """Return what travels."""
    return [(name, "float32", list(tensor.shape)) for name, tensor in tensors]


class Shards:
    """One of two ranks' shards of the weights, which rank 0 gathers by commands to rank 1."""

    def __init__(self, tensors: Tensors, ranks: Ranks) -> None:
        ranks.connect_store()
        mesh = init_device_mesh("cpu", (2,))
        self._ranks = ranks
        self._sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors}
        blocks = [[name for name, _, _ in bucket.entries] for bucket in plan(manifest_of(tensors), GATHER_BYTES)]
        self._commands = {"block": blocks, "tensor": [[name] for name, _ in tensors]}

    def gather(self, by: str) -> float:
        """Gather all weights as rank 0 or rank 1; return the last value."""
        last: Tensor = torch.empty(0)
        for names in self._commands[by]:
            if self._ranks.rank:
                announced = self._ranks.next(60.0).arguments["weights"]
                with self._ranks.voting("gather"):
                    last = self._whole(announced)
            else:
                with self._ranks.command("gather", weights=names):
                    last = self._whole(names)
        return float(last.view(-1)[-1])

    def _whole(self, names: list[str]) -> Tensor:
        return [gathered(self._sharded[name]) for name in names][-1]


# -- the engine


def engine(port: int) -> None:
    """Take what the trainer names, line by line, and answer each with a line."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    asyncio.run(_serve())
    os._exit(0)


async def _serve() -> None:
    receiver, flat = WeightReceiver(), torch.empty(0)
    shards: Shards | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if "plain" in asked:
            if flat.numel() != asked["plain"]:
                flat = torch.zeros(asked["plain"])
            dist.broadcast(flat, 0)
            seen = float(flat[-1])
        elif "gather" in asked:
            if shards is None:
                os.environ |= {PARENT_VARIABLE: "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(asked["port"])}
                shards = Shards(model(asked["megabytes"]), Ranks(1, 2))
            seen = shards.gather(asked["gather"])
        else:
            tensors = await receiver.receive(asked)
            seen = float(tensors[asked["manifest"][-1][0]].view(-1)[-1])
        print(json.dumps({"last": seen}), flush=True)


# -- the trainer


class Bench:
    """The trainer's side, and the engine's process."""

    def __init__(self, tensors: Tensors, folder: Path, child: asyncio.subprocess.Process) -> None:
        self.tensors, self.manifest, self.folder, self._child = tensors, manifest_of(tensors), folder, child
        self.flat = torch.cat([tensor.view(-1) for _, tensor in tensors])
        self.file = folder / "plain"
        self.file.write_bytes(self.flat.numpy().data)
        self.times: dict[str, list[float]] = {}
        self.shards: Shards | None = None
        self.gathered_value = 0.0
        self._step = 0

    def note(self, name: str, seconds: float) -> None:
        """Remember a measurement."""
        self.times.setdefault(name, []).append(seconds * 1000)

    async def ask(self, what: dict[str, Any]) -> None:
        """Tell the engine to receive."""
        assert self._child.stdin is not None
        self._child.stdin.write((json.dumps(what) + "\n").encode())
        await self._child.stdin.drain()

    async def answered(self) -> None:
        """Wait until the engine has everything, and see that it is the last version's."""
        seen = await self._answer()
        if seen != self.last:
            raise SystemExit(f"the engine has {seen}, wanted {self.last}: the transfer is wrong")

    async def _answer(self) -> float:
        assert self._child.stdout is not None
        return float(json.loads(await self._child.stdout.readline())["last"])

    @property
    def last(self) -> float:
        """A number that tells versions apart."""
        return float(self.flat[-1])

    def step(self) -> None:
        """Change the weights."""
        self._step += 1
        self.tensors[-1][1].fill_(float(self._step))
        self.flat[-1] = float(self._step)

    async def plain_broadcast(self) -> None:
        """One broadcast of one flat tensor."""
        started = time.perf_counter()
        await self.ask({"plain": self.flat.numel()})
        await asyncio.to_thread(dist.broadcast, self.flat, 0)
        await self.answered()
        self.note("plain broadcast", time.perf_counter() - started)

    async def plain_copy(self) -> None:
        """One copy of one file, with and without waiting for the disk."""
        target = self.folder / "copy"
        started = time.perf_counter()
        await asyncio.to_thread(shutil.copyfile, self.file, target)
        self.note("plain copy", time.perf_counter() - started)
        with target.open("rb") as file:
            await asyncio.to_thread(os.fsync, file.fileno())
        self.note("plain copy, fsync", time.perf_counter() - started)
        target.unlink()

    async def gather(self, by: str, megabytes: int) -> None:
        """Gather all weights from two ranks, by block or by tensor."""
        if self.shards is None:
            ranks = Ranks(0, 2)
            await self.ask({"gather": by, "megabytes": megabytes, "port": ranks.host()})
            self.shards = await asyncio.to_thread(Shards, model(megabytes), ranks)
            self.gathered_value = await asyncio.to_thread(self.shards.gather, by)
            await self._answer()
        started = time.perf_counter()
        await self.ask({"gather": by, "megabytes": megabytes})
        await asyncio.to_thread(self.shards.gather, by)
        if await self._answer() != self.gathered_value:
            raise SystemExit("the ranks have gathered different weights")
        self.note(f"gather by {by}", time.perf_counter() - started)

    async def ours(self, method: str, channel: Channel) -> None:
        """One version by a channel."""
        version = (1, self._step)
        started = time.perf_counter()
        where = await channel.offer(version, self.tensors, self.manifest)
        staged = time.perf_counter()
        about = {"epoch": 1, "attempt": self._step, "rank": 1, "world": 2, "seconds": 60.0, "manifest": self.manifest}
        await self.ask({**where, **about})
        await channel.broadcast(self.tensors, self.manifest, 1, self._step, 2)
        await self.answered()
        arrived = time.perf_counter()
        await channel.committed(version, self.tensors, self.manifest)
        self.note(f"{method} staging", staged - started)
        self.note(f"{method} transfer", arrived - staged)
        self.note(f"{method} both", arrived - started)

    def median(self, name: str) -> float:
        """Return the middle measurement, those that warm up left out, in milliseconds."""
        return statistics.median(self.times[name][WARM:])

    def ratio(self, ours: str, plain: str) -> float:
        """Return the middle of the ratios, round by round: both met the same noise."""
        pairs = list(zip(self.times[ours], self.times[plain], strict=True))[WARM:]
        return statistics.median(one / other for one, other in pairs)


async def run(megabytes: int, rounds: int) -> Bench:
    """Measure; the first rounds only warm up: they take the memory that the others fill again."""
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--engine", str(store.port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await asyncio.to_thread(dist.init_process_group, "gloo", store=store, rank=0, world_size=2)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bench = Bench(model(megabytes), folder, child)
            channels = {method: open_channel(_config(method, folder)) for method in METHODS}
            for _ in range(WARM + rounds):
                ours = [functools.partial(bench.ours, method, channel) for method, channel in channels.items()]
                gathers = [functools.partial(bench.gather, by, megabytes) for by in ("tensor", "block")]
                turns: list[Callable[[], Awaitable[None]]] = [bench.plain_broadcast, *ours, bench.plain_copy, *gathers]
                for turn in turns:
                    bench.step()
                    await turn()
            for channel in channels.values():
                await channel.close()
    finally:
        child.kill()
        await child.wait()
    return bench


def _config(method: str, folder: Path) -> Any:
    return load_config({"model": {"tiny": {}}, "run_dir": str(folder), "synchronizer": {"sync_method": method}})


def report(bench: Bench) -> dict[str, float]:
    """Print the table; returns its ratios to the baselines, by name."""
    ratios: dict[str, float] = {}
    size = bench.flat.numel() * 4 / 2**20
    rounds = len(bench.times["plain broadcast"]) - WARM
    print(f"{size:.0f} MiB in {len(bench.tensors)} tensors, medians of {rounds} rounds, ms")
    print(f"{'':12} {'staging':>9} {'transfer':>9} {'both':>9}   baseline")
    for method in METHODS:
        staging, transfer, both = (bench.median(f"{method} {part}") for part in ("staging", "transfer", "both"))
        if method == "collective":
            compared = [("plain broadcast", "transfer"), ("plain broadcast", "both")]
        else:
            compared = [("plain copy", "both"), ("plain copy, fsync", "both")]
        found = {(plain, part): bench.ratio(f"{method} {part}", plain) for plain, part in compared}
        ratios |= {f"{method} {part}, of a {plain}": ratio for (plain, part), ratio in found.items()}
        baselines = ", ".join(
            f"{plain} {bench.median(plain):.0f}: {part} x {ratio:.2f}" for (plain, part), ratio in found.items()
        )
        print(f"{method:12} {staging:9.0f} {transfer:9.0f} {both:9.0f}   {baselines}")
    ratio = ratios["gather by block, of a gather by tensor"] = bench.ratio("gather by block", "gather by tensor")
    by_block, by_tensor = bench.median("gather by block"), bench.median("gather by tensor")
    print(f"{'gather':12} {by_block:9.0f} {'':9} {'':9}   by tensor {by_tensor:.0f}: x {ratio:.2f}")
    return ratios


def main() -> int:
    """Run; returns the exit code."""
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="8 MB, two rounds: does it run?")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if the collective is over {LIMIT} times")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    figures.add_option(parser)
    options = parser.parse_args()
    if options.engine is not None:
        engine(options.engine)
    torch.set_num_threads(1)
    megabytes, rounds = (8, 2) if options.quick else (options.megabytes, options.rounds)
    bench = asyncio.run(run(megabytes, rounds))
    ratios = report(bench)
    figures.write(options, ratios)
    sys.stdout.flush()
    # gloo's threads may abort a process that takes itself apart
    os._exit(1 if options.check and ratios["collective transfer, of a plain broadcast"] > LIMIT else 0)


if __name__ == "__main__":
    sys.exit(main())

"""The steps of ``scripts/gpu/check``: ``python -m scripts.gpu.steps --device cuda|cpu STEP``.

Each step writes its figures to the file in ``TRINITY_MQ_FIGURES`` as JSON lines. On a CPU the sizes are tiny, and
figures of speed and device memory are not judged. The expected values of a GPU are estimates for an H100 or H200: no
GPU has confirmed them yet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from scripts.gpu.checklist import Figure, holds, within

ROOT = Path(__file__).parents[2]
QWEN = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""Shapes of Qwen2.5."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
PEAK_TFLOPS = 989.0
"""Dense bfloat16 of an H100 or H200, from NVIDIA's data sheet."""
GB = 1e9


class Bench:
    """The device of a step, and the sink of its figures."""

    def __init__(self, device: Literal["cuda", "cpu"]) -> None:
        self.device = device
        self.cuda = device == "cuda"

    def add(self, figure: Figure) -> None:
        """Report a figure."""
        with Path(os.environ["TRINITY_MQ_FIGURES"]).open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")
        print(figure, flush=True)

    def within(self, name: str, value: float, low: float, high: float, unit: str = "") -> None:
        """Report a figure that only a GPU can confirm."""
        self.add(within(name, value, low, high, unit, judged=self.cuda))

    def needs_cuda(self, name: str) -> bool:
        """Report that a figure needs a GPU, and return whether there is none."""
        if not self.cuda:
            self.add(Figure(name, "not run", "needs CUDA", "not judged"))
        return not self.cuda

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of some work, including the work of the GPU."""
        import torch

        began = time.perf_counter()
        work()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began


# -- models and data


def make_folder(folder: Path, name: str, bench: Bench) -> Path:
    """Write a Qwen2.5 model with random weights in bfloat16; on a CPU a tiny model with the same architecture."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from trinity_mq.config import load_config
    from trinity_mq.models import ensure_model_folder

    vocabulary = 151936 if bench.cuda else 512
    shape = QWEN[name] if bench.cuda else TINY
    config = Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=True, vocab_size=vocabulary)
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    tokenizer = ensure_model_folder(load_config({"model": {"tiny": {}}}).model, folder / "tokenizer", 0)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return folder


def configuration(folder: Path, bench: Bench, **trainer: Any) -> Any:
    """Return the configuration of a learner in bfloat16."""
    from trinity_mq.config import Config

    return Config.model_validate(
        {
            "model": {"model_path": str(folder), "device": bench.device, "dtype": "bfloat16", "max_model_len": 4096},
            "algorithm": {"repeat_times": 2},
            "trainer": {"peak_tflops": PEAK_TFLOPS, **trainer},
        }
    )


def answers(tokens: int, length: int) -> list[Any]:
    """Return sampled answers of random tokens, ``tokens`` in all."""
    from trinity_mq.experience import EID, Experience

    r = random.Random(0)
    return [
        Experience(
            eid=EID(batch=1, task=0, run=run),
            tokens=[r.randrange(400) for _ in range(length)],
            prompt_length=8,
            logprobs=[-6.0 + r.uniform(-0.3, 0.3) for _ in range(length - 8)],
            advantages=[r.uniform(-1, 1)] * (length - 8),
            temperature=1.0,
        )
        for run in range(tokens // length)
    ]


@contextlib.contextmanager
def opened(config: Any, folder: Path) -> Iterator[tuple[asyncio.Runner, Any]]:
    """Open a learner, and free its memory at the end."""
    import torch

    from trinity_mq.training.learner import TorchLearner

    with asyncio.Runner() as runner:
        learner = TorchLearner(config, folder, None)
        runner.run(learner.open(None))
        try:
            yield runner, learner
        finally:
            runner.run(learner.close())
    del learner
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_weights(billions: float, bench: Bench) -> list[tuple[str, Any]]:
    """Return bfloat16 matrices on the device, as many as a model of this size has."""
    import torch

    rows = 4096
    columns = int(billions * 1e9 / rows / 32) if bench.cuda else 64
    return [(f"weight.{n}", torch.zeros(rows, columns, dtype=torch.bfloat16, device=bench.device)) for n in range(32)]


# -- the steps


def fork(bench: Bench, folder: Path) -> None:
    """Fork a process from the preloaded server, without and with a dummy flash-attn distribution."""
    from trinity_mq.cli.run import PRELOADED
    from trinity_mq.runtime.processes.fork_server_process import ForkServer
    from trinity_mq.runtime.processes.forking import ForkedProcess, start_forked

    packages = folder / "packages"
    about = packages / "flash_attn-2.8.3.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (about / "top_level.txt").write_text("flash_attn\n")
    (packages / "flash_attn.py").touch()

    async def child(server: ForkServer, output: Path) -> tuple[bool, int]:
        command = (sys.executable, "-m", "scripts.gpu.steps", "--device", bench.device, "child")
        with output.open("wb") as file:
            process = await start_forked(server)(command, dict(os.environ), file)
        return isinstance(process, ForkedProcess), await process.wait()

    for name, path in (("without flash-attn", ""), ("with flash-attn", f":{packages}")):
        os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "") + path
        output = folder / f"{name}.log"
        with ForkServer.start(PRELOADED) as server:
            forked, code = asyncio.run(child(server, output))
        print(output.read_text(errors="replace"))
        bench.add(holds(f"{name}: the process was forked", forked, True))
        bench.add(holds(f"{name}: exit code of a computation on {bench.device}", code, 0))


def child(bench: Bench, _folder: Path) -> None:
    """Compute on the device, in a forked process."""
    import torch

    assert torch.ones(8, device=bench.device).sum().item() == 8.0


def tests(bench: Bench, folder: Path) -> None:
    """Run tests/gpu."""
    if bench.needs_cuda("tests/gpu"):
        return
    report = folder / "junit.xml"
    options = ["-q", "--timeout=140", "--durations=20", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", "tests/gpu", *options], cwd=ROOT, check=False)
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    cases = list(suite)
    failed = [case.get("name", "") for case in cases if any(part.tag in {"failure", "error"} for part in case)]
    bench.add(holds(f"failed of {len(cases)} tests", ", ".join(failed) or "none", "none"))
    skipped = sum(part.tag == "skipped" for case in cases for part in case)
    bench.add(within("skipped tests (two GPUs, bitsandbytes)", skipped, 0, 4, ""))


def memory(bench: Bench, folder: Path) -> None:
    """Compare the peak memory of a train step with the estimate."""
    import torch

    from trinity_mq.operations.memory import estimate_memory

    for name in QWEN:
        model = make_folder(folder / name, name, bench)
        for checkpointing in (False, True):
            trainer = {"gradient_checkpointing": checkpointing, "max_tokens_per_micro_batch": 8192}
            config = configuration(model, bench, **trainer)
            parts = estimate_memory(config, bench.device).trainer or {}
            expected = sum(size or 0 for size in parts.values()) / GB
            with opened(config, model) as (runner, learner):
                if bench.cuda:
                    torch.cuda.reset_peak_memory_stats()
                metrics = runner.run(learner.step(answers(16384 if bench.cuda else 256, 64), 1))
            label = f"{name}, checkpointing {'on' if checkpointing else 'off'}"
            bench.add(holds(f"{label}: optimizer steps", metrics["actor/optimizer_steps"], 1.0))
            peak = torch.cuda.max_memory_allocated() / GB if bench.cuda else 0.0
            bench.within(f"{label}: peak memory", peak, 0.85 * expected, 1.15 * expected, "GB")


def speed(bench: Bench, folder: Path) -> None:
    """Measure train steps with packed and padded rows, and count the waits of the CPU for the GPU."""
    import torch

    model = make_folder(folder / "model", "1.5B", bench)
    experiences = answers(65536, 1024) if bench.cuda else answers(512, 64)
    rates = {}
    for packing in ("padded", "packed"):
        trainer = {"packing": packing, "max_tokens_per_micro_batch": 8192, "gradient_checkpointing": False}
        with opened(configuration(model, bench, **trainer), model) as (runner, learner):
            runs = [runner.run(learner.step(experiences, step)) for step in range(1, 4)]
            best = max(runs[1:], key=lambda metrics: metrics["perf/tokens_per_second"])
            rates[packing] = best["perf/tokens_per_second"]
            bench.within(f"{packing}: tokens a second", rates[packing], 15e3, 60e3)
            bench.within(f"{packing}: share of the peak (MFU)", best["perf/mfu"], 0.15, 0.55)
            if packing == "padded" and not bench.needs_cuda("waits of the CPU for the GPU in a micro-batch"):
                with warnings.catch_warnings(record=True) as waits:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn")
                    runner.run(learner.step(experiences, 4))
                    torch.cuda.set_sync_debug_mode("default")
                bench.within("waits of the CPU for the GPU in a micro-batch", len(waits) / 8, 0, 90)
    bench.within("packed, by padded at equal lengths", rates["packed"] / rates["padded"], 0.75, 1.1)


def ranks(bench: Bench, _folder: Path) -> None:
    """Shard a model over one rank, and compare device, logits and gradients with the whole model."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, Qwen2Config

    from trinity_mq.training.parallel.sharding import blocks, gathered, shard

    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    store = dist.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]  # public, but not exported
    device = torch.device(bench.device, 0) if bench.cuda else torch.device("cpu")
    dist.init_process_group("nccl" if bench.cuda else "gloo", store=store, rank=0, world_size=1)
    config = Qwen2Config(**TINY, num_key_value_heads=2, vocab_size=512)
    tokens = torch.arange(300, device=device)[None]
    results = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
        if is_sharded:
            shard(model, blocks(model), device, 1, torch.float32)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients = [gathered(weight.grad) for weight in model.parameters()]
        results.append((loss.item(), gradients))
        if is_sharded:
            parts = {str(gathered(weight).device) for weight in model.parameters()}
            bench.add(holds("device of the parameters", ", ".join(sorted(parts)), str(device)))
    dist.destroy_process_group()
    (whole, gradients), (sharded, sharded_gradients) = results
    difference = max((a - b).abs().max().item() for a, b in zip(gradients, sharded_gradients, strict=True))
    bench.add(within("difference of the loss", abs(whole - sharded), 0.0, 1e-5))
    bench.add(within("largest difference of a gradient", difference, 0.0, 1e-5))


def sync(bench: Bench, _folder: Path) -> None:
    """Copy weights to the host as weight syncs do, and broadcast them to a world of one."""
    import torch

    from trinity_mq.sync.channels.buckets import SpareBuffers, plan
    from trinity_mq.sync.channels.collective.channel import CollectiveChannel
    from trinity_mq.sync.channels.memory.channel import MemoryChannel
    from trinity_mq.sync.channels.memory.host_copy import HostCopy

    bucket_bytes = 64 * 2**20
    for billions in (1.55, 7.6):
        weights = device_weights(billions, bench)
        manifest = [(name, "bfloat16", list(tensor.shape)) for name, tensor in weights]
        size = sum(tensor.nbytes for _, tensor in weights) / GB
        buckets = plan(manifest, bucket_bytes)
        for kind, limits in (("pageable", (1, 60)), ("pinned", (20, 60))):
            flats = [bucket.empty() for bucket in buckets]
            if kind == "pinned" and bench.cuda:
                flats = [flat.pin_memory() for flat in flats]
            copies = []
            for attempt in (1, 2):
                copy = HostCopy((1, attempt), manifest, bucket_bytes, SpareBuffers(flats))
                copies.append(bench.seconds(partial(copy.take, weights, digests=False)))
            bench.within(f"{size:.1f} GB into {kind} host memory", size / min(copies), *limits, "GB/s")
        del weights, flats
        gc.collect()
    backend = "nccl" if bench.cuda else "gloo"
    weights = device_weights(1.55, bench)
    manifest = [(name, "bfloat16", list(tensor.shape)) for name, tensor in weights]
    size = sum(tensor.nbytes for _, tensor in weights) / GB

    async def passes() -> list[float]:
        pulls = MemoryChannel("127.0.0.1", bucket_bytes, 60.0)
        channel = CollectiveChannel("127.0.0.1", bucket_bytes, 60.0, backend, pulls)  # type: ignore[arg-type]
        seconds = []
        for step in (1, 2, 3):
            await channel.offer((1, step), weights, manifest)
            began = time.perf_counter()
            await channel.broadcast(weights, manifest, 1, step, 1)
            if bench.cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            await channel.committed((1, step), weights, manifest)
        await channel.close()
        return seconds

    bench.within(f"broadcast over {backend} to a world of one", size / min(asyncio.run(passes())), 100, 3000, "GB/s")


def engine(bench: Bench, folder: Path) -> None:
    """Measure the ``transformers`` engine, which users get without ``engine: vllm``."""
    from trinity_mq.engines.generation.request import GenerationRequest
    from trinity_mq.engines.torch.generator import TextGenerator

    model = make_folder(folder / "model", "0.5B", bench)
    generator = TextGenerator.build(configuration(model, bench).model, model, num_threads=1)
    length = 512 if bench.cuda else 8
    for rows in (64, 256) if bench.cuda else (2, 4):
        requests = [GenerationRequest([2, 3, 4], max_tokens=length, stop_ids=frozenset(), seed=n) for n in range(rows)]
        seconds = bench.seconds(partial(generator.generate, requests))
        bench.within(f"{rows} rows: milliseconds of a decode step", 1000 * seconds / length, 8, 40, "ms")
        bench.within(f"{rows} rows: tokens a second", rows * length / seconds, 1.5e3, 32e3)


def loop(bench: Bench, folder: Path) -> None:
    """Train the task of ``examples/smoke.yaml`` in one process."""
    from one_process import OneProcess
    from trinity_mq.config import load_config

    config = load_config(ROOT / "examples" / "smoke.yaml", [f"run_dir={folder}/run", f"model.device={bench.device}"])
    steps = 60

    async def train() -> tuple[float, float]:
        process = OneProcess(config, folder, steps)
        await process.open()
        before = process.accuracy()
        for step in range(1, steps + 1):
            await process.step(step)
        after = process.accuracy()
        await process.close()
        return before, after

    before, after = asyncio.run(train())
    bench.add(within("accuracy before", before, 0.0, 0.3))
    bench.add(within(f"accuracy after {steps} steps", after, 0.6, 1.0))


def checkpoint(bench: Bench, _folder: Path) -> None:
    """Copy float32 weights and two moments to pinned host memory, as a checkpoint does."""
    import torch

    from trinity_mq.training.checkpoints.state import HostCopies, StatePart

    columns = int(1.54e9 / 4096 / 32) if bench.cuda else 64
    tensors = {
        f"{kind}.{n}": torch.zeros(4096, columns, device=bench.device)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for n in range(32)
    }
    size = sum(tensor.nbytes for tensor in tensors.values()) / GB
    copies = HostCopies()
    first, second = (bench.seconds(lambda: copies.take({"policy": StatePart(tensors)})) for _ in range(2))
    bench.within(f"first copy of {size:.1f} GB (allocates pinned memory)", first, 0.5, 25, "s")
    bench.within("second copy", size / second, 20, 60, "GB/s")
    copy = copies.take({"policy": StatePart(tensors)})["policy"].tensors
    bench.add(holds("the copies are pinned", all(tensor.is_pinned() for tensor in copy.values()), bench.cuda))


STEPS: dict[str, Callable[[Bench, Path], None]] = {
    step.__name__: step for step in (fork, tests, memory, speed, ranks, sync, engine, loop, checkpoint, child)
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("step", choices=sorted(STEPS))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tmq-gpu-") as folder:
        STEPS[options.step](Bench(options.device), Path(folder))


if __name__ == "__main__":
    main()

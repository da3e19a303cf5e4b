"""Time that training stands still for a checkpoint: written while it goes on, against written at once, in one run.

    python benchmarks/bench_checkpoint.py [--model tiny|135m] [--rounds 3] [--folder FOLDER] [--quick] [--check]
                                          [--json FILE]

The learner is the trainer's own, and each checkpoint is committed as in a run: synced to disk, summed up, renamed.
*stands still* is the time in which no step can be made. The first copy takes its memory from the system; later ones
fill the same buffers. *beside it* is what a train step takes while a checkpoint is being written, as a multiple of a
step by itself, on as many cores as there are. ``--check`` exits with 1 if later copies stand still for more than a
fifth of what writing at once takes.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from trinity_mq.config import Config, load_config
from trinity_mq.experience import Experience
from trinity_mq.models import ensure_model_folder
from trinity_mq.training.checkpoints.checkpoint import CheckpointStore, TrainerProgress
from trinity_mq.training.learner import TorchLearner

LIMIT = 0.2
SHAPE_135M = LlamaConfig(  # that of SmolLM2-135M
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


def configuration(folder: Path, model: str) -> Config:
    """Return a run with a model that is made there if it is a large one."""
    section: dict[str, object] = {"tiny": {}}
    if model == "135m":
        if not (folder / "135m").exists():
            LlamaForCausalLM(SHAPE_135M).save_pretrained(folder / "135m")
        section = {"model_path": str(folder / "135m")}
    return load_config({"name": "bench", "run_dir": str(folder / "run"), "model": {**section, "device": "cpu"}})


def experiences(seed: int, count: int = 4) -> list[Experience]:
    """Return a batch whose content does not matter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Experience(
            tokens=torch.randint(2, 16, (24,), generator=generator, dtype=torch.int32),
            prompt_length=8,
            logprobs=torch.full((16,), -2.7),
            advantages=torch.randn(16, generator=generator),
            temperature=1.0,
        )
        for _ in range(count)
    ]


class Bench:
    """One learner and its checkpoints."""

    def __init__(self, config: Config, model: Path, folder: Path) -> None:
        self.learner = TorchLearner(config, model, None)
        self._store = CheckpointStore(folder, 1)
        self._saved = self._steps = 0

    async def step(self) -> float:
        """Make a train step; return its seconds."""
        self._steps += 1
        batch = experiences(self._steps)
        started = time.perf_counter()
        await self.learner.step(batch, self._steps)
        return time.perf_counter() - started

    async def at_once(self) -> float:
        """Save while nothing else happens; return the seconds."""
        started = time.perf_counter()
        await self._store.save(self.learner.save, self._state())
        return time.perf_counter() - started

    async def beside(self) -> tuple[float, float, list[float]]:
        """Save while steps are made; return for how long none could be made, the seconds of the writing, and those of
        each step meanwhile.
        """
        started = time.perf_counter()
        write = await self.learner.stage()
        still = time.perf_counter() - started
        writing = asyncio.create_task(self._store.save(write, self._state()))
        steps = []
        while not writing.done():
            steps.append(await self.step())
        await writing
        return still, time.perf_counter() - started - still, steps

    def _state(self) -> TrainerProgress:
        self._saved += 1
        return TrainerProgress(generation=1, step=self._saved, progress=self._saved, source={})


async def measured(config: Config, folder: Path, rounds: int) -> tuple[float, float]:
    """Print a table; return the seconds of standing still: written at once, and copied into buffers that are there."""
    bench = Bench(config, ensure_model_folder(config.model, folder / "model", 0), folder / "checkpoints")
    await bench.learner.open(None)
    alone = statistics.median([await bench.step() for _ in range(rounds + 1)][1:])
    at_once = [await bench.at_once() for _ in range(rounds)]
    beside = [await bench.beside() for _ in range(rounds + 1)]
    size = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    later = statistics.median(still for still, _, _ in beside[1:])
    once = statistics.median(at_once)
    busy = statistics.median(one for _, _, steps in beside for one in steps)
    print(f"checkpoint: {size / 2**20:,.0f} MiB; a step by itself: {alone * 1000:,.0f} ms")
    print(f"written at once      stands still {once * 1000:9,.1f} ms")
    print(f"copied, first time   stands still {beside[0][0] * 1000:9,.1f} ms   {once / beside[0][0]:5.1f} times less")
    print(f"copied, later        stands still {later * 1000:9,.1f} ms   {once / later:5.1f} times less")
    writing = statistics.median(seconds for _, seconds, _ in beside[1:])
    print(f"written beside steps in {writing * 1000:,.0f} ms; a step beside it takes {busy / alone:.2f} times as long")
    await bench.learner.close()
    return once, later


def main() -> int:
    """Run it."""
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "135m"), default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="one round with the tiny model: does it run?")
    parser.add_argument("--check", action="store_true")
    figures.add_option(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.model = 1, "tiny"
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=arguments.folder))
    try:
        disable_progress_bar()
        once, later = asyncio.run(measured(configuration(folder, arguments.model), folder, arguments.rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures.write(arguments, {"stands still, of writing at once": later / once})
    return int(arguments.check and later > LIMIT * once)


if __name__ == "__main__":
    sys.exit(main())
